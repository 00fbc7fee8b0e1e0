"""Results that are views of other tensors with another dtype, and results that overlap."""

from collections.abc import Mapping
from typing import Any

import torch

from tpuport.foundation.errors import PortError
from tpuport.foundation.interop.device_mark import mark_of, tag
from tpuport.tracing.core.errors import error_here
from tpuport.tracing.state.request import Alias, Sibling


def other_view(owner: torch.Tensor, alias: Alias, result: torch.Tensor) -> torch.Tensor | None:
    """Return a result as a window into the memory of a tensor with another dtype, if it can be one.

    Args:
        owner: the tensor.
        alias: the window.
        result: the result, which has the window's values.
    """
    if alias.is_noted or alias.is_cut or (result.requires_grad and not owner.requires_grad):
        return None
    start = int(owner.storage_offset()) * owner.itemsize + alias.byte
    if start % result.itemsize:
        return None
    place = alias.size, alias.stride, start // result.itemsize
    with torch._C.DisableTorchFunction():
        if not result.requires_grad:
            made: Any = torch.empty(0, dtype=result.dtype)
            return tag(made.set_(owner.untyped_storage(), place[2], *place[:2]))
        if owner.is_complex() and result.dtype is owner.dtype.to_real():
            return tag(torch.view_as_real(owner).as_strided(*place))
        if result.is_complex() and owner.dtype is result.dtype.to_real():
            size, stride = (*alias.size, 2), (*(2 * step for step in alias.stride), 1)
            return tag(torch.view_as_complex(owner.as_strided(size, stride, 2 * place[2])))
    return None


def share_overlapping(aliases: Mapping[int, Alias], results: list[Any]) -> None:
    """Give results that overlap, none of which is the whole memory, one memory.

    Where autograd is between them, or one is a conjugate, they keep theirs, and refuse writes.

    Args:
        aliases: what each result shares.
        results: the results, which are changed.
    """
    for group in _groups(aliases, results):
        tensors = {index: results[index] for index in group}
        parts = [aliases[index] for index in group if index in aliases]
        if len(parts) < len(group) or any(alias.is_noted for alias in parts):
            refuse_writes(list(tensors.values()))
        elif any(one.requires_grad for one in tensors.values()):
            refuse_writes(list(tensors.values()))
        else:
            _put_together({index: aliases[index] for index in group}, results)


def _groups(aliases: Mapping[int, Alias], results: list[Any]) -> list[set[int]]:
    """Return the results that are left to share memory, by what they share."""
    found: list[set[int]] = []
    for index, alias in aliases.items():
        if not isinstance(alias.of, Sibling) or alias.is_same or alias.is_exact:
            continue
        pair = {index, alias.of.index}
        tensors = [results[one] for one in pair]
        if not all(isinstance(one, torch.Tensor) for one in tensors) or _is_one(tensors):
            continue
        joined = [group for group in found if group & pair]
        found = [group for group in found if not group & pair]
        found.append(pair.union(*joined))
    return found


def _is_one(tensors: list[torch.Tensor]) -> bool:
    return len({one.untyped_storage()._cdata for one in tensors}) == 1


def _put_together(aliases: Mapping[int, Alias], results: list[Any]) -> None:
    ends = {
        index: (1 + sum((n - 1) * s for n, s in zip(alias.size, alias.stride, strict=True)))
        for index, alias in aliases.items()
    }
    nbytes = max((a.offset + ends[i]) * results[i].itemsize for i, a in aliases.items())
    with torch._C.DisableTorchFunction():
        memory = torch.empty(nbytes, dtype=torch.uint8).untyped_storage()
        for index, alias in aliases.items():
            value = results[index]
            made: Any = torch.empty(0, dtype=value.dtype)
            made.set_(memory, alias.offset, alias.size, alias.stride).copy_(value)
            value.set_(memory, alias.offset, alias.size, alias.stride)
            tag(value)


def refuse_writes(tensors: list[torch.Tensor]) -> None:
    """Let writes to tensors be refused, as others would have to see them."""
    for tensor in tensors:
        mark = mark_of(tag(tensor))
        if mark is not None:
            mark.unshared = f"a result of shape {tuple(tensor.shape)}"


def refused_write(what: str) -> PortError:
    """Return the refusal of a write that another tensor would have to see."""
    return error_here(
        f"{what} of a module's call is written, which shares its memory with another tensor in"
        " eager PyTorch, and not here: both have a graph and overlap, or one is a conjugate",
        code="TPU202",
        remedy="write to a .clone() of it, or leave the class of the module to eager PyTorch:"
        " porting(eager=(...)), or --eager",
    )
