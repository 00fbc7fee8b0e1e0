"""`torch.distributed` of one process: NCCL needs GPUs, and the compiler spreads the programs."""

import functools
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tpuport.compat.emulated import process_group, replicas
from tpuport.compat.emulated.settings import active
from tpuport.compat.shims._collectives import COLLECTIVES
from tpuport.foundation.patching.shim import Replacement, Shim, copies
from tpuport.tracing.patches._count import count


class Distributed(Shim):
    """Process groups of one process, whatever the backend, and the collectives in them.

    Sizes stay 1 under a JAX mesh too: the program is written for one device, and the partitioner
    spreads it over the mesh.
    """

    TARGET = "torch.distributed"
    REASON = "NCCL needs GPUs, and a real backend cannot be called from a traced program"
    REFERENCE = "torch.distributed with the gloo backend and a world of 1"
    MODULE = "torch.distributed.distributed_c10d"

    def replacements(self) -> list[Replacement]:
        ours = {name: _inside(name, call) for name, call in COLLECTIVES.items()}
        ours |= {name: make(getattr(c10d, name)) for name, make in _MADE.items()}
        ours = {name: call for name, call in ours.items() if hasattr(c10d, name)}
        found = [
            Replacement(module, name, call)
            for name, call in ours.items()
            for module in (c10d, dist)
            if hasattr(module, name)
        ]
        # Only in the package: PyTorch's own modules ask c10d, and must see the real backend.
        found.append(Replacement(dist, "get_backend", _get_backend(dist.get_backend)))
        copied = [copies(getattr(c10d, name), call, c10d) for name, call in ours.items()]
        return found + [one for made in copied for one in made if one.owner is not dist]

    def copied(self) -> list[Any]:
        return [getattr(c10d, name) for name in (*COLLECTIVES, *_MADE) if hasattr(c10d, name)]


def _inside(name: str, ours: Any) -> Any:
    """Return the collective of one process where the group is ours, else PyTorch's own."""
    original = getattr(c10d, name, None)

    @functools.wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        if active() is None or (dist.is_initialized() and not process_group.is_ours()):
            if original is None:
                raise AttributeError(f"module 'torch.distributed' has no attribute {name!r}")
            return original(*args, **kwargs)
        if replicas.size() > 1:
            return _among_replicas(name, original, args, kwargs)
        count(f"torch.distributed.{name}")
        return ours(*args, **kwargs)

    return call


def _among_replicas(name: str, original: Any, args: Any, kwargs: Any) -> Any:
    """Call PyTorch's own function, which writes to tensors unseen."""
    given = (*args, *kwargs.values())
    replicas.refuse_traced(f"torch.distributed.{name}", given)
    with replicas.ending_together(f"torch.distributed.{name}"):
        result = original(*args, **kwargs)
        if isinstance(result, dist.Work):
            result.wait()
    return replicas.written(result, given)


def _init_process_group(original: Any) -> Any:
    @functools.wraps(original)
    def init_process_group(
        backend: Any = None,
        init_method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        group_name: str = "",
        pg_options: Any = None,
        device_id: Any = None,
        **rest: Any,
    ) -> None:
        if active() is None:
            return original(
                backend,
                init_method,
                timeout,
                world_size,
                rank,
                store,
                group_name,
                pg_options,
                device_id,
                **rest,
            )
        return process_group.begin(original, backend, world_size, rank, timeout)

    return init_process_group


def _new_group(original: Any) -> Any:
    @functools.wraps(original)
    def new_group(
        ranks: Any = None,
        timeout: Any = None,
        backend: Any = None,
        pg_options: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if active() is None or not process_group.is_ours():
            return original(ranks, timeout, backend, pg_options, *args, **kwargs)
        kwargs.pop("device_id", None)
        kind = "fake" if replicas.size() == 1 else "gloo"
        group = original(ranks, timeout, kind, None, *args, **kwargs)
        if backend is not None:
            process_group.note(group, backend)
        return group

    return new_group


def _destroy(original: Any) -> Any:
    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        whole = group is None or group is c10d.GroupMember.WORLD
        ours = process_group.is_ours()
        original(group)
        if whole and ours:
            process_group.forget()

    return destroy_process_group


def _get_backend(original: Any) -> Any:
    @functools.wraps(original)
    def get_backend(group: Any = None) -> str:
        found = original(group)
        return process_group.asked_backend(group) or found if process_group.is_ours() else found

    return get_backend


def _yes(original: Any) -> Any:
    @functools.wraps(original)
    def is_available() -> bool:
        return active() is not None or original()

    return is_available


# Those that call PyTorch's own, by what makes them of it.
_MADE = {
    "init_process_group": _init_process_group,
    "new_group": _new_group,
    "destroy_process_group": _destroy,
    "is_nccl_available": _yes,
}
