"""Functions of rows whose number depends on data: elementwise ones, reductions, losses, joins."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.ops.torchax.masked_rows import (
    MaskedRows,
    RowPiece,
    align,
    any_of,
    fixed,
    poisoned,
    refuse,
)
from tpuport.ops.torchax.values import array_of, wrap
from tpuport.source.inference.rowwise import ELEMENTWISE, JOINS, LOSS_MODULES, LOSSES, REDUCTIONS
from tpuport.tracing.dynamic_shapes.reductions import IDENTITY

# Attributes by which tpuport and torchax tell what kind of value they have.
PROBED = frozenset({"is_traced", "jax", "node"})
# What a loss may be given, by name: everything that does not weigh its elements.
_LOSS_OPTIONS = ("reduction", "ignore_index", "label_smoothing", "beta", "delta")
_WEIGHTS = ("size_average", "reduce", "weight", "pos_weight")
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


def method(rows: MaskedRows, name: str) -> Any:
    """Return a method of a tensor, bound to rows.

    Raises:
        PortError: its result is not defined for an unknown number of rows.
    """
    if name.startswith("_") or name in PROBED:
        raise AttributeError(name)
    if name in ELEMENTWISE:
        return lambda *args, **kwargs: elementwise(_method(name), (rows, *args), kwargs)
    if name in REDUCTIONS:
        return partial(reduce, name, rows)
    raise refuse(f"be used with .{name}")


def _method(name: str) -> Callable[..., Any]:
    return lambda tensor, *args, **kwargs: getattr(tensor, name)(*args, **kwargs)


def call_with_rows(function: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    """Call a torch function (or a loss module) that has rows among its arguments.

    Raises:
        PortError: its result is not defined for an unknown number of rows.
    """
    if isinstance(function, torch.nn.Module):
        module, name = function, LOSS_MODULES.get(type(function).__name__, "")
        given = {option: getattr(module, option, None) for option in (*_LOSS_OPTIONS, *_WEIGHTS)}
        kwargs = {option: value for option, value in given.items() if value is not None} | kwargs
        function = getattr(torch.nn.functional, name, module)
    else:
        name = function.__name__
    if name in JOINS:
        return join(*args, **kwargs)
    if name in REDUCTIONS:
        return reduce(name, *args, **kwargs)
    if name in LOSSES:
        return loss(function, *args, **kwargs)
    if name in ELEMENTWISE:
        return elementwise(function, args, kwargs)
    raise refuse(f"be given to {name or type(function).__name__}")


def elementwise(function: Callable[..., Any], args: Arguments, kwargs: Keywords) -> MaskedRows:
    """Call a function that computes each row of its result from the same row of its arguments."""
    values = [*args, *kwargs.values()]
    right = next(value.right for value in values if isinstance(value, MaskedRows))
    made = [_as_rows(value, right) for value in values]
    places = [n for n, value in enumerate(made) if isinstance(value, MaskedRows)]
    aligned, model = align([made[n] for n in places])
    for n, rows in zip(places, aligned, strict=True):
        made[n] = rows.values
    result = function(*made[: len(args)], **dict(zip(kwargs, made[len(args) :], strict=True)))
    if not isinstance(result, torch.Tensor) or result.ndim < right:
        raise refuse("be given to a function that does not work on each row by itself")
    return replace(model, values=wrap(array_of(result)))


def _as_rows(value: Any, right: int) -> Any:
    """Convert a tensor with one row for each selected row to `MaskedRows`; pass on others."""
    if isinstance(value, MaskedRows) or not isinstance(value, torch.Tensor):
        return value
    axis = value.ndim - right
    return fixed(value, right) if axis >= 0 and value.shape[axis] != 1 else value


def reduce(
    name: str, rows: MaskedRows, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Reduce the selected rows, over all axes or along one."""
    values = rows.values if dtype is None else rows.values.to(dtype)
    if dim is not None:
        if not isinstance(dim, int) or name in ("max", "min"):
            raise refuse(f"be reduced by {name} along {dim}")
        if dim % rows.dim() != rows.axis:
            made = getattr(torch, name)(values, dim=dim, keepdim=keepdim)
            inner = dim % rows.dim() > rows.axis and not keepdim
            return replace(rows, values=wrap(array_of(made)), right=rows.right - inner)
    options = {"axis": None if dim is None else rows.axis, "keepdims": keepdim}
    return wrap(poisoned(_reduced(name, rows, values, options), rows.wrong))


def _reduced(
    name: str, rows: MaskedRows, values: torch.Tensor, options: dict[str, Any]
) -> jax.Array:
    array = array_of(values)
    inexact = jnp.issubdtype(array.dtype, jnp.inexact)
    if name == "mean" and not inexact:
        raise RuntimeError("mean(): could not infer output dtype: the input is not floating point")
    total = "sum" if name == "mean" else name
    count = jnp.sum(jnp.broadcast_to(rows.spread, array.shape), **options)
    filled = jnp.where(rows.spread, array, IDENTITY[total](values.dtype))
    if array.dtype in (jnp.bfloat16, jnp.float16):
        filled = filled.astype(jnp.float32)
    made = getattr(jnp, total)(filled, **options)
    if name == "mean":
        made = made / count
    elif inexact and name in ("max", "amax", "min", "amin"):
        made = jnp.where(count > 0, made, jnp.nan)
    return made.astype(array.dtype) if inexact and name not in ("all", "any") else made


def loss(
    function: Callable[..., Any],
    input: Any,
    target: Any,
    *,
    reduction: str = "mean",
    **options: Any,
) -> Any:
    """Compute the mean or sum of a loss over the selected rows.

    Raises:
        PortError: it has another reduction, or it is weighted.
    """
    if reduction not in ("mean", "sum"):
        raise refuse(f"be reduced by {reduction}")
    if any(options.get(weight) is not None for weight in _WEIGHTS):
        raise refuse(f"be weighted in {function.__name__}")
    if function.__name__ == "cross_entropy":
        return _cross_entropy(input, target, reduction, options)
    rows = elementwise(partial(function, reduction="none"), (input, target), options)
    return reduce(reduction, rows)


def _cross_entropy(input: Any, target: Any, reduction: str, options: Keywords) -> torch.Tensor:
    """Compute the cross entropy of the selected rows; the others get the class to ignore."""
    scores = input if isinstance(input, MaskedRows) else fixed(input, input.ndim)
    classes = target if isinstance(target, MaskedRows) else fixed(target, target.ndim)
    if scores.dim() != 2 or classes.dim() != 1 or scores.axis or classes.axis:
        raise refuse("be given to cross_entropy, except as scores of classes")
    (first, second), model = align([scores, replace(classes, right=scores.right)])
    ignored = options.get("ignore_index", -100)
    chosen = wrap(jnp.where(model.keep, array_of(second.values), ignored))
    made = torch.nn.functional.cross_entropy(first.values, chosen, reduction=reduction, **options)
    return wrap(poisoned(array_of(made), model.wrong))


def join(tensors: Any, dim: int = 0) -> Any:
    """Join rows and tensors along the axis of the rows, as `torch.cat` does.

    The result is a tensor if both the rows that a mask selects and those that it leaves out are
    present, for each mask: it then has all rows, in another order.
    """
    parts = [part if isinstance(part, MaskedRows) else fixed(part, part.ndim) for part in tensors]
    if dim % parts[0].dim() or any(part.axis for part in parts):
        raise refuse("be joined along another axis than their own")
    values = torch.cat([part.values for part in parts], dim=0)
    keep = jnp.concatenate([part.keep for part in parts])
    wrong = any_of([part.wrong for part in parts])
    size = _whole_size(parts, tensors)
    if size is None:
        return MaskedRows(values, keep, values.ndim, None, wrong)
    order = jnp.argsort(~keep, stable=True)[:size]
    return wrap(poisoned(jnp.take(array_of(values), order, axis=0), wrong))


def _whole_size(parts: list[MaskedRows], tensors: Any) -> int | None:
    """Return how many rows there are; None if that depends on the masks."""
    size, pieces = 0, list[RowPiece]()
    for part, given in zip(parts, tensors, strict=True):
        if not isinstance(given, MaskedRows):
            size += part.bound
        elif part.pieces is None:
            return None
        else:
            pieces += part.pieces
    while pieces:
        piece = pieces.pop()
        other = next(
            (p for p in pieces if p.is_of_same_mask(piece) and p.negated != piece.negated), None
        )
        if other is None:
            return None
        pieces.remove(other)
        size += piece.size
    return size
