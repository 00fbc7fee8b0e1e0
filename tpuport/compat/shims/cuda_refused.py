"""Parts of `torch.cuda` that only a GPU can provide, which are refused with a reason."""

import importlib
from typing import Any

from tpuport.compat.emulated.settings import active
from tpuport.compat.shims._inside import inside
from tpuport.foundation.errors import UsageError
from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.foundation.user_frames import user_line

_GRAPHS = (
    "CUDA graphs do not exist on TPU, and are not needed: a ported program is compiled once and"
    " launched as one. What to do: call the function itself"
)
_COPIES = (
    "copies between the GPUs of one process do not exist on TPU: there is one accelerator a"
    " process. What to do: shard the arrays over a mesh (tpuport.sharding)"
)
_LIBRARY = "there is no CUDA runtime library here. What to do: guard the call, or remove it"

_REFUSED = {
    "torch.cuda": {
        "CUDAGraph": _GRAPHS,
        "graph": _GRAPHS,
        "make_graphed_callables": _GRAPHS,
        "graph_pool_handle": _GRAPHS,
        "cudart": _LIBRARY,
        "caching_allocator_alloc": _LIBRARY,
        "caching_allocator_delete": _LIBRARY,
        "MemPool": _LIBRARY,
        "CUDAPluggableAllocator": _LIBRARY,
        "change_current_allocator": _LIBRARY,
        "memory_snapshot": _LIBRARY,
        "ExternalStream": _LIBRARY,
        "temperature": _LIBRARY,
        "power_draw": _LIBRARY,
        "clock_rate": _LIBRARY,
    },
    "torch.cuda.graphs": {
        "CUDAGraph": _GRAPHS,
        "graph": _GRAPHS,
        "make_graphed_callables": _GRAPHS,
    },
    "torch.cuda.nccl": dict.fromkeys(
        ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"), _COPIES
    ),
    "torch.nn.parallel.comm": dict.fromkeys(
        ("broadcast", "broadcast_coalesced", "reduce_add", "scatter", "gather"), _COPIES
    ),
}


def _refusal(name: str, why: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        msg = f"{user_line()}: {name}: {why}"
        raise UsageError(msg)

    return refuse


def _refused_class(original: type, refuse: Any) -> type:
    """Return a refusing subclass; annotations (`CUDAGraph | None`) and `isinstance` need one."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        del cls
        return (original if active() is None else refuse)(*args, **kwargs)

    values = {"__new__": new, "__module__": original.__module__, "__doc__": original.__doc__}
    return type(original.__name__, (original,), values)


class CudaRefused(Shim):
    """CUDA graphs, NCCL by hand, the CUDA runtime library and its allocators."""

    TARGET = "torch.cuda.CUDAGraph"
    REASON = "torch says that it was not compiled with CUDA, which tells nobody what to do"
    REFERENCE = "torch without CUDA refuses them too"

    def replacements(self) -> list[Replacement]:
        found = []
        for module_name, refused in _REFUSED.items():
            module = importlib.import_module(module_name)
            for name, why in refused.items():
                original = getattr(module, name, None)
                if original is None:
                    continue
                refuse = _refusal(f"{module_name}.{name}", why)
                make = _refused_class if isinstance(original, type) else inside
                found.append(Replacement(module, name, make(original, refuse)))
        return found
