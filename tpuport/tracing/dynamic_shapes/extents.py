"""Data-dependent sizes: a count, next to an array of the largest possible size.

The first `count` elements of the physical array along a dim are the real ones. The others are
padding with arbitrary values.

Gradients: padding may hold a value where an op has no finite derivative (the log of an excluded 0),
and zero times that is NaN. An op on independent rows keeps such a NaN in its row. Wherever rows
meet what is not padding, `filled` or `isolated` selects, so that the NaN is dropped and not added:
where rows are taken from a tensor, where an operand is shared by all rows, and where rows are
summed.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.tracing.core.concretize import raise_if
from tpuport.tracing.core.context import Trace, current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.storage import differentiable
from tpuport.tracing.core.sym_node import Linear, NumberNode
from tpuport.tracing.core.tensor import TracedTensor, meta_of, wrap
from tpuport.tracing.core.view_steps import ViewStep

Extents = dict[int, NumberNode]
# Numbers are computed in 32 bits.
_LARGEST = 1 << 30


def extents_of(tensor: Any) -> Extents:
    """Return the data-dependent sizes of a tensor, by dim."""
    return (tensor._extents or {}) if isinstance(tensor, TracedTensor) else {}


# Larger ones are arguments of the program, so that it holds for other values.
_MOST_READ = 1024


def elements_span(values: Any) -> Any:
    """Return the smallest and largest integer of an operand, None where they are not known.

    A host tensor that the program wrote to holds its values no more.
    """
    if isinstance(values, TracedTensor):
        return values._bounds
    if not isinstance(values, torch.Tensor):
        return (values, values) if isinstance(values, int) else None
    trace = current()
    if values.dtype not in (torch.int64, torch.int32) or values.device.type == "meta":
        return None
    if trace is None or trace.alias(values) is not None or not 0 < values.numel() <= _MOST_READ:
        return None
    trace.note_reads([values])
    least, most = values.aminmax()
    return int(least), int(most)


def strip(tensor: Any) -> Any:
    """Return the physical array as an ordinary tensor (sharing its storage)."""
    if not extents_of(tensor):
        return tensor
    plain = TracedTensor(
        tensor._storage,
        tensor._chain,
        meta_of(tensor),
        tensor._held,
        tensor._own_flow,
        tensor._detached,
    )
    plain._bounds_of, plain._ascends_of = tensor._bounds_of, tensor._ascends_of
    return plain


def attach(tensor: Any, extents: Extents) -> TracedTensor:
    """Set the data-dependent sizes of a physical tensor; a size known after all trims it."""
    kept: Extents = {}
    for dim, node in extents.items():
        physical = tensor.bound_shape[dim]
        if node.low == node.high and node.low <= physical:
            if node.low < physical:
                tensor = strip(tensor).narrow(dim, 0, int(node.low))
            continue
        kept[dim] = node
    if not kept:
        return tensor
    trace = current()
    if trace is not None:
        trace.has_sizes = True
    if tensor._extents is None:
        tensor._extents = kept
        return tensor
    made = strip(tensor)
    made._extents = kept
    return made


def node_of(size: Any) -> NumberNode:
    """Return a size (Python int or traced) as a node."""
    if isinstance(size, torch.SymInt):
        return size.node
    return NumberNode(int(size), int, int(size), int(size))


def count_node(value: Any, high: int, expr: Linear | None = None) -> NumberNode:
    """Return a fresh count between 0 and `high`."""
    return NumberNode(value, int, 0, high, expr)


def along(index: NumberNode, start: int, step: int) -> NumberNode:
    """Return the number `start + index * step` as the linear expression that it is.

    Raises:
        PortError: It may be too large for 32 bits.
    """
    assert index.expr is not None
    ends = (start + int(index.low) * step, start + int(index.high) * step)
    if max(map(abs, ends)) > _LARGEST:
        raise port_error(
            "a Python number that grows is large",
            code="TPU104",
            remedy="count from 0, and add the start where the number is used",
        )
    expr = Linear(start).plus(index.expr.times(step))
    return NumberNode(start + index.value * step, int, min(ends), max(ends), expr)


def natural(node: NumberNode, error: Exception) -> NumberNode:
    """Return a size that is at least 0; make the program fail, as eager does, if it is not."""
    if node.low >= 0:
        return node
    raise_if(node.value < 0, error)
    return NumberNode(node.value, int, 0, max(node.high, 0), node.expr)


def require_equal(a: NumberNode, b: NumberNode, message: str) -> None:
    """Make the program fail, as eager does, if two sizes differ."""
    if a.expr == b.expr:
        return
    raise_if(a.value != b.value, RuntimeError(message))


def valid(node: NumberNode, size: int) -> torch.Tensor:
    """Return bool[size]: which elements along a dim are real."""
    return wrap_now(jnp.arange(size) < node.value)


def wrap_now(value: jax.Array, dtype: torch.dtype | None = None) -> TracedTensor:
    """Return a fresh traced tensor in the running trace."""
    return wrap(value, dtype, trace=current())


def real_elements(extents: Extents, shape: Sequence[int]) -> torch.Tensor:
    """Return which elements of a physical array are real: a mask that broadcasts to `shape`."""
    column = [-1] + [1] * (len(shape) - 1)
    masks = [
        valid(node, shape[dim]).reshape(column).movedim(0, dim) for dim, node in extents.items()
    ]
    return functools.reduce(torch.logical_and, masks)


def carries_gradients(tensor: torch.Tensor) -> bool:
    """Return whether a gradient may flow to a tensor."""
    frozen = isinstance(tensor, TracedTensor) and tensor._frozen
    return differentiable(tensor.dtype) and not frozen


def cut_padding(plain: torch.Tensor, extents: Extents) -> torch.Tensor:
    """Cut the gradients of the elements of a physical tensor past some sizes; the values stay."""
    if not extents or not carries_gradients(plain):
        return plain
    return torch.where(real_elements(extents, plain.shape), plain, plain.detach())


def isolated(tensor: Any) -> Any:
    """Cut the gradients of the elements past a tensor's sizes; the values stay."""
    extents = extents_of(tensor)
    return attach(cut_padding(strip(tensor), extents), dict(extents)) if extents else tensor


def isolating(step: ViewStep, dim: int, node: NumberNode) -> ViewStep:
    """Return a view step that also cuts the gradients of the elements past a size."""

    def forward(value: jax.Array) -> jax.Array:
        seen = step.forward(value)
        if not jnp.issubdtype(seen.dtype, jnp.inexact):
            return seen
        column = [-1 if d == dim else 1 for d in range(seen.ndim)]
        real = (jnp.arange(seen.shape[dim]) < node.value).reshape(column)
        return jnp.where(real, seen, jax.lax.stop_gradient(seen))

    return ViewStep(forward, step.inverse, places=step.places)


def filled(tensor: Any, value: Any, dims: Sequence[int] | None = None) -> torch.Tensor:
    """Set the elements past a tensor's sizes to `value`, along `dims` (default all)."""
    plain = strip(tensor)
    extents = {d: n for d, n in extents_of(tensor).items() if dims is None or d in dims}
    if not extents:
        return plain
    other = torch.full((), value, dtype=plain.dtype)
    return torch.where(real_elements(extents, plain.shape), plain, other)


def refuse(func: Any, why: str = "") -> Exception:
    """Return the error for an op that is not known to keep the real elements exact."""
    name = getattr(func, "_opname", None) or getattr(func, "__name__", func)
    return port_error(
        f"{name} on a tensor whose size depends on data{why}",
        code="TPU203",
        remedy=(
            "keep the full size and select with torch.where, or reduce the selected elements with"
            " a mask"
        ),
    )


def bound_of(tensor: torch.Tensor, dim: int) -> int:
    """Return the physical size of a dim, which bounds the real one."""
    return torch.Tensor.size(tensor)[dim]


def resized(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Resize the physical array along a dim: trim it, or pad it with zeros at its end."""
    now = tensor.shape[dim]
    if now > size:
        return tensor.narrow(dim, 0, size)
    if now < size:
        shape = list(tensor.shape)
        shape[dim] = size - now
        return torch.cat([tensor, tensor.new_zeros(shape)], dim)
    return tensor


def spread(
    tensor: torch.Tensor, dim: int, own: NumberNode, node: NumberNode, size: int, message: str
) -> torch.Tensor:
    """Resize a physical array of one data-dependent size to another size.

    As in eager, one element along the dim serves all; make the program fail at any other size.
    """
    made = resized(tensor, dim, size)
    if own.expr == node.expr or not tensor.shape[dim]:
        require_equal(own, node, message)
        return made
    is_one = own.value == 1
    raise_if(~is_one & (own.value != node.value), RuntimeError(message))
    return torch.where(wrap_now(is_one), tensor.narrow(dim, 0, 1), made)


def note_dynamic(trace: Trace | None) -> None:
    """Set the flag that makes ops of this trace check for data-dependent sizes."""
    if trace is not None:
        trace.dynamic = True
