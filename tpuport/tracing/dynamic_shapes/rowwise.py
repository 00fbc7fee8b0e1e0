"""Ops on independent rows: elements along the data-dependent dim do not mix."""

from typing import Any

import torch

from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.sym_node import Linear, NumberNode
from tpuport.tracing.core.values import map_tensors, value_of
from tpuport.tracing.dynamic_shapes.contractions import masked_contraction
from tpuport.tracing.dynamic_shapes.extents import (
    attach,
    bound_of,
    extents_of,
    filled,
    isolated,
    node_of,
    refuse,
    strip,
    wrap_now,
)
from tpuport.tracing.dynamic_shapes.handlers import dim_of, handles, run, tensors_of


def _traced_sizes(args: tuple[Any, ...]) -> list[torch.SymInt]:
    listed = [item for a in args for item in (a if isinstance(a, (list, tuple)) else [a])]
    return [item for item in listed if isinstance(item, torch.SymInt)]


def rowwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that does not mix elements along the data-dependent dim.

    Meta runs of torch itself show which dim of the result it becomes.
    """
    exprs = {node.expr: node for t in tensors_of(args, kwargs) for node in extents_of(t).values()}
    if any(size.node.expr not in exprs for size in _traced_sizes(args)):
        raise refuse(func, ", with another size that does")
    args = tuple(physical_sizes(a, args) for a in args)
    _refuse_mixing(func, args, kwargs)
    args = masked_contraction(func, args)
    mixes = not func.is_view and _meets_others(func, args, kwargs)
    padding = 1 if func._opname == "cumprod" else 0
    given = [map_tensors(lambda t: filled(t, padding), a) for a in args] if mixes else args
    result = run(func, tuple(given), kwargs)
    for expr, node in exprs.items():
        before = _meta_run(func, args, kwargs, expr, 0)
        after = _meta_run(func, args, kwargs, expr, _PERTURB)
        result = _attach_grown(func, result, before, after, node)
    return map_tensors(isolated, result) if mixes else result


def _meets_others(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether rows meet what is not padding: an operand that all share, or other rows."""
    shared = any(not extents_of(t) for t in tensors_of(args, kwargs))
    return shared or func._opname in _RUNNING or func._opname in ("mm", "bmm", "addmm")


# What is at the end, as padding is, changes nothing before it.
_RUNNING = {"cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"}


# The growth of a dim in meta runs: a prime, so that the growth of the result shows its factor.
_PERTURB = 7


def _meta_run(func: Any, args: Any, kwargs: Any, expr: Linear | None, grow: int) -> list[Any]:
    def meta(value: Any) -> Any:
        if isinstance(value, sym_numbers.SYMBOLIC):
            return sym_numbers.placeholder(value)
        sizes = list(torch.Tensor.size(value))
        for dim, node in extents_of(value).items():
            if node.expr == expr:
                sizes[dim] += grow
        return torch.empty(sizes, dtype=value.dtype, device="meta")

    def grown(value: Any) -> Any:
        # Sizes written out in the arguments grow with the tensor (see physical_sizes).
        if isinstance(value, _Sized):
            return int(value) + (grow * value.factor if value.expr == expr else 0)
        return [grown(v) for v in value] if isinstance(value, (list, tuple)) else value

    given = [grown(map_tensors(meta, a)) for a in args]
    try:
        out = func(*given, **{k: map_tensors(meta, v) for k, v in kwargs.items()})
    except RuntimeError as error:
        raise refuse(func, f" ({str(error).splitlines()[0]})") from error
    return list(out) if isinstance(out, (list, tuple)) else [out]


class _Sized(int):
    """A physical size in an op's arguments that replaces a traced one."""

    expr: Linear | None
    factor: int


def physical_sizes(value: Any, args: tuple[Any, ...]) -> Any:
    """Replace traced sizes in an op's arguments by the physical sizes of the same dims."""
    if isinstance(value, (list, tuple)):
        return [physical_sizes(v, args) for v in value]
    if not isinstance(value, torch.SymInt):
        return value
    expr = value.node.expr
    for tensor in tensors_of(args, {}):
        for dim, node in extents_of(tensor).items():
            for factor in (1, *{f for _, f in expr.terms}):
                if node.expr is not None and node.expr.times(factor) == expr:
                    made = _Sized(bound_of(tensor, dim) * factor)
                    made.expr, made.factor = node.expr, factor
                    return made
    return value


def _attach_grown(
    func: Any, result: Any, before: list[Any], after: list[Any], node: NumberNode
) -> Any:
    parts = list(result) if isinstance(result, (list, tuple)) else [result]
    for index, (small, large) in enumerate(zip(before, after, strict=False)):
        if not isinstance(small, torch.Tensor):
            continue
        if small.dim() != large.dim() or len(before) != len(after):
            raise refuse(func)
        extents = dict(extents_of(parts[index]))
        for dim, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)):
            if a != b:
                factor, rest = divmod(b - a, _PERTURB)
                if rest or not _leads(a, b, factor):
                    raise refuse(func, ", merged with dims before it")
                scaled = node if factor == 1 else scaled_size(node, factor)
                extents[dim] = scaled
        parts[index] = attach(parts[index], extents)
    if isinstance(result, (list, tuple)):
        return type(result)(parts) if type(result) in (list, tuple) else tuple(parts)
    return parts[0]


def _leads(small: int, large: int, factor: int) -> bool:
    """Return whether the grown dim is the slowest of those merged into one.

    Only then do the real elements stay a prefix.
    """
    return factor > 0 and small % factor == 0 and large % factor == 0


def scaled_size(node: NumberNode, factor: int) -> NumberNode:
    """Return the size of a dim with `factor` times as many elements."""
    assert node.expr is not None
    return NumberNode(
        node.value * factor, int, node.low * factor, node.high * factor, node.expr.times(factor)
    )


_ALONG = {
    "_softmax": 1,
    "_log_softmax": 1,
    "gather": 1,
    "mode": 1,
    "select": 1,
    "unbind": 1,
    "split": 2,
    "split_with_sizes": 2,
    "glu": 1,
    "unfold": 1,
    "linalg_cross": 2,
}
# How many dims of the first operand are independent of each other, from the front; if it is
# negative, all but so many.
_INDEPENDENT = {
    "convolution": 1,
    "baddbmm": 1,
    "avg_pool2d": -2,
    "max_pool2d_with_indices": -2,
    "_adaptive_avg_pool2d": -2,
    "upsample_nearest2d": -2,
    "upsample_bilinear2d": -2,
}


def _refuse_mixing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name, first = func._opname, args[0]
    if not isinstance(first, torch.Tensor):
        return
    extents = extents_of(first)
    if name in _ALONG and extents:
        default = 0 if name in ("unbind", "split", "split_with_sizes") else -1
        dim = dim_of(args, kwargs, _ALONG[name], default)
        if dim in extents:
            raise refuse(func, " along that dim")
    free = _INDEPENDENT.get(name)
    leading = first.dim() + free if free is not None and free < 0 else free
    if leading is not None and any(
        d >= leading for t in tensors_of(args, {}) for d in extents_of(t)
    ):
        raise refuse(func, " along that dim")
    if name.startswith("_fft") and any(d % first.dim() in extents for d in args[1]):
        raise refuse(func, " along that dim")
    if name == "native_layer_norm" and any(d >= first.dim() - len(args[1]) for d in extents):
        raise refuse(func, " over that dim")
    if name == "repeat" and any(args[1][len(args[1]) - first.dim() + d] != 1 for d in extents):
        raise refuse(func, " along that dim")


@handles("upsample_nearest1d")
def _upsample(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Interpolate along the last dim, whose size is static."""
    if any(dim >= 2 for dim in extents_of(args[0])):
        raise refuse(func, " along that dim")
    return rowwise(func, args, kwargs)


@handles("grid_sampler_2d", "grid_sampler_3d")
def _sampled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read images, whose sizes are static, at places of which data may say the number."""
    image, grid = args[:2]
    if any(dim >= 2 for dim in extents_of(image)):
        raise refuse(func, " along that dim")
    return rowwise(func, args, kwargs) if extents_of(image) or extents_of(grid) else NotImplemented


@handles("tril", "triu")
def _triangle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Keep what is on one side of a diagonal, whose number may depend on data."""
    matrix, diagonal = args[0], args[1] if len(args) > 1 else kwargs.get("diagonal", 0)
    extents = extents_of(matrix)
    if not isinstance(diagonal, torch.SymInt):
        return rowwise(func, args, kwargs) if extents else NotImplemented
    plain = strip(matrix)
    rows, columns = (torch.arange(size) for size in plain.shape[-2:])
    away = wrap_now(value_of(columns - rows[:, None]), torch.int64)
    number = wrap_now(node_of(diagonal).value, torch.int64)
    kept = away >= number if func._opname == "triu" else away <= number
    return attach(torch.where(kept, plain, torch.zeros((), dtype=plain.dtype)), extents)


@handles("equal")
def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(map(extents_of, args)):
        raise refuse(func)
    return NotImplemented
