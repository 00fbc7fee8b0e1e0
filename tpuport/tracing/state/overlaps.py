"""Parameters, buffers and other tensors of a module that share memory without being one tensor.

A program has a value for each of them, so a write to one of them is refused.
"""

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import torch

from tpuport.foundation.errors import PortError
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.tensor import TracedTensor


def overlapping(leaves: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Find the pairs of tensors, by name, that have an element in common."""
    by_memory: dict[int, list[str]] = {}
    for name, leaf in leaves.items():
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, TracedTensor):
            continue
        if leaf.layout is torch.strided and leaf.device.type == "cpu" and leaf.numel():
            by_memory.setdefault(leaf.untyped_storage()._cdata, []).append(name)
    for names in by_memory.values():
        for a, b in combinations(names, 2):
            if _meet(leaves[a], leaves[b]):
                yield a, b


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    (low, end), (other, last) = _span(a), _span(b)
    if end <= other or last <= low:
        return False
    if a.itemsize != b.itemsize:
        return True
    first, size = min(low, other), max(end, last) - min(low, other)
    unit = a.itemsize
    seen = torch.zeros(size // unit, dtype=torch.bool)
    seen.as_strided(a.shape, a.stride(), (low - first) // unit).fill_(True)
    return bool(seen.as_strided(b.shape, b.stride(), (other - first) // unit).any())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its memory, and the one after its last."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    low = int(torch.Tensor.storage_offset(tensor)) * tensor.itemsize
    return low, low + int(reach + 1) * tensor.itemsize


def link(
    trace: Trace, leaves: dict[str, Any], traced: dict[str, Any]
) -> Callable[[frozenset[str]], None]:
    """Refuse writes to tensors of the state that share memory, at the line where they are seen.

    Args:
        trace: The trace.
        leaves: The tensors of the module, by name.
        traced: The tensors of the trace that stand for them, by name.

    Returns:
        A check of the names of what the call changed, for those whose writes are not seen.
    """
    unseen: dict[str, tuple[str, str]] = {}
    for a, b in overlapping(leaves):
        if a in traced and b in traced:
            stored = traced[a]._storage, traced[b]._storage
            trace.shared.add(*stored, None, 0, lambda a=a, b=b: _refusal(a, b))
        else:
            unseen |= {a: (a, b), b: (b, a)}

    def is_written(name: str) -> bool:
        if name in traced:
            return traced[name]._storage.version > 0
        return trace.alias(leaves[name]) is not None

    def check(changed: frozenset[str]) -> None:
        for name in changed & unseen.keys():
            if is_written(name):  # an attribute that was assigned anew is no write
                raise _refusal(*unseen[name])

    return check


def _refusal(a: str, b: str) -> PortError:
    return port_error(
        f"a write to '{a}' or '{b}' of the module, which are views of the same memory",
        code="TPU202",
        remedy="keep one of them, and take the view of it in forward",
    )
