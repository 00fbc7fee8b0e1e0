"""Order statistics, distances, searches and normalisation over a dim of data-dependent size."""

import math
from typing import Any

import jax.numpy as jnp
import torch

from tpuport.tracing.core.concretize import raise_if
from tpuport.tracing.core.values import value_of
from tpuport.tracing.dynamic_shapes.extents import (
    Extents,
    attach,
    bound_of,
    extents_of,
    filled,
    isolated,
    real_elements,
    refuse,
    strip,
    wrap_now,
)
from tpuport.tracing.dynamic_shapes.handlers import handles, run
from tpuport.tracing.dynamic_shapes.rowwise import rowwise


def given_by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an op by the names in its schema."""
    return dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs


@handles("gather")
def _gather(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = given_by_name(func, args, kwargs)
    source, index = given["self"], given["index"]
    extents, dim = extents_of(source), given["dim"] % max(source.dim(), 1)
    if dim not in extents:
        return rowwise(func, args, kwargs) if extents or extents_of(index) else NotImplemented
    if any(d != dim and extents_of(index).get(d) is not node for d, node in extents.items()):
        raise refuse(func, " along another dim")
    places, size = strip(index), extents[dim].value
    wrong = (places < 0) | (places >= wrap_now(size))
    if extents_of(index):
        wrong = wrong & real_elements(extents_of(index), places.shape)
    error = RuntimeError(f"index is out of bounds for dimension {dim}, whose size depends on data")
    raise_if(value_of(wrong).any(), error)
    places = places.clamp(0, max(bound_of(source, dim) - 1, 0))
    made = torch.gather(filled(source, 0, [dim]), dim, places)
    return isolated(attach(made, dict(extents_of(index))))


def flattened(source: torch.Tensor) -> torch.Tensor:
    """Return a tensor with one dim; C++ would read the padded sizes in a `reshape`."""
    if source.dim() == 1:
        return source
    return source.clone(memory_format=torch.contiguous_format).view(-1)


def _count(source: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the number of elements along a dim, for each position of the others."""
    return torch.ones_like(source, dtype=torch.int64).sum(dim, keepdim=True)


def rank_of(source: torch.Tensor, dim: int, *, skips_nan: bool) -> tuple[torch.Tensor, ...]:
    """Return the elements in order along a dim, their places, and the rank of the last one.

    NaN is the largest. If NaNs are to be skipped, the rank is that of the last that is none.
    """
    values, places = torch.sort(source, dim=dim, stable=True)
    last = _count(source, dim)
    if source.is_floating_point():
        missing = source.isnan().sum(dim, keepdim=True)
        last = last - missing if skips_nan else last
    return values, places, last - 1


@handles("median", "nanmedian")
def _median(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the lower of the two middle elements; NaN if there is one, or nothing."""
    given = given_by_name(func, args, kwargs)
    source = given["self"]
    if not extents_of(source):
        return NotImplemented
    whole = "dim" not in given
    source = flattened(source) if whole else source
    dim = 0 if whole else given["dim"] % source.dim()
    if dim not in extents_of(source):
        return rowwise(func, args, kwargs)
    size = extents_of(source)[dim]
    if not whole or not source.is_floating_point():
        raise_if(size.value < 1, IndexError("median(): expected a dim of non-zero size"))
    skips = func._opname == "nanmedian"
    values, places, last = rank_of(source, dim, skips_nan=skips)
    rank = torch.div(last.clamp(min=0), 2, rounding_mode="floor")
    if source.is_floating_point():
        missing = source.isnan().sum(dim, keepdim=True)
        spoiled = last < 0 if skips else missing > 0
        # NaNs are last, and what is skipped altogether has them alone.
        rank = torch.where(spoiled, (_count(source, dim) - 1).clamp(min=0), rank)
    if whole:
        nothing = wrap_now(size.value < 1)
        rank = torch.where(nothing, 0, rank)
        plain = torch.gather(filled(values, 0, [0]), 0, strip(rank))[0]
        if not source.is_floating_point():
            return plain
        return torch.where(nothing, math.nan, _shared(source, plain.detach()))
    found = torch.gather(values, dim, rank), torch.gather(places, dim, rank)
    return found if given.get("keepdim") else tuple(one.squeeze(dim) for one in found)


def _shared(source: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a value of a tensor, whose gradient all elements equal to it share."""
    missing = torch.logical_and(source.isnan(), value.isnan())
    alike = torch.logical_or(source == value, missing)
    share = torch.where(alike, source, 0).sum() / alike.sum().clamp(min=1)
    return value + (share - share.detach())


@handles("kthvalue")
def _kthvalue(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = given_by_name(func, args, kwargs)
    source, dim = given["self"], given.get("dim", -1) % max(given["self"].dim(), 1)
    if dim not in extents_of(source):
        return rowwise(func, args, kwargs) if extents_of(source) else NotImplemented
    size = extents_of(source)[dim].value
    nothing = f"kthvalue(): Expected reduction dim {dim} to have non-zero size."
    raise_if(size == 0, IndexError(nothing))
    error = RuntimeError("kthvalue(): selected number k out of range for dimension " + str(dim))
    raise_if(jnp.asarray(given["k"] < 1) | (size < given["k"]), error)
    found = [one.select(dim, given["k"] - 1) for one in torch.sort(source, dim=dim, stable=True)]
    return tuple(one.unsqueeze(dim) for one in found) if given.get("keepdim") else tuple(found)


@handles("roll")
def _roll(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = given_by_name(func, args, kwargs)
    source, dims = given["self"], [d % given["self"].dim() for d in given.get("dims", ())]
    extents = extents_of(source)
    if not extents:
        return NotImplemented
    if not dims and source.dim() > 1:
        raise refuse(func, " without dims")
    made = strip(source)
    for dim, shift in zip(dims or [0], given["shifts"], strict=True):
        size = extents[dim].value if dim in extents else bound_of(source, dim)
        places = (jnp.arange(bound_of(source, dim)) - shift) % jnp.maximum(size, 1)
        made = made.index_select(dim, wrap_now(places, torch.int64))
    return isolated(attach(made, dict(extents)))


@handles("_cdist_forward")
def _cdist(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the distances of all pairs of rows; the rows of either may depend on data."""
    ones, others = args[:2]
    extents: Extents = {}
    for source, dim in ((ones, -2), (others, -1)):
        for at, node in extents_of(source).items():
            if at != source.dim() - 2:
                raise refuse(func, " along another dim than the rows'")
            extents[max(ones.dim(), others.dim()) + dim] = node
    if not extents:
        return NotImplemented
    return isolated(
        attach(run(func, (filled(ones, 0), filled(others, 0), *args[2:]), kwargs), extents)
    )


@handles("searchsorted", "bucketize")
def _search(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Search for each of some values; their number, or that of the borders, may depend on data.

    With borders of several dims each row has its own, and which rows there are may depend on data.
    """
    at = 1 if func._opname == "searchsorted" else 0
    values, borders = args[at], args[1 - at]
    if not isinstance(values, torch.Tensor):
        values = torch.as_tensor(values)
    among, last = extents_of(borders), borders.dim() - 1
    if not extents_of(values) and not among:
        return NotImplemented
    sorter = kwargs.get("sorter")
    if sorter is not None and last in among:
        raise refuse(func, " among borders whose number depends on data, with a sorter")
    top = math.inf if borders.dtype.is_floating_point else torch.iinfo(torch.int32).max
    plain = [filled(borders, top), strip(values)]
    if borders.dim() > 1 and plain[0].shape[:-1] != plain[1].shape[:-1]:
        raise refuse(func, " in rows that have other bounds than those of the borders")
    kwargs = {**kwargs, "sorter": strip(sorter)} if sorter is not None else kwargs
    made = run(func, tuple(plain if at else plain[::-1]), {**kwargs})
    if last in among:  # equal to the padding is beyond the last
        made = torch.minimum(made, wrap_now(among[last].value, made.dtype))
    rows = {dim: node for dim, node in among.items() if dim != last}
    return attach(made, rows | dict(extents_of(values)))


@handles("histc")
def _histc(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = given_by_name(func, args, kwargs)
    source, low, high = given["self"], given.get("min", 0), given.get("max", 0)
    if not extents_of(source):
        return NotImplemented
    if low == high:
        raise refuse(func, " between its smallest and its largest element")
    return run(func, (filled(source, high + 1), *args[1:]), kwargs)


@handles("native_batch_norm", "_native_batch_norm_legit")
def _batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Normalise [B, C, ...] over all dims but 1; the number of rows depends on data."""
    if not extents_of(args[0]):
        return NotImplemented
    given = given_by_name(func, args, kwargs)
    training, dtype = given["training"], given["input"].dtype
    source = given["input"]
    if dtype.itemsize < 4:
        source = torch.ops.aten._to_copy.default(source, dtype=torch.float32)
    if 1 in extents_of(source) or func._overloadname not in ("", "default"):
        raise refuse(func, " along its channels, or without running statistics")
    dims, column = [d for d in range(source.dim()) if d != 1], [-1] + [1] * (source.dim() - 2)
    mean, variance = given["running_mean"], given["running_var"]
    if training:
        running = (mean, variance)
        variance, mean = torch.var_mean(source, dims, correction=0)
        if running[0] is not None:
            with torch.no_grad():
                running[0].lerp_(mean.detach(), given["momentum"])
                running[1].lerp_(torch.var(source.detach(), dims), given["momentum"])
    inverse = torch.rsqrt(variance + given["eps"])
    made = (source - mean.reshape(column)) * inverse.reshape(column)
    for name, operation in (("weight", torch.mul), ("bias", torch.add)):
        if given[name] is not None:
            made = operation(made, given[name].reshape(column))
    saved = (mean, inverse) if training else (mean.new_zeros(0), mean.new_zeros(0))
    if made.dtype is not dtype:
        made = torch.ops.aten._to_copy.default(made, dtype=dtype)
    return made, *(one.detach() for one in saved)
