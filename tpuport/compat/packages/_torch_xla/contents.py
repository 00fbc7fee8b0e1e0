"""Which names each module of torch_xla has: served, or refused."""

import functools
import logging
from types import ModuleType
from typing import Any

import torch.distributed

from tpuport.compat.packages._torch_xla import (
    amp,
    checkpoint,
    closures,
    collectives,
    device,
    experimental,
    fsdp,
    metrics,
    multiprocessing,
    parallel_loader,
    profiler,
    refusals,
    rng,
    runtime,
    serialization,
    spmd,
    state,
    test_utils,
    utils,
    xla_model,
)

_WRAP = (
    *("always_wrap_policy", "lambda_auto_wrap_policy", "recursive_wrap"),
    *("size_based_auto_wrap_policy", "transformer_auto_wrap_policy"),
)
_SPMD = (
    *("Mesh", "HybridMesh", "ShardingType", "ShardingSpec", "XLAPatchedLinear", "mark_sharding"),
    *("mark_sharding_with_gradients", "annotate_custom_sharding", "clear_sharding", "get_1d_mesh"),
    *("wrap_if_sharded", "xla_patched_nn_linear_forward", "set_global_mesh", "get_global_mesh"),
    "apply_backward_optimization_barrier",
)
_EAGER = ("eager_mode", "eager_mode_context", "is_eager_mode")
_FACE = (
    *("device", "devices", "real_devices", "device_count", "sync", "step", "compile"),
    *("manual_seed", "launch"),
)
_OLD_NAMES = ("get_ordinal", "xrt_world_size", "_maybe_convert_to_cpu", "_fetch_gradients")
# Environment variables whose name differs from the constant's.
_OTHER_VARIABLES = {
    "TPU_MESH_CTLER_ADDR": "TPU_MESH_CONTROLLER_ADDRESS",
    "TPU_MESH_CTLER_PORT": "TPU_MESH_CONTROLLER_PORT",
}
_VARIABLES = (
    *("TPUVM_MODE", "TPU_NUM_DEVICES", "CPU_NUM_DEVICES", "CLOUD_TPU_TASK_ID", "ACCELERATOR_TYPE"),
    *("WORKER_ID", "TPU_SKIP_MDS_QUERY", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID"),
    *("TPU_WORKER_HOSTNAMES", "TPU_HOST_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS", "PJRT_DEVICE"),
    *("PJRT_SELECT_DEFAULT_DEVICE", "PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT"),
    *("PJRT_DYNAMIC_PLUGINS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS"),
    *("TPU_PROCESS_ADDRESSES", "TPU_VISIBLE_CHIPS", "TPU_PROCESS_PORT", "PJRT_CPU_ASYNC_CLIENT"),
    *("PJRT_DIST_SERVICE_ADDR", "LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
)


def _own(module: ModuleType) -> dict[str, Any]:
    """Return the public names that a module of ours defines."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", module.__name__) in (module.__name__, None)
        and not isinstance(value, ModuleType)
    }


def _picked(module: ModuleType, *names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


def modules(version: str) -> dict[str, dict[str, Any]]:
    """Return the attributes of each module of a version by its full name."""
    served = _served({"__version__": version})
    found = {name: {**refusals.of_module(name), **names} for name, names in served.items()}
    found |= {name: refusals.all_of_module(name) for name in refusals.MODULES}
    return {name: _with_getattr(name, names) for name, names in found.items()}


def _with_getattr(name: str, names: dict[str, Any]) -> dict[str, Any]:
    """Let a private name that a script asks for be refused by name."""
    if "__getattr__" in names:
        return names

    def __getattr__(one: str) -> Any:
        # `hasattr` and `from ... import` have to learn that a public name is not there.
        if not one.startswith("_") or one.startswith("__"):
            raise AttributeError(f"module {name!r} has no attribute {one!r}")
        return refusals.Refused(f"{name}.{one}", "it is private to torch_xla: leave it out")

    return {**names, "__getattr__": __getattr__}


def _served(version: dict[str, Any]) -> dict[str, dict[str, Any]]:
    face = {**_picked(device, *_FACE), **version}
    backends = _picked(runtime, "set_mat_mul_precision", "get_mat_mul_precision")
    return {
        "torch_xla": {
            **face,
            "dist": torch.distributed,
            "logger": logging.getLogger("torch_xla"),
        },
        "torch_xla.torch_xla": face,
        "torch_xla.version": version,
        "torch_xla._XLAC": {
            "_xla_metrics_report": metrics.metrics_report,
            "_get_xla_sharding_spec": spmd.sharding_text,
            "_xla_get_default_device": lambda: "xla:0",
            "_xla_set_mat_mul_precision": runtime.set_mat_mul_precision,
            "_xla_get_mat_mul_precision": runtime.get_mat_mul_precision,
            "_xla_computation_cache_is_initialized": lambda: "cache" in state.STATE.counts,
        },
        "torch_xla.runtime": _without(_own(runtime), *backends, "wait_device_ops"),
        "torch_xla.backends": {**backends, "logger": logging.getLogger("torch_xla")},
        **_core(),
        **_debug(),
        **_distributed(),
        **_experimental(),
        **_amp_and_utils(),
    }


def _without(names: dict[str, Any], *left_out: str) -> dict[str, Any]:
    return {name: value for name, value in names.items() if name not in left_out}


def _core() -> dict[str, dict[str, Any]]:
    functions = ("all_reduce_function", "all_gather_function")
    model = {
        **_without(_own(collectives), *functions),
        **_own(xla_model),
        **_picked(xla_model, *_OLD_NAMES),
        **_picked(rng, "set_rng_state", "get_rng_state", "fork_rng"),
        "_run_step_closures": state.mark_step,
    }
    return {
        "torch_xla.core": {},
        "torch_xla.core.xla_model": model,
        "torch_xla.core.functions": {
            "all_reduce": collectives.all_reduce_function,
            "all_gather": collectives.all_gather_function,
        },
        "torch_xla.core.xla_env_vars": {
            n: _OTHER_VARIABLES.get(n, n) for n in (*_VARIABLES, *_OTHER_VARIABLES)
        },
    }


def _debug() -> dict[str, dict[str, Any]]:
    return {
        "torch_xla.debug": {},
        "torch_xla.debug.metrics": _without(_own(metrics), "traces", "end"),
        "torch_xla.debug.profiler": {
            **_without(_own(profiler), "NamedTrace"),
            "Trace": profiler.NamedTrace,
        },
        "torch_xla.test": {},
        "torch_xla.test.test_utils": _own(test_utils),
    }


def _distributed() -> dict[str, dict[str, Any]]:
    wrapper = _picked(fsdp, "XlaFullyShardedDataParallel")
    sharding = _without(_own(spmd), "split_over_devices", "sharding_text")
    patches = _picked(spmd, "XLAPatchedLinear", "apply_xla_patch_to_nn_linear")
    states = ("consolidate_sharded_model_checkpoints", "consolidate_sharded_state_dicts")
    joining = _picked(fsdp, *states)
    face = {**wrapper, **joining, **_picked(fsdp, "checkpoint_module")}
    sharding["PartitionSpec"] = spmd.PartitionSpec
    return {
        "torch_xla.distributed": {},
        "torch_xla.distributed.parallel_loader": _own(parallel_loader),
        "torch_xla.distributed.xla_multiprocessing": _own(multiprocessing),
        "torch_xla.distributed.xla_backend": {"dist": torch.distributed},
        "torch_xla.distributed.spmd": _picked(spmd, *_SPMD),
        "torch_xla.distributed.spmd.api": {},
        "torch_xla.distributed.spmd.debugging": {},
        "torch_xla.distributed.spmd.xla_sharded_tensor": {},
        "torch_xla.distributed.spmd.xla_sharding": sharding,
        "torch_xla.experimental.xla_sharding": sharding,  # its name before 2.2
        "torch_xla.distributed.fsdp": face,
        "torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel": wrapper,
        "torch_xla.distributed.fsdp.state_dict_utils": joining,
        "torch_xla.distributed.fsdp.wrap": _picked(fsdp, *_WRAP),
        "torch_xla.distributed.fsdp.utils": {
            **patches,
            **_picked(fsdp, "checkpoint_module"),
        },
        "torch_xla.experimental.spmd_fully_sharded_data_parallel": _picked(
            fsdp, "SpmdFullyShardedDataParallel"
        ),
        "torch_xla.experimental.pjrt_backend": {},
    }


def _experimental() -> dict[str, dict[str, Any]]:
    eager = _picked(experimental, *_EAGER)
    attention = functools.partial(_picked, experimental)
    return {
        "torch_xla.experimental": eager,
        "torch_xla.experimental.eager": eager,
        "torch_xla.experimental.scan": attention("scan"),
        "torch_xla.experimental.scan_layers": attention("scan_layers"),
        "torch_xla.experimental.assume_pure": attention("assume_pure", "PureModule"),
        "torch_xla.experimental.fori_loop": {},
        "torch_xla.experimental.pytreeify": {},
        "torch_xla.experimental.custom_kernel": {
            **attention("flash_attention", "DEFAULT_MASK_VALUE"),
            "flash_attention_xla": experimental.flash_attention,
            "flash_attention_non_xla": experimental.flash_attention,
        },
    }


def _amp_and_utils() -> dict[str, dict[str, Any]]:
    syncfree = {name: _picked(amp, name) for name in ("Adam", "AdamW", "SGD")}
    return {
        "torch_xla.amp": {
            **_picked(amp, "autocast", "GradScaler"),
        },
        "torch_xla.amp.autocast_mode": _picked(amp, "autocast"),
        "torch_xla.amp.syncfree": {k: v for one in syncfree.values() for k, v in one.items()},
        **{f"torch_xla.amp.syncfree.{name.lower()}": one for name, one in syncfree.items()},
        "torch_xla.utils": {},
        "torch_xla.utils.utils": _own(utils),
        "torch_xla.utils.closures": _own(closures),
        "torch_xla.utils.serialization": {
            **_own(serialization),
            "TensorReference": serialization.TensorReference,
        },
        "torch_xla.utils.checkpoint": _own(checkpoint),
    }
