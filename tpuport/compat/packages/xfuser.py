"""xDiT's parallel state for one process."""

from typing import Any

from tpuport.compat.packages._package import Package
from tpuport.compat.packages._parallel_state import GroupTable, OnlyGroup

DIMENSIONS = (
    *("sequence_parallel", "ulysses_parallel", "ring_parallel", "pipeline_parallel"),
    *("classifier_free_guidance", "data_parallel", "tensor_model_parallel", "dit_model_parallel"),
)
GROUPS = ("get_sp_group", "get_world_group", "get_pp_group", "get_cfg_group", "get_tp_group")


class Xfuser(Package):
    """`xfuser.core.distributed`: sizes 1, ranks 0, groups that give back what they are given.

    `porting(xfuser={"sizes": {"sequence_parallel": 2}})` gives other sizes.
    """

    NAME = "xfuser"
    DISTRIBUTION = "xfuser"
    VERSION = "0.4.5"
    TARGET = "xfuser.core.distributed"
    REASON = "models ask it for their place among processes, of which there is one"
    REFERENCE = "xfuser.core.distributed: each collective of a group of 1 returns its input"
    IF_MISSING = True

    def modules(self) -> dict[str, dict[str, Any]]:
        table = GroupTable("xfuser", self.options().get("sizes", {}))
        table.dimensions(DIMENSIONS)
        for name in GROUPS:
            table.answers(OnlyGroup("xfuser", name), name)
        table.answers(True, "is_pipeline_first_stage", "is_pipeline_last_stage")
        table.answers(True, "is_dp_last_group", "model_parallel_is_initialized")
        table.answers(None, "destroy_model_parallel", "destroy_distributed_environment")
        table.initializers("initialize_model_parallel", "init_distributed_environment")
        functions = table.finish()
        return {
            "xfuser": {"__version__": self.version()},
            "xfuser.core": {},
            "xfuser.core.distributed": functions,
            "xfuser.core.distributed.parallel_state": functions,
        }
