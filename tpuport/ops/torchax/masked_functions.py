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
    array_of,
    fixed,
    poisoned,
    refuse,
    wrap,
)
from tpuport.source.inference.rowwise import ELEMENTWISE, JOINS, LOSS_MODULES, LOSSES, REDUCTIONS

# Attributes by which tpuport and torchax tell what kind of value they have.
PROBED = frozenset({"is_traced", "jax", "node"})
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
        function, kwargs = _function_of(function, kwargs)
    name = function.__name__
    if name in JOINS:
        return join(*args, **kwargs)
    if name in REDUCTIONS:
        return reduce(name, *args, **kwargs)
    if name in LOSSES:
        return loss(function, *args, **kwargs)
    if name in ELEMENTWISE:
        return elementwise(function, args, kwargs)
    raise refuse(f"be given to {name}")


def _function_of(module: torch.nn.Module, kwargs: Keywords) -> tuple[Callable[..., Any], Keywords]:
    """Return the function that a loss module calls, and the options that it passes."""
    name = LOSS_MODULES.get(type(module).__name__)
    if name is None:
        raise refuse(f"be given to {type(module).__name__}")
    named = (
        "reduction",
        "weight",
        "pos_weight",
        "ignore_index",
        "label_smoothing",
        "beta",
        "delta",
    )
    options = {option: getattr(module, option) for option in named if hasattr(module, option)}
    given = {option: value for option, value in options.items() if value is not None}
    return getattr(torch.nn.functional, name), {**given, **kwargs}


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


# Reductions.


def reduce(
    name: str, rows: MaskedRows, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Reduce the selected rows, over all axes or along one."""
    array = array_of(rows.values if dtype is None else rows.values.to(dtype))
    if dim is not None:
        if not isinstance(dim, int) or name in ("max", "min"):
            raise refuse(f"be reduced by {name} along {dim}")
        if dim % rows.ndim != rows.axis:
            made = getattr(torch, name)(wrap(array), dim=dim, keepdim=keepdim)
            inner = dim % rows.ndim > rows.axis and not keepdim
            return replace(rows, values=wrap(array_of(made)), right=rows.right - inner)
    axis = None if dim is None else rows.axis
    keep = jnp.broadcast_to(rows.spread(rows.keep), array.shape)
    made = _reduced(name, array, keep, axis, keepdim)
    return wrap(poisoned(made, rows.wrong))


def _reduced(
    name: str, array: jax.Array, keep: jax.Array, axis: int | None, keepdim: bool
) -> jax.Array:
    inexact = jnp.issubdtype(array.dtype, jnp.inexact)
    options: dict[str, Any] = {"axis": axis, "keepdims": keepdim}
    count = jnp.sum(keep, **options)
    if name in ("all", "any"):
        empty = name == "all"
        return getattr(jnp, name)(jnp.where(keep, array.astype(bool), empty), **options)
    if name in ("max", "amax", "min", "amin"):
        is_max = name.endswith("max")
        empty = _lowest(array.dtype) if is_max else _highest(array.dtype)
        made = (jnp.max if is_max else jnp.min)(jnp.where(keep, array, empty), **options)
        return jnp.where(count > 0, made, jnp.nan).astype(array.dtype) if inexact else made
    if name == "prod":
        return jnp.prod(jnp.where(keep, array, jnp.ones((), array.dtype)), **options)
    if name == "mean" and not inexact:
        raise RuntimeError("mean(): could not infer output dtype: the input is not floating point")
    short = array.dtype in (jnp.bfloat16, jnp.float16)
    total = jnp.sum(
        jnp.where(keep, array, jnp.zeros((), array.dtype)),
        **options,
        dtype=jnp.float32 if short else None,
    )
    return ((total / count) if name == "mean" else total).astype(
        array.dtype if short else total.dtype
    )


def _lowest(dtype: Any) -> Any:
    if dtype == jnp.bool_:
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
    if dtype == jnp.bool_:
        return True
    return jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max


# Losses.


def loss(
    function: Callable[..., Any],
    input: Any,
    target: Any,
    *,
    reduction: str = "mean",
    **options: Any,
) -> Any:
    """Compute a loss over the selected rows.

    Raises:
        PortError: its reduction is unknown, or it is weighted.
    """
    if reduction not in ("mean", "sum", "none"):
        raise refuse(f"be reduced by {reduction}")
    if {"size_average", "reduce", "weight", "pos_weight"} & {
        k for k, v in options.items() if v is not None
    }:
        raise refuse(f"be weighted in {function.__name__}")
    each = function if reduction == "none" else partial(function, reduction="none")
    if function.__name__ != "cross_entropy":
        rows = elementwise(each, (input, target), options)
        return rows if reduction == "none" else reduce(reduction, rows)
    rows, target = _cross_entropies(each, input, target, options)
    if reduction == "none":
        return rows
    if reduction == "mean":
        ignored = options.get("ignore_index", -100)
        rows = replace(rows, keep=rows.keep & (target != ignored), pieces=None)
    return reduce(reduction, rows)


def _cross_entropies(
    each: Callable[..., Any], input: Any, target: Any, options: Keywords
) -> tuple[MaskedRows, jax.Array]:
    """Compute the cross entropy of each row; return it with the class of the row."""
    scores = input if isinstance(input, MaskedRows) else fixed(input, input.ndim)
    classes = target if isinstance(target, MaskedRows) else fixed(target, target.ndim)
    if scores.ndim != 2 or classes.ndim != 1 or scores.axis or classes.axis:
        raise refuse("be given to cross_entropy, except as scores of classes")
    (first, second), model = align([scores, replace(classes, right=scores.right)])
    values = each(first.values, second.values, **options)
    made = replace(model, values=wrap(array_of(values)), right=1)
    return made, array_of(second.values)


# Joins.


def join(tensors: Any, dim: int = 0) -> Any:
    """Join rows and tensors along the axis of the rows, as `torch.cat` does.

    The result is a tensor if both the rows that a mask selects and those that it leaves out are
    present, for each mask: it then has all rows, in another order.
    """
    parts = [part if isinstance(part, MaskedRows) else fixed(part, part.ndim) for part in tensors]
    if dim % parts[0].ndim or any(part.axis for part in parts):
        raise refuse("be joined along another axis than their own")
    values = torch.cat([part.values for part in parts], dim=0)
    keep = jnp.concatenate([part.keep for part in parts])
    wrong = any_of([part.wrong for part in parts if part.wrong is not None])
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
