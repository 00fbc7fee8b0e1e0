"""Outputs of a call that share memory with its arguments, with state, or with one another."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tpuport.tracing.core import storage
from tpuport.tracing.core.arguments import result_meta
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.tensor import TracedTensor, meta_of
from tpuport.tracing.core.view_steps import is_signed
from tpuport.tracing.dynamic_shapes.extents import extents_of
from tpuport.tracing.state.module_state import StateTree
from tpuport.tracing.state.request import Alias, Before, Outside, Sibling, TraceResult


def output_aliases(
    outcome: TraceResult,
    outputs: list[Any],
    made: list[Any],
    before: StateTree | None,
    after: StateTree | None,
) -> dict[int, Alias]:
    """Return which outputs are arguments, state, tensors from outside, or views of these.

    Args:
        outcome: The outcome of the call.
        outputs: The program's results: what the call returns and what it puts into containers.
        made: The flattened arguments of the call.
        before: The module's tensors before the call.
        after: The module's tensors after the call.
    """
    trace, kept = outcome.trace, {} if after is None else after.leaves
    owners: dict[int, tuple[Any, torch.Tensor, bool]] = {}
    for of, leaf in (*enumerate(made), *outcome.baked.items(), *kept.items()):
        if isinstance(leaf, torch.Tensor):
            traced = stand_in(trace, leaf)
            # A plain attribute that no call changed is a tensor of the user's own module too,
            # which the port must not write to.
            is_theirs = trace.is_foreign(traced)
            found_at = (Outside(leaf) if is_theirs else of, leaf, is_theirs)
            owners.setdefault(memory_id(traced), found_at)
    held = {} if before is None else before.leaves
    gone = earlier_tensors(trace, {n: t for n, t in held.items() if kept.get(n) is not t})
    found: dict[int, Alias] = {}
    groups: dict[int, list[int]] = {}
    for index, leaf in enumerate(outputs):
        if not isinstance(leaf, torch.Tensor):
            continue
        traced = stand_in(trace, leaf)
        memory = memory_id(traced)
        if memory in owners:
            of, owner, is_theirs = owners[memory]
            dense = of in outcome.bound and result_meta(owner).stride() == owner.stride()
            found[index] = alias_of(leaf, of, owner, is_theirs, dense)
        elif memory in gone and isinstance(traced, TracedTensor):
            is_written = traced._storage.version > 0
            found[index] = replace(alias_of(leaf, *gone[memory]), is_written=is_written)
        elif trace.is_foreign(traced):
            found[index] = alias_of(leaf, Outside(leaf), leaf)
        else:
            groups.setdefault(memory, []).append(index)
    for group in groups.values():
        found.update(_siblings(outputs, group))
    return found


def memory_of(tree: StateTree) -> dict[str, tuple[Any, Any]]:
    """Return each traced tensor of the state with its memory, by name."""
    traced = {n: leaf for n, leaf in tree.leaves.items() if isinstance(leaf, TracedTensor)}
    return {name: (leaf, leaf._storage) for name, leaf in traced.items()}


def rebound(before: dict[str, tuple[Any, Any]], after: StateTree | None) -> dict[str, bool]:
    """Return the state that is in other memory after the call.

    The value of each says whether the old memory was written to, or the tensor itself was moved.
    """
    kept = {} if after is None else after.leaves
    return {
        name: storage.version > 0 or kept.get(name) is leaf
        for name, (leaf, storage) in before.items()
        if getattr(kept.get(name), "_storage", None) is not storage
    }


def stand_in(trace: Trace, leaf: torch.Tensor) -> torch.Tensor:
    """Return what stands for a tensor in a trace: itself, unless the call wrote to it."""
    known = None if isinstance(leaf, TracedTensor) else trace.alias(leaf)
    return leaf if known is None else known


def earlier_tensors(trace: Trace, before: Mapping[str, Any]) -> dict[int, tuple[Any, torch.Tensor]]:
    """Return those tensors of the state before a call that are traced, by their memory.

    A plain attribute is one as soon as the call has written to it.
    """
    found: dict[int, tuple[Any, torch.Tensor]] = {}
    for name, leaf in before.items():
        traced = stand_in(trace, leaf) if isinstance(leaf, torch.Tensor) else leaf
        if isinstance(traced, TracedTensor):
            found.setdefault(memory_id(traced), (Before(name), leaf))
    return found


def memory_id(tensor: torch.Tensor) -> int:
    """Return a number that tells apart what tensors are stored in."""
    if isinstance(tensor, TracedTensor):
        return id(tensor._storage)
    return -1 - abs(storage.memory_of(tensor)[0])


def alias_of(
    leaf: torch.Tensor,
    of: Any,
    owner: torch.Tensor,
    is_theirs: bool = False,
    is_dense: bool = False,
) -> Alias:
    """Describe a tensor as a part of the memory of another one.

    Args:
        leaf: The tensor.
        of: What the other one is.
        owner: The other one.
        is_theirs: Whether the port may not write to it.
        is_dense: Whether the host has it with the strides that it has here.
    """
    meta, base = meta_of(leaf), meta_of(owner)
    start, offset = offset_of(owner), offset_of(leaf)
    moved = not is_dense and isinstance(owner, TracedTensor) and bool(owner._chain)
    # Arrays of JAX are in order: what else is shared with them has to be counted the same way.
    ordered = is_dense or isinstance(of, (int, Outside, Before)) or owner.is_contiguous()
    is_noted = _notes_sign(leaf) or _notes_sign(owner)
    fits = ordered and meta.dtype == base.dtype and not is_noted
    is_exact = fits and not (is_theirs or moved or extents_of(leaf))
    if is_dense and not _is_inside(meta, base.numel(), offset - start):
        is_exact = False
    is_cut = isinstance(leaf, TracedTensor) and leaf._detached and leaf.requires_grad
    place = tuple(meta.shape), meta.stride(), offset - start
    byte = offset * meta.itemsize - start * base.itemsize
    return Alias(of, leaf is owner, *place, is_exact, is_cut=is_cut, byte=byte, is_noted=is_noted)


def _notes_sign(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is the conjugate of what its memory holds, or negated."""
    if isinstance(tensor, TracedTensor):
        return any(map(is_signed, tensor._chain))
    return tensor.is_conj() or tensor.is_neg()


def _is_inside(window: torch.Tensor, count: int, start: int) -> bool:
    """Return whether a window that starts at `start` lies in the first `count` elements."""
    sizes = zip(window.shape, window.stride(), strict=True)
    return start >= 0 and start + sum((size - 1) * step for size, step in sizes) < count


def offset_of(tensor: torch.Tensor) -> int:
    """Return where a tensor begins in its memory, in elements."""
    offset: Any = torch.Tensor.storage_offset(tensor)
    return int(offset)


def _siblings(outputs: list[Any], group: list[int]) -> Iterator[tuple[int, Alias]]:
    """Yield what outputs over the same memory share, if they share an element."""
    whole = next((i for i in group if is_whole(outputs[i])), None)
    dense = whole is None
    if dense:
        parts = [outputs[i] for i in group]
        whole = next((i for i in group if _covers(outputs[i], parts)), None)
    for index in group:
        others = [other for other in group if other != index]
        if whole is not None and index != whole:
            yield index, alias_of(outputs[index], Sibling(whole), outputs[whole], is_dense=dense)
        elif whole is None:
            for shared in [o for o in others if _overlap(outputs[index], outputs[o])][:1]:
                alias = alias_of(outputs[index], Sibling(shared), outputs[shared])
                yield index, replace(alias, offset=offset_of(outputs[index]), is_exact=False)


def is_whole(leaf: Any) -> bool:
    """Return whether a tensor is all of its memory, in order."""
    if (
        not isinstance(leaf, torch.Tensor)
        or offset_of(leaf)
        or extents_of(leaf)
        or not leaf.is_contiguous()
    ):
        return False
    if isinstance(leaf, TracedTensor):
        return not leaf._chain
    return leaf.untyped_storage().nbytes() == leaf.numel() * leaf.itemsize


def _covers(leaf: Any, others: list[Any]) -> bool:
    """Return whether a tensor is in order, and others over its memory lie inside of it."""
    if any(extents_of(one) for one in (leaf, *others)) or not leaf.is_contiguous():
        return False
    start, end = _bytes_of(leaf)
    return all(start <= a and b <= end for a, b in map(_bytes_of, others))


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its memory, and the one after its last."""
    sizes = zip(torch.Tensor.size(tensor), tensor.stride(), strict=True)
    count = 1 + sum((size - 1) * step for size, step in sizes)
    start = offset_of(tensor) * tensor.itemsize
    return start, start + (count * tensor.itemsize if tensor.numel() else 0)


# Steps that numpy may take to solve which elements two views share. One that takes more counts as
# sharing some.
_WORK = 100_000


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two views of the same memory share an element."""
    memory = np.empty(0, np.uint8)

    def window(tensor: torch.Tensor) -> np.ndarray:
        size = tensor.itemsize
        start = memory.ctypes.data + offset_of(tensor) * size
        interface = {
            "shape": tuple(torch.Tensor.size(tensor)),
            "strides": tuple(step * size for step in tensor.stride()),
            "typestr": f"|V{size}",
            "data": (start, False),
            "version": 3,
        }
        return np.asarray(_Window(interface))

    try:
        work: Any = _WORK  # numpy's stubs know its two special values only
        return np.shares_memory(window(a), window(b), max_work=work)
    except np.exceptions.TooHardError:
        return True


class _Window:
    """An array of numpy over memory that is not read."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface
