"""Names of torch_xla that are not served: each can be imported, and raises where it is used."""

from typing import Any, NoReturn

from tpuport.tracing.core.errors import port_error


class Refused:
    """A name that is not served. Every use but an import raises an error that names it."""

    def __init__(self, path: str, remedy: str) -> None:
        self._path, self._remedy = path, remedy

    def __repr__(self) -> str:
        return f"<{self._path}, which tpuport does not serve>"

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise port_error(f"{self._path} is not served by tpuport", remedy=self._remedy)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{self!r} has no {name}")
        self._refuse()

    __call__ = __iter__ = __bool__ = __enter__ = __getitem__ = __mro_entries__ = _refuse


_EXPORT = "export with jax.export: tpuport.convert(model), then jax.export of ported.apply"
_BUILDER = "write the computation in jax, outside of the program"
_KERNEL = "call a kernel of jax.experimental.pallas, or plain attention, which is fused for TPU"
_CHECKPOINT = "save the state_dict with xm.save, or arrays with orbax (tpuport.training)"
_INTERNAL = "it is part of torch_xla's own runtime, which does not run here: leave it out"
_PROCESSES = "there is one process: guard the call by xr.world_size() > 1"

# Modules below `torch_xla._internal`, which training code imports in spite of their name.
_PRIVATE = (
    *("c10d_registration", "custom_kernel", "decomp_registration", "jax_workarounds", "neuron"),
    *("pjrt", "rendezvous", "tpu", "utils", "xpu"),
)
# Modules of which no name is served, by what to do instead.
MODULES = {
    "torch_xla.stablehlo": _EXPORT,
    "torch_xla.tf_saved_model_integration": _EXPORT,
    "torch_xla.utils.stablehlo_test_utils": _EXPORT,
    "torch_xla.experimental.stablehlo_custom_call": _EXPORT,
    "torch_xla.experimental.unbounded_dynamism_export": _EXPORT,
    "torch_xla.experimental.xla_dynamic_reshape_ops": _EXPORT,
    "torch_xla.experimental.xla_marker": _EXPORT,
    "torch_xla.experimental.mark_pattern_utils": _EXPORT,
    "torch_xla.experimental.xla_mlir_debuginfo": _EXPORT,
    "torch_xla.core.xla_builder": _BUILDER,
    "torch_xla.core.xla_op_registry": _BUILDER,
    "torch_xla.core.dynamo_bridge": _INTERNAL,
    "torch_xla.debug.frame_parser_util": _INTERNAL,
    "torch_xla.debug.graph_saver": _INTERNAL,
    "torch_xla.debug.metrics_compare_utils": _INTERNAL,
    "torch_xla.debug.metrics_saver": _INTERNAL,
    "torch_xla.debug.model_comparator": "compare with tpuport: every program is compared anyway",
    "torch_xla.distributed.data_parallel": "use MpDeviceLoader, or torch_xla.distributed.spmd",
    "torch_xla.distributed.zero_redundancy_optimizer": "use the optimizer itself, with spmd",
    "torch_xla.distributed.fsdp.consolidate_sharded_ckpts": _CHECKPOINT,
    "torch_xla.distributed.fsdp.xla_flatten_params_wrapper": _INTERNAL,
    "torch_xla.experimental.callback": "read the value, which waits for it",
    "torch_xla.experimental.deprecation": _INTERNAL,
    "torch_xla.experimental.distributed_checkpoint": _CHECKPOINT,
    "torch_xla.experimental.distributed_checkpoint.manager": _CHECKPOINT,
    "torch_xla.experimental.distributed_checkpoint.planners": _CHECKPOINT,
    "torch_xla.experimental.distributed_checkpoint.util": _CHECKPOINT,
    "torch_xla.experimental.dynamo_mark_sharding": _INTERNAL,
    "torch_xla.experimental.dynamo_set_buffer_donor": _INTERNAL,
    "torch_xla.experimental.gradient_accumulation": "call backward() for each micro-batch",
    "torch_xla.experimental.gru": "use torch.nn.GRU",
    "torch_xla.experimental.pallas_kernels": _KERNEL,
    "torch_xla.experimental.pallas_kernels.multi_queries_paged_attention_kernel": _KERNEL,
    "torch_xla.experimental.pallas_kernels.quantized_matmul_kernel": _KERNEL,
    "torch_xla.experimental.pallas_kernels.ragged_paged_attention_kernel": _KERNEL,
    "torch_xla.experimental.pallas_kernels.ragged_paged_attention_v2": _KERNEL,
    "torch_xla.experimental.plugins": _INTERNAL,
    "torch_xla.experimental.quantized": "quantize with torchao, in plain PyTorch",
    "torch_xla.experimental.xla_quantized_matmul": "multiply by the dequantized weight",
    "torch_xla.experimental.splash_attention": _KERNEL,
    "torch_xla.utils.buffer_donor_context": "memory of arguments is not donated: leave it out",
    "torch_xla.utils.checkpoint_tagger": _INTERNAL,
    "torch_xla.utils.dlpack": "use .cpu() and torch's own dlpack",
    "torch_xla.utils.keyd_queue": _INTERNAL,
    "torch_xla._internal": _INTERNAL,
    **dict.fromkeys((f"torch_xla._internal.{name}" for name in _PRIVATE), _INTERNAL),
}

# Other names that are not served, by module, with what to do instead.
NAMES = {
    "torch_xla": {
        _EXPORT: ("save_as_stablehlo", "save_torch_model_as_stablehlo"),
        _INTERNAL: (
            *("c10d_registration", "custom_kernel", "decomp_registration", "neuron", "plugins"),
            *("tpu", "xpu"),
        ),
    },
    "torch_xla.core.functions": {
        "use torch.nn.BatchNorm2d, whose statistics are of the entire batch": ("SyncBatchNorm",),
        "call all_reduce or all_gather of this module": (
            *("AllGather", "AllReduce", "AllReduceSumLayer", "distributed_mm"),
        ),
    },
    "torch_xla.core.xla_model": {
        _PROCESSES: ("send", "recv", "xla_replication_devices"),
        _EXPORT: ("get_stablehlo", "get_stablehlo_bytecode"),
        _INTERNAL: ("DeviceContext", "XLA_LIB", "check_view_sharing"),
    },
    "torch_xla.distributed.fsdp.utils": {
        _INTERNAL: (
            *("BucketizedReduceScatter", "DummyReduceScatter", "dummy_all_gather"),
            "dummy_all_reduce",
        ),
    },
    "torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel": {
        _INTERNAL: (
            *("FLOAT_DTYPES", "TrainingState", "XLA_DISABLE_FUNCTIONALIZATION"),
            *("apply_to_tensors", "collect_tensors"),
        ),
    },
    "torch_xla.distributed.parallel_loader": {_INTERNAL: ("PerDeviceQueue",)},
    "torch_xla.distributed.spmd": {
        "call mark_sharding, which shards the tensor itself": ("XLAShard", "XLAShardedTensor"),
        "choose a mesh and mark_sharding; the partitioner does the rest": (
            *("auto_policy", "xla_distribute_module", "xla_distribute_tensor"),
        ),
        "use jax.shard_map in code of your own": (
            *("enable_manual_sharding", "disable_manual_sharding", "shard_as"),
        ),
    },
    "torch_xla.distributed.spmd.api": {
        "choose a mesh and mark_sharding; the partitioner does the rest": (
            *("auto_policy", "convert_to_xla_mesh", "convert_to_xla_partition_spec", "log"),
            *("with_xla", "xla_distribute_module", "xla_distribute_tensor"),
        ),
    },
    "torch_xla.distributed.spmd.debugging": {
        "print the sharding, or use jax.debug.visualize_array_sharding": (
            *("RICH_ENABLED", "visualize_sharding", "visualize_tensor_sharding"),
        ),
    },
    "torch_xla.distributed.spmd.xla_sharded_tensor": {
        "call mark_sharding, which shards the tensor itself": (
            *("XLAShard", "XLAShardedTensor", "no_dispatch"),
        ),
    },
    "torch_xla.distributed.spmd.xla_sharding": {
        "use jax.shard_map in code of your own": (
            *("enable_manual_sharding", "disable_manual_sharding", "shard_as"),
        ),
        _INTERNAL: (
            *("EinsumLinear", "PyTreeA", "PyTreeB", "aot_mark_sharding_fake"),
            *("unwrap_sharded_tensor", "wrap_as_sharded_tensor"),
        ),
    },
    "torch_xla.distributed.xla_backend": {
        'call torch.distributed.init_process_group("xla")': (
            *("ProcessGroupXla", "new_xla_process_group"),
        ),
    },
    "torch_xla.distributed.xla_multiprocessing": {
        _INTERNAL: ("create_optimized_replica_groups", "device_kind_handler_dict"),
    },
    "torch_xla.experimental.assume_pure": {
        "call assume_pure on the function": (
            *("assume_pure_torch", "j2t_autograd", "make_fake_inputs"),
            "prepare_computation_inputs",
        ),
    },
    "torch_xla.experimental.custom_kernel": {
        _KERNEL: (
            *("FlashAttention", "GMM", "convert_torch_dtype_to_jax", "fa_custom_backward"),
            *("fa_custom_backward_fake", "fa_custom_forward", "fa_custom_forward_fake"),
            *("generate_ctx_need_grad", "gmm", "gmm_backward", "gmm_non_xla", "gmm_xla"),
            *("make_kernel_from_pallas", "multi_queries_paged_attention"),
            *("multi_queries_paged_attention_non_xla", "multi_queries_paged_attention_xla"),
            *("non_xla_attetion", "non_xla_ragged_paged_attention", "paged_attention"),
            *("paged_attention_non_xla", "paged_attention_xla", "quantized_matmul_int8"),
            *("quantized_matmul_int8_non_xla", "quantized_matmul_int8_xla"),
            *("ragged_paged_attention", "ragged_paged_attention_non_xla"),
            *("ragged_paged_attention_xla", "repeat_with_fixed_output_size", "safe_empty_like"),
            *("tgmm", "to_jax_shape_dtype_struct", "trace_pallas", "trace_pallas_arg_to_payload"),
        ),
    },
    "torch_xla.experimental.fori_loop": {
        "use a Python loop, which a program unrolls": ("fori_loop", "while_loop"),
    },
    "torch_xla.experimental.pytreeify": {"return tuples": ("pytreeify",)},
    "torch_xla.experimental.scan": {
        _INTERNAL: (
            *("Builder", "Carry", "Scan", "U", "X", "Y", "dynamic_slice"),
            *("dynamic_update_slice", "split", "tree_flatten_none", "value_and_grad_partitioned"),
        ),
    },
    "torch_xla.runtime": {_PROCESSES: ("get_master_ip",)},
    "torch_xla.utils.checkpoint": {
        "call checkpoint of this module": (
            *("CheckpointFunction", "CheckpointStatus", "chkpt_status", "get_device_states"),
            "set_device_states",
        ),
    },
}


def of_module(name: str) -> dict[str, Any]:
    """Return the refused names of a module."""
    table = NAMES.get(name, {})
    return {
        one: Refused(f"{name}.{one}", remedy) for remedy, names in table.items() for one in names
    }


def all_of_module(name: str) -> dict[str, Any]:
    """Return the attributes of a module that refuses every name."""

    def __getattr__(one: str) -> Any:
        if one.startswith("__"):
            raise AttributeError(f"module {name!r} has no attribute {one!r}")
        return Refused(f"{name}.{one}", MODULES[name])

    return {"__getattr__": __getattr__}
