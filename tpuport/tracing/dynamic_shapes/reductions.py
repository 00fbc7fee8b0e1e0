"""Reductions over a dim of data-dependent size: the padding is filled with the identity element."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch

from tpuport.tracing.core.concretize import raise_if
from tpuport.tracing.dynamic_shapes.extents import (
    attach,
    extents_of,
    filled,
    isolated,
    refuse,
    wrap_now,
)
from tpuport.tracing.dynamic_shapes.handlers import handles, run
from tpuport.tracing.dynamic_shapes.pointwise import pointwise
from tpuport.tracing.dynamic_shapes.rowwise import rowwise


def _reduced_dims(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    source = args[0]
    given = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if isinstance(given, bool) or given is None or given == []:
        return list(range(source.dim()))
    return [
        d % max(source.dim(), 1) for d in (given if isinstance(given, (list, tuple)) else [given])
    ]


def _least(dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _greatest(dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return True
    return (
        math.inf
        if dtype.is_floating_point
        else torch.iinfo(torch.int32 if dtype is torch.int64 else dtype).max
    )


# What a reduction of nothing gives, which the padding is filled with.
IDENTITY: dict[str, Callable[[torch.dtype], Any]] = {
    "sum": lambda _: 0, "prod": lambda _: 1, "any": lambda _: False, "all": lambda _: True,
    "count_nonzero": lambda _: 0, "linalg_vector_norm": lambda _: 0, "nansum": lambda _: 0,
    "amax": _least, "max": _least, "argmax": _least, "amin": _greatest, "min": _greatest,
    "argmin": _greatest, "logsumexp": _least,
}  # fmt: skip


_NEEDS_ELEMENTS = {"amax", "max", "argmax", "amin", "min", "argmin"}


def _require_elements(func: Any, source: Any, dims: list[int], dim: Any) -> None:
    """Make the program fail, as eager does, if there is nothing to reduce along `dim`, as given."""
    name = func._opname
    whole = name in ("max", "min", "linalg_vector_norm") and func._overloadname in ("", "default")
    message = f"{name}(): expected a reduction over a dim of non-zero size"
    if name in ("amax", "amin") and dim in (None, (), []):
        whole, message = True, f"{name}(): Expected reduction dim to be specified for no elements"
    for dim in dims:
        node = extents_of(source).get(dim)
        if node is not None and node.low <= 0:
            error = RuntimeError(message) if whole else IndexError(message)
            raise_if(node.value == 0, error)


def _identity(func: Any, source: Any) -> Any:
    """Return what the padding is filled with, within the bounds of the elements if they have some.

    So the result has the bounds. Indices are those of ties, which padding shall not win.
    """
    known = source._bounds if len(func._schema.returns) == 1 else None
    if known is None or func._opname not in ("max", "amax", "min", "amin"):
        return IDENTITY[func._opname](source.dtype)
    return known[0] if func._opname.endswith("max") else known[1]


@handles(*IDENTITY)
def _reduce(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    dims = _reduced_dims(args, kwargs)
    if func._opname in ("max", "min") and len(args) > 1 and isinstance(args[1], torch.Tensor):
        return pointwise(func, args, kwargs)
    identity = _identity(func, source)
    needs_elements = func._opname in _NEEDS_ELEMENTS
    if func._opname == "linalg_vector_norm":
        order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
        dims = _reduced_dims((source, *args[2:3]), {k: v for k, v in kwargs.items() if k == "dim"})
        if isinstance(order, torch.SymFloat | torch.SymInt):
            raise refuse(func, " with a traced order")
        identity = math.inf if order < 0 else 0
        needs_elements = order < 0 or order == math.inf
    if needs_elements:
        _require_elements(func, source, dims, args[1] if len(args) > 1 else kwargs.get("dim"))
    result = run(func, (filled(source, identity, dims), *args[1:]), kwargs)
    given = args[1] if len(args) > 1 else kwargs.get("dim")
    if func._opname in ("argmax", "argmin") and given is None:
        return _place(source, result)
    return _after_reduction(source, dims, result)


def _place(source: Any, flat: torch.Tensor) -> torch.Tensor:
    """Return the place of an element among the real ones, from that in the physical array."""
    extents, place, step = extents_of(source), torch.zeros_like(flat), torch.ones_like(flat)
    for dim in reversed(range(source.dim())):
        size = source.bound_shape[dim]
        place = place + flat % size * step
        flat = flat // size
        node = extents.get(dim)
        step = step * (size if node is None else wrap_now(node.value, torch.int64))
    return place


def _after_reduction(source: Any, dims: list[int], result: Any) -> Any:
    left = {d: n for d, n in extents_of(source).items() if d not in dims}
    parts = list(result) if isinstance(result, (tuple, list)) else [result]
    for index, part in enumerate(parts):
        kept_rank = part.dim() == source.dim()
        moved = {
            d if kept_rank else d - sum(1 for r in set(dims) if r < d): n for d, n in left.items()
        }
        parts[index] = attach(part, moved) if moved else part
    return tuple(parts) if isinstance(result, (tuple, list)) else parts[0]


@handles("mean", "var", "std", "var_mean", "std_mean")
def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, dims = args[0], _reduced_dims(args, kwargs)
    dynamic = [d for d in extents_of(source) if d in dims]
    if not dynamic:
        return _after_reduction(source, dims, run(func, args, kwargs))
    keep = bool(kwargs.get("keepdim", args[2] if len(args) > 2 else False))
    count: Any = math.prod(source.bound_shape[d] for d in dims if d not in dynamic)
    for d in dynamic:
        count = count * extents_of(source)[d].value
    if func._opname == "mean":
        dtype = kwargs.get("dtype") or source.dtype
        total = filled(source, 0, dims).sum(dims, keepdim=keep, dtype=dtype)
        return _after_reduction(source, dims, total / _as_tensor(count).to(dtype))
    if source.is_complex():
        raise refuse(func, " of complex values over that dim")
    correction = kwargs.get("correction")
    divisor = jnp.maximum(count - (1 if correction is None else correction), 0)
    mean = filled(source, 0, dims).sum(dims, keepdim=True) / _as_tensor(count).to(source.dtype)
    spread = filled((source - mean).square(), 0, dims).sum(dims, keepdim=keep)
    found = spread / _as_tensor(divisor).to(source.dtype)
    if func._opname.startswith("std"):
        # The gradient of a deviation of zero is zero, not infinite.
        found = torch.where(found == 0, 0.0, torch.where(found == 0, 1.0, found).sqrt())
    if func._opname.endswith("_mean"):
        found = (found, mean if keep else mean.reshape(found.shape))
    return _after_reduction(source, dims, found)


def _as_tensor(count: Any) -> torch.Tensor:
    return wrap_now(jnp.asarray(count, jnp.float32))


@handles("_softmax", "_log_softmax")
def _softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, dim = args[0], args[1] % max(args[0].dim(), 1)
    if dim not in extents_of(source):
        return rowwise(func, args, kwargs)
    masked = filled(source, -math.inf, [dim])
    return isolated(attach(run(func, (masked, *args[1:]), kwargs), dict(extents_of(source))))


@handles("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits")
def _loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the loss of each element, and reduce that."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    if not any(extents_of(value) for value in given.values()):
        return NotImplemented
    reduction = given.pop("reduction", 1)
    each = pointwise(func, (given.pop("self"), given.pop("target")), {**given, "reduction": 0})
    return each if reduction == 0 else each.mean() if reduction == 1 else each.sum()
