"""Collectives called on a group object, whose backend moves no data."""

import functools
from typing import Any

import torch.distributed as dist

from tpuport.compat.emulated import process_group, replicas
from tpuport.compat.emulated.settings import active
from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core.errors import port_error

_NAMES = (
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce"),
    *("allreduce_coalesced", "alltoall", "alltoall_base", "broadcast", "gather"),
    *("_allgather_base", "_reduce_scatter_base", "recv", "recv_anysource", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "scatter", "send"),
)


class ProcessGroupCalls(Shim):
    """`group.allreduce(...)` and the like are refused: `torch.distributed.all_reduce(...)` is
    answered.
    """

    TARGET = "torch.distributed.ProcessGroup"
    REASON = "the backend that keeps the books of one process leaves its outputs unwritten"
    REFERENCE = "an error, where PyTorch's fake backend gives wrong results"
    MODULE = "torch.distributed.distributed_c10d"

    def replacements(self) -> list[Replacement]:
        return [
            Replacement(dist.ProcessGroup, name, _refused(name, getattr(dist.ProcessGroup, name)))
            for name in _NAMES
            if hasattr(dist.ProcessGroup, name)
        ]


def _refused(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        if active() is None or not process_group.is_ours():
            return original(group, *args, **kwargs)
        if replicas.size() > 1:
            given = [*args, *(one for arg in args if isinstance(arg, list) for one in arg)]
            work = original(group, *args, **kwargs)
            work.wait()
            return replicas.written(work, given)
        raise port_error(
            f"{name}() is called on the process group itself, which tpuport does not answer",
            remedy="call the function of torch.distributed with group=, which it does",
        )

    return call
