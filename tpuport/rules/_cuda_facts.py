"""Calls that fail on a machine without CUDA, or without a process group.

The functions were run, and raise, with the CPU build of torch 2.13. Other functions of `torch.cuda`
answer there (`is_available`, `device_count`, `memory_allocated`) or do nothing (`empty_cache`,
`manual_seed`).
"""

# Functions of torch.cuda that are called for their effect only.
CUDA_ACTIONS = frozenset(
    {
        "synchronize",
        "set_device",
        "reset_peak_memory_stats",
        "reset_max_memory_allocated",
        "reset_max_memory_cached",
        "reset_accumulated_memory_stats",
        "ipc_collect",
        "init",
        "set_per_process_memory_fraction",
        "set_sync_debug_mode",
        "nvtx.range_push",
        "nvtx.range_pop",
        "nvtx.mark",
    }
)
# Functions and classes of torch.cuda whose result is used.
CUDA_VALUES = frozenset(
    {
        "current_device",
        "get_device_properties",
        "get_device_name",
        "get_device_capability",
        "current_stream",
        "default_stream",
        "Event",
        "Stream",
        "ExternalStream",
        "CUDAGraph",
        "graph",
        "graph_pool_handle",
        "is_current_stream_capturing",
        "mem_get_info",
        "make_graphed_callables",
        "get_rng_state",
        "initial_seed",
        "memory_summary",
        "memory_snapshot",
        "can_device_access_peer",
        "get_per_process_memory_fraction",
        "get_sync_debug_mode",
        "cudart",
        "current_blas_handle",
        "get_allocator_backend",
        "FloatTensor",
        "DoubleTensor",
        "HalfTensor",
        "BFloat16Tensor",
        "LongTensor",
        "IntTensor",
        "BoolTensor",
        "ByteTensor",
        "utilization",
        "temperature",
        "power_draw",
        "clock_rate",
        "memory_usage",
        "nvtx.range",
        "nccl.version",
        "device",
    }
)

# With a single process these leave their tensor unchanged.
NOTHING_ALONE = frozenset({"barrier", "monitored_barrier", "all_reduce", "broadcast"})
# The results of these with a single process, as source text.
VALUES_ALONE = {"get_rank": "0", "get_world_size": "1"}
# Functions and classes of torch.distributed that raise without a process group.
NEED_GROUP = frozenset(
    {
        *NOTHING_ALONE,
        *VALUES_ALONE,
        "all_gather",
        "all_gather_object",
        "all_gather_into_tensor",
        "broadcast_object_list",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "all_to_all",
        "all_to_all_single",
        "scatter",
        "gather",
        "gather_object",
        "scatter_object_list",
        "send",
        "recv",
        "isend",
        "irecv",
        "new_group",
        "new_subgroups",
        "get_backend",
        "init_process_group",
        "P2POp",
        "batch_isend_irecv",
        "get_process_group_ranks",
        "get_global_rank",
        "device_mesh.init_device_mesh",
        "init_device_mesh",
        "fsdp.FullyShardedDataParallel",
        "fsdp.fully_shard",
        "nn.all_gather",
        "nn.all_reduce",
        "nn.functional.all_gather",
        "nn.functional.all_reduce",
    }
)
GROUP_WRAPPERS = frozenset(
    {
        "torch.nn.parallel.DistributedDataParallel",
        "torch.nn.parallel.distributed.DistributedDataParallel",
    }
)
