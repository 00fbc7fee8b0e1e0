"""The names of torch_xla 2.9: what to write for each, and those that have to go."""

import ast

from tpuport.source.rewrite.matching import Context

PACKAGE = "torch_xla"

_CORE = "torch_xla.core.xla_model"
_RUNTIME = "torch_xla.runtime"
_SPMD = "torch_xla.distributed.spmd"
_LOADER = "torch_xla.distributed.parallel_loader"
_METRICS = "torch_xla.debug.metrics"
_PROFILER = "torch_xla.debug.profiler"

_MESH = "`jax.sharding.Mesh`, or `tpuport.sharding.make_mesh`"
_SHARD = "`tpuport.shard(ported, mesh, rules, inputs=...)`"
_STEP = "`tpuport.training.make_train_step`"
_RANK, _RANKS = "`jax.process_index()`", "`jax.process_count()`"
_HOST = '`torch.device("cpu")`: a training step puts batches on the devices itself'
_COLLECTIVE = "nothing in a step, where the compiler inserts it; `jax.lax.{}` inside of `shard_map`"
_SYNC = "`jax.experimental.multihost_utils.{}`"
_BATCHES = "the loader itself, or `tpuport.training.Batches`, which reads ahead"

# What to write instead.
COUNTERPARTS: dict[str, str] = {
    "torch_xla.device": _HOST,
    "torch_xla.devices": "`jax.local_devices()`",
    "torch_xla.device_count": "`jax.device_count()`",
    "torch_xla.real_devices": "`jax.local_devices()`",
    "torch_xla.compile": f"{_STEP}, or `tpuport.convert` for a model alone",
    "torch_xla.manual_seed": "`torch.manual_seed`, or `step.init(seed=...)`",
    "torch_xla.launch": "a call of the function: one process drives all devices",
    f"{_CORE}.xla_device": _HOST,
    f"{_CORE}.get_xla_supported_devices": "`jax.local_devices()`",
    f"{_CORE}.xla_device_hw": "`jax.default_backend()`",
    f"{_CORE}.optimizer_step": f"{_STEP}; outside of it `optimizer.step()`",
    f"{_CORE}.all_reduce": _COLLECTIVE.format("psum"),
    f"{_CORE}.all_gather": _COLLECTIVE.format("all_gather"),
    f"{_CORE}.reduce_scatter": _COLLECTIVE.format("psum_scatter"),
    f"{_CORE}.all_to_all": _COLLECTIVE.format("all_to_all"),
    f"{_CORE}.collective_permute": _COLLECTIVE.format("ppermute"),
    f"{_CORE}.mesh_reduce": _SYNC.format("process_allgather"),
    f"{_CORE}.rendezvous": _SYNC.format("sync_global_devices"),
    f"{_CORE}.is_master_ordinal": f"{_RANK} == 0",
    f"{_CORE}.get_ordinal": _RANK,
    f"{_CORE}.get_local_ordinal": "0: one process drives all devices of a host",
    f"{_CORE}.xrt_world_size": _RANKS,
    f"{_CORE}.master_print": "`print`",
    f"{_CORE}.save": "`torch.save`, or `tpuport.training.Checkpoints`",
    f"{_CORE}.add_step_closure": "a call of the function with `tpuport.to_torch` of what it reads",
    f"{_CORE}.get_rng_state": "`state.key` of the training state",
    f"{_CORE}.set_rng_state": "`torch.manual_seed`, or `step.init(seed=...)`",
    f"{_CORE}.get_memory_info": "`device.memory_stats()` of a `jax.Device`",
    f"{_CORE}.wait_device_ops": "`jax.block_until_ready`",
    f"{_CORE}.RateTracker": "a class of your own; `tpuport.training.fit` logs rates",
    f"{_RUNTIME}.world_size": _RANKS,
    f"{_RUNTIME}.global_ordinal": _RANK,
    f"{_RUNTIME}.process_index": _RANK,
    f"{_RUNTIME}.process_count": _RANKS,
    f"{_RUNTIME}.local_ordinal": "0: one process drives all devices of a host",
    f"{_RUNTIME}.global_runtime_device_count": "`jax.device_count()`",
    f"{_RUNTIME}.global_device_count": "`jax.device_count()`",
    f"{_RUNTIME}.addressable_runtime_device_count": "`jax.local_device_count()`",
    f"{_RUNTIME}.addressable_device_count": "`jax.local_device_count()`",
    f"{_RUNTIME}.local_device_count": "`jax.local_device_count()`",
    f"{_RUNTIME}.device_type": "`jax.default_backend().upper()`",
    f"{_RUNTIME}.initialize_cache": "`tpuport.compile_cache`",
    f"{_LOADER}.MpDeviceLoader": _BATCHES,
    f"{_LOADER}.ParallelLoader": _BATCHES,
    f"{_SPMD}.Mesh": _MESH,
    f"{_SPMD}.HybridMesh": "`tpuport.sharding.make_mesh(..., dcn=...)`",
    f"{_SPMD}.ShardingSpec": "`jax.sharding.PartitionSpec`",
    f"{_SPMD}.mark_sharding": f"{_SHARD}; `Activations` of its rules inside of a model",
    f"{_SPMD}.mark_sharding_with_gradients": f"{_SHARD}; `Activations` inside of a model",
    f"{_SPMD}.clear_sharding": "`tpuport.shard(ported, mesh, 'replicated')`",
    "torch_xla.distributed.xla_multiprocessing.spawn": "a call of the function:"
    " one process drives all devices",
    "torch_xla.distributed.fsdp.XlaFullyShardedDataParallel": "`tpuport.shard(ported, mesh,"
    " 'fsdp')`",
    "torch_xla.distributed.fsdp.checkpoint_module": "`tpuport.remat`",
    "torch_xla.experimental.spmd_fully_sharded_data_parallel.SpmdFullyShardedDataParallel": (
        "`tpuport.shard(ported, mesh, 'fsdp')`"
    ),
    "torch_xla.utils.checkpoint.checkpoint": "`tpuport.remat`, or `torch.utils.checkpoint`",
    "torch_xla.utils.utils.SampleGenerator": "a list: `[data] * sample_count`",
    "torch_xla.amp.autocast": "`torch.autocast`, or `tpuport.cast`",
    "torch_xla.amp.GradScaler": "nothing: bfloat16 needs no scale",
    "torch_xla.experimental.scan_layers.scan_layers": "`tpuport.stack_blocks`",
    "torch_xla.experimental.scan.scan": "a loop, or `jax.lax.scan`",
    "torch_xla.experimental.custom_kernel.flash_attention": "`scaled_dot_product_attention`"
    " of torch",
    f"{_METRICS}.metrics_report": "`ported.report`, `step.retraces` and `step.causes`",
    f"{_METRICS}.metric_data": "`ported.report`, `step.retraces` and `step.causes`",
    f"{_METRICS}.counter_value": "`ported.report`, `step.retraces` and `step.causes`",
    "torch_xla._XLAC._xla_metrics_report": "`ported.report`, `step.retraces` and `step.causes`",
    f"{_PROFILER}.start_server": "`jax.profiler.start_server`",
    f"{_PROFILER}.start_trace": "`jax.profiler.start_trace`",
    f"{_PROFILER}.stop_trace": "`jax.profiler.stop_trace`",
    f"{_PROFILER}.trace": "`jax.profiler.start_trace` and `stop_trace`",
    f"{_PROFILER}.Trace": "`jax.named_scope`",
    f"{_PROFILER}.StepTrace": "`jax.profiler.StepTraceAnnotation`",
}

_NOT_LAZY = "no tensor is lazy: there is no step to end"

# What has no counterpart, because nothing has to be done; and why.
NEEDLESS: dict[str, str] = {
    "torch_xla.sync": _NOT_LAZY,
    "torch_xla.step": _NOT_LAZY,
    f"{_CORE}.mark_step": _NOT_LAZY,
    f"{_CORE}.unlazy": _NOT_LAZY,
    f"{_CORE}.reduce_gradients": "the compiler sums gradients over the devices",
    f"{_CORE}.broadcast_master_param": "one process holds the weights",
    f"{_RUNTIME}.use_spmd": "jax has no other mode",
    f"{_RUNTIME}.is_spmd": "jax has no other mode",
    f"{_SPMD}.set_global_mesh": "`tpuport.shard` is given the mesh",
    f"{_METRICS}.clear_all": "the counters are those of each model",
    f"{_METRICS}.clear_counters": "the counters are those of each model",
    "torch_xla.experimental.eager_mode": _NOT_LAZY,
    "torch_xla.experimental.compile": f"{_STEP} compiles the step",
}

# Names under which the same modules can be imported.
_ALIASES = {
    "torch_xla.experimental.xla_sharding": _SPMD,
    "torch_xla.distributed.spmd.xla_sharding": _SPMD,
    "torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel": "torch_xla.distributed.fsdp",
}


def canonical(name: str) -> str:
    """Return the name of a thing in torch_xla as the tables have it."""
    module, _, last = name.rpartition(".")
    return f"{_ALIASES.get(module, module)}.{last}"


def is_torch_xla(name: str | None) -> bool:
    """Return whether a full name is one of torch_xla's."""
    return name is not None and (name == PACKAGE or name.startswith(f"{PACKAGE}."))


def uses_torch_xla(context: Context) -> bool:
    """Return whether a file imports torch_xla."""
    return any(is_torch_xla(name) for name in context.module.imports.values())


def name_in_torch_xla(node: ast.expr, context: Context) -> str | None:
    """Return the name that the tables have for a thing of torch_xla, or None."""
    name = context.name(node)
    return canonical(name) if name is not None and is_torch_xla(name) else None
