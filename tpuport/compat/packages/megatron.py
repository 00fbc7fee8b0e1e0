"""Megatron-Core's parallel state for one process."""

from typing import Any

from tpuport.compat.packages._package import Package
from tpuport.compat.packages._parallel_state import GroupTable

DIMENSIONS = (
    *("tensor_model_parallel", "pipeline_model_parallel", "model_parallel", "data_parallel"),
    *(
        "context_parallel",
        "expert_model_parallel",
        "expert_tensor_parallel",
        "expert_data_parallel",
    ),
    *("virtual_pipeline_model_parallel", "tensor_and_data_parallel", "tensor_and_context_parallel"),
)


class Megatron(Package):
    """`megatron.core.parallel_state` (and `mpu`): sizes 1, ranks 0, groups None.

    `porting(megatron={"sizes": {"tensor_model_parallel": 2}})` gives other sizes.
    """

    NAME = "megatron"
    DISTRIBUTION = "megatron-core"
    VERSION = "0.14.0"
    TARGET = "megatron.core.parallel_state"
    REASON = "models ask it for their place among processes, of which there is one"
    REFERENCE = "megatron.core.parallel_state after initialize_model_parallel() in a world of 1"
    IF_MISSING = True

    def modules(self) -> dict[str, dict[str, Any]]:
        table = GroupTable("megatron", self.options().get("sizes", {}))
        table.dimensions(DIMENSIONS)
        table.answers(None, "get_virtual_pipeline_model_parallel_world_size")
        table.answers(None, "get_virtual_pipeline_model_parallel_rank")
        table.answers(0, "get_tensor_model_parallel_src_rank", "get_data_parallel_src_rank")
        table.answers(0, "get_pipeline_model_parallel_first_rank")
        table.answers(0, "get_pipeline_model_parallel_last_rank")
        table.answers(True, "is_pipeline_first_stage", "is_pipeline_last_stage")
        table.answers(True, "is_rank_in_embedding_group", "model_parallel_is_initialized")
        table.answers(True, "is_initialized")
        table.answers(None, "destroy_model_parallel", "get_embedding_group")
        table.initializers("initialize_model_parallel")
        functions = table.finish()
        return {
            "megatron": {},
            "megatron.core": {"__version__": self.version()},
            "megatron.core.parallel_state": functions,
            "megatron.core.mpu": functions,
        }
