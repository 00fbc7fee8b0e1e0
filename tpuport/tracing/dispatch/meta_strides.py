"""The strides of results, as ATen chooses them.

torch's own Python functions for this import its compiler and sympy, which takes longer than many a
program's trace.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _disable_current_modes

# Which kernel torch takes for attention, as a number of `SDPBackend`.
_kernel_of: Any = torch._fused_sdp_choice  # pyright: ignore[reportPrivateImportUsage]

# Memory formats by the number of dims.
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def broadcast(tensors: Sequence[torch.Tensor]) -> tuple[int, ...] | None:
    """Return the size to which some tensors broadcast, None if they do not."""
    sizes = [torch.Tensor.size(tensor) for tensor in tensors]
    whole = [1] * max(map(len, sizes))
    for size in sizes:
        for place, n in enumerate(reversed(size), 1):
            if n != 1:
                if whole[-place] not in (1, n):
                    return None
                whole[-place] = n
    return tuple(whole)


def pointwise_strides(
    shape: Sequence[int], tensors: Sequence[torch.Tensor], *, alike: bool = True
) -> tuple[int, ...]:
    """Return the strides of what a pointwise op makes of some operands, in their order.

    The source is `TensorIteratorBase` of ATen, TensorIterator.cpp: `compute_fast_setup_type`,
    `reorder_dimensions` and `compatible_stride`.

    Args:
        shape: The size of the result.
        tensors: The operands that are tensors.
        alike: Whether no other operand is a number, which is a tensor of another size.
    """
    strides = [tensor.stride() for tensor in tensors]
    if alike and all(tuple(torch.Tensor.size(tensor)) == tuple(shape) for tensor in tensors):
        if all(tensor.is_contiguous() for tensor in tensors):
            return _packed(shape, range(len(shape)))
        if len(shape) == 4 and all(
            tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors
        ):
            return _packed(shape, (0, 2, 3, 1))
        if len(set(strides)) == 1 and _is_dense(shape, strides[0]):
            return strides[0]
    steps = [
        _broadcast_steps(shape, torch.Tensor.size(tensor), stride)
        for tensor, stride in zip(tensors, strides, strict=True)
    ]
    return _packed(shape, _order(shape, steps))


def _broadcast_steps(shape: Sequence[int], size: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Return the strides of an operand in the size of the result, 0 where it is repeated."""
    missing = len(shape) - len(size)
    pairs = zip(shape[missing:], size, stride, strict=True)
    return [0] * missing + [0 if n == 1 and whole != 1 else step for whole, n, step in pairs]


def _order(shape: Sequence[int], steps: Sequence[Sequence[int]]) -> list[int]:
    """Return the dims of a result in the order of memory, the slowest first."""
    order = list(reversed(range(len(shape))))
    for place in range(1, len(order)):
        at = place
        for before in range(place - 1, -1, -1):
            found = _compared(shape, steps, order[before], order[at])
            if found > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif found < 0:
                break
    return order[::-1]


def _compared(shape: Sequence[int], steps: Sequence[Sequence[int]], one: int, other: int) -> int:
    """Return 1 if a dim has to be slower than another one, -1 if it may not be, 0 for neither."""
    for own in steps:
        if not own[one] or not own[other]:
            continue
        if own[one] != own[other]:
            return -1 if own[one] < own[other] else 1
        if shape[one] > shape[other]:
            return 1
    return 0


def _packed(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return strides without gaps of dims in the order of memory, the slowest first."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether a tensor fills its memory, each element at a place of its own."""
    dims = sorted((step, n) for n, step in zip(shape, stride, strict=True) if n != 1)
    expected = 1
    for step, n in dims:
        if n == 0:
            return True
        if step != expected:
            return False
        expected *= n
    return True


def as_convolved(made: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the result of a convolution with the strides that devices give it.

    torch's meta kernel makes it contiguous. Kernels keep the channels last if one operand has them
    so, but for volumes in float64.
    """
    layout = LAST.get(made.dim())
    if layout is None or (made.dtype is torch.float64 and made.dim() == 5):
        return made
    if has_channels_last(x) or has_channels_last(weight):
        return made.contiguous(memory_format=layout)
    return made


def as_attended(
    made: torch.Tensor,
    operands: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    *,
    dropout: float,
    causal: bool,
    grouped: bool,
) -> torch.Tensor:
    """Return the result of attention with the strides that a CPU gives it.

    The fused kernel lays the result out as the queries, so that heads which were split off by a
    transposition can be joined again by a view; the matrix of scores makes it contiguous. Which of
    them runs depends on sizes, on the last stride and on what is switched off: torch is asked.
    """
    if made.dim() != 4:
        return made
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        standing = [None if one is None else _standing(one) for one in (*operands, mask)]
        fused = _kernel_of(*standing, dropout, causal, enable_gqa=grouped)
    if fused != SDPBackend.FLASH_ATTENTION.value:
        return made
    query = operands[0]
    laid = torch.empty_strided(query.size(), query.stride(), dtype=made.dtype, device="meta")
    return torch.empty_like(laid)


def _standing(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor of the same size and last stride that has little memory."""
    size, last = torch.Tensor.size(tensor), tensor.stride(-1)
    row = torch.empty(max(size[-1], 1) * (1 if last == 1 else 2), dtype=tensor.dtype)
    strides = (*[0] * (len(size) - 1), min(last, 2))
    return row.as_strided(size, strides).requires_grad_(tensor.requires_grad)


def has_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether ops take an image or volume for one whose channels vary fastest.

    Strides of dims of size 1 count: they tell channels last from contiguous. The source is
    `is_channels_last_strides_2d` and `_3d` of c10, MemoryFormat.h.
    """
    size, stride = torch.Tensor.size(tensor), tensor.stride()
    least = 0
    for dim in (1, *range(len(size) - 1, 1, -1), 0):
        if not size[dim] or not stride[1] or stride[dim] < least:
            return False
        if dim == 0 and least == stride[1]:
            return False
        least = stride[dim] * max(size[dim], 1)
    return True
