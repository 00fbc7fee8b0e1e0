"""Integer operations whose results may need 64 bits, where jax holds int64 in 32.

If the bounds of the operands say that a result fits, it is computed in 32 bits. Otherwise it is
computed in int64, and stays so through the operations named here. Before any other operation it is
narrowed with a check, which raises at the call.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch

from tpuport.foundation.interop import backend
from tpuport.tracing.core import int64, sym_numbers
from tpuport.tracing.core.python_numbers import SPANS
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.core.values import held_of, map_tensors, value_of
from tpuport.tracing.dynamic_shapes.extents import elements_span

Span = int64.Span
# Operations that can leave 32 bits with operands that do not.
_WIDENING = {"add", "sub", "rsub", "mul", "neg", "abs", "pow", "square", "addcmul", "lcm"}
_WIDENING |= {"bitwise_left_shift", "__lshift__", "floor_divide", "div", "sum", "nansum"}
_WIDENING |= {"cumsum", "prod", "cumprod", "trace", "dot", "vdot", "mv", "mm", "bmm", "addmm"}
_WIDENING |= {"addmv", "addbmm", "baddbmm", "addr", "scatter_add", "index_add", "scatter_reduce"}
_WIDENING |= {"index_put", "_unsafe_index_put", "index_reduce", "_to_copy", "copy", "fill"}
# Operations beside the elementwise ones that take operands of 64 bits.
_TAKES = _WIDENING | {"max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "any", "all"}
_TAKES |= {"sort", "argsort", "topk", "cummax", "cummin", "gather", "index_select", "index"}
_TAKES |= {"cat", "stack", "where", "clone", "copy", "masked_fill", "fill", "full_like", "repeat"}
_TAKES |= {"roll", "flip", "tril", "triu", "constant_pad_nd", "scatter", "slice_scatter"}
_TAKES |= {"select_scatter", "diagonal_scatter", "masked_scatter", "count_nonzero", "mean"}
_TAKES |= {"lift_fresh_copy", "_unsafe_view", "unfold_copy", "full", "scalar_tensor"}
# Those of them that make floats of integers.
_CONVERTS = {"_to_copy", "mean", "sum", "cumsum", "prod", "cumprod"}
# Results that are positions in their operand.
_POSITIONS = {"argmax", "argmin", "argsort"}
_WITH_POSITIONS = {"max", "min", "sort", "topk", "cummax", "cummin"}


def is_pointwise(func: Any) -> bool:
    """Return whether an op works on each element by itself."""
    return torch.Tag.pointwise in func.tags


def operand(metas: Any, value: Any) -> Any:
    """Return an operand of an op that computes in 32 bits.

    Python numbers that meet floating tensors are rounded as torch rounds them: to the dtype that
    torch computes in, or, where two values are compared, to that of the tensors.
    """
    held = held_of(value)
    if isinstance(metas, torch.dtype):
        is_number = isinstance(value, (torch.SymInt, torch.SymFloat))
        if is_number or int64.is_wide(held):
            dtype = backend.jax_dtype(metas)
            with int64.scope():
                exact = sym_numbers.exact_value(value) if is_number else held
                return exact.astype(dtype)
    return value_of(value) if int64.is_wide(held) else held


def floating_dtype(func: Any, tensors: list[Any], metas: Any) -> Any:
    """Return the dtype that Python numbers and integers have beside the operands of an op.

    It is `metas` if the op does not compute with floating numbers.
    """
    if not isinstance(metas, torch.Tensor):
        return metas
    if not is_pointwise(func):
        return metas.dtype if func._opname in _CONVERTS and metas.is_floating_point() else metas
    dtypes = [t.dtype for t in tensors if isinstance(t, torch.Tensor)]
    floats = [d for d in dtypes if d.is_floating_point]
    if metas.dtype.is_floating_point:
        return torch.float64 if metas.dtype is torch.float64 else torch.float32
    if metas.dtype is torch.bool and floats:
        return max(floats, key=lambda d: d.itemsize)
    if metas.dtype is torch.bool and any(isinstance(t, torch.SymFloat) for t in tensors):
        return torch.float32
    return metas


def python_number(metas: Any, value: Any) -> Any:
    """Return a Python int beyond 32 bits as the float that it becomes beside floating tensors."""
    beyond = type(value) is int and not int64.is_within((value, value), int64.INT32)
    return float(value) if beyond and isinstance(metas, torch.dtype) else value


# -- 64 bits ---------------------------------------------------------------------------------------


def needs_64(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], metas: Any) -> bool:
    """Return whether an op on integers has to be computed in 64 bits."""
    if int64.is_64():
        return False
    name, first = func._opname, metas
    if isinstance(metas, (tuple, list)):
        first = metas[0] if metas else None
    if not isinstance(first, torch.Tensor) or _is_floating(first):
        return False
    if name in _WIDENING and first.dtype is torch.int64:
        if not int64.is_within(span_of(func, args, kwargs, loose=True), int64.INT32):
            return True
    if name not in _TAKES and not is_pointwise(func):
        return False
    found: list[Any] = []
    operands = [*args, *kwargs.values()]
    map_tensors(found.append, operands)
    if any(isinstance(v, torch.SymFloat) or _is_floating(v) for v in found):
        return False
    return any(int64.is_wide(held_of(v)) for v in found) or any(map(_is_beyond, operands))


def _is_floating(value: Any) -> bool:
    dtype = getattr(value, "dtype", torch.int64)
    return dtype.is_floating_point or dtype.is_complex


def _is_beyond(value: Any) -> bool:
    return type(value) is int and not int64.is_within((value, value), int64.INT32)


def run_64(
    func: Any, lower: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], metas: Any
) -> Any:
    """Compute an op in 64 bits; results that are known to fit come back in 32.

    Args:
        func: The op.
        lower: Runs its lowering on arrays.
        args: Its arguments.
        kwargs: Its arguments by name.
        metas: Its results on meta tensors.
    """
    arrays = [map_tensors(_wide, a) for a in args]
    named = {k: map_tensors(_wide, v) for k, v in kwargs.items()}
    span = span_of(func, args, kwargs, loose=True)
    with int64.scope():
        value = lower(arrays, named)
        if isinstance(metas, torch.Tensor):
            return _settled(func, value, metas, span, 0)
        parts = enumerate(zip(value, metas, strict=False))
        return type(value)(_settled(func, v, m, span, i) for i, (v, m) in parts)


def in_64(compute: Callable[..., Any], operands: list[Any]) -> Any:
    """Compute a result of integers in 64 bits."""
    arrays = [_wide(o) if isinstance(o, torch.Tensor) else o for o in operands]
    with int64.scope():
        return compute(*arrays)


def _wide(value: Any) -> Any:
    held = held_of(value)
    if isinstance(value, torch.SymInt) or getattr(value, "dtype", None) is torch.int64:
        with int64.scope():
            return held.astype(jnp.int64)
    return held


def _settled(func: Any, value: Any, meta: torch.Tensor, span: Span | None, index: int) -> Any:
    """Return a result in the dtype that holds it; called in the scope."""
    value = jnp.asarray(value)
    if meta.dtype is not torch.int64:
        return value.astype(_IN_32.get(meta.dtype) or backend.jax_dtype(meta.dtype))
    name = func._opname
    is_position = name in _POSITIONS or (name in _WITH_POSITIONS and index == 1)
    if is_position or int64.is_within(span, int64.INT32):
        return value.astype(jnp.int32)
    return value.astype(jnp.int64)


# What jax holds in 32 bits outside of the scope.
_IN_32 = {torch.float64: jnp.float32, torch.complex128: jnp.complex64}


# -- bounds ----------------------------------------------------------------------------------------

_DTYPE_SPANS = {
    torch.bool: (0, 1),
    torch.uint8: (0, 255),
    torch.int8: (-128, 127),
    torch.int16: (-(1 << 15), (1 << 15) - 1),
}


def interval(value: Any, *, loose: bool = False) -> Span | None:
    """Return the smallest and largest value of an operand, where they are known.

    Args:
        value: A tensor or Python number.
        loose: Whether the limits of what holds it count as well.
    """
    if isinstance(value, (bool, int)):
        return (int(value), int(value))
    if isinstance(value, torch.SymInt):
        return value.node.span if loose else None
    if not isinstance(value, torch.Tensor) or _is_floating(value):
        return None
    known = _DTYPE_SPANS.get(value.dtype)
    if isinstance(value, TracedTensor):
        bounds = value._bounds
        known = known if bounds is None else (int(bounds[0]), int(bounds[1]))
        is_wide = value._storage.wide
    else:
        known = known or elements_span(value)
        is_wide = value.dtype is torch.int64 and int64.is_wide(held_of(value))
    return known or (int64.INT64 if is_wide else int64.INT32) if loose else known


def number_span(number: Any) -> Span | None:
    """Return the bounds of a whole number, of a traced one those that its operations leave."""
    if isinstance(number, torch.SymInt):
        low, high = number.node.low, number.node.high
        return None if math.inf in (-low, high) else (int(low), int(high))
    return (number, number) if isinstance(number, int) else None


def argument_of(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the value of one argument of an op, its default if it was not given."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            given = args[position] if position < len(args) else argument.default_value
            return kwargs.get(name, given)
    return None


_BINARY = {"add": "add", "sub": "sub", "mul": "mul", "remainder": "mod", "floor_divide": "floordiv"}
_BINARY |= {"minimum": "sym_min", "maximum": "sym_max", "bitwise_and": "bitwise_and"}
_BINARY |= {"bitwise_or": "bitwise_or", "bitwise_xor": "bitwise_xor", "pow": "pow"}
_BINARY |= {"__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor"}
_BINARY |= {"bitwise_left_shift": "lshift", "__lshift__": "lshift"}
_BINARY |= {"bitwise_right_shift": "rshift", "__rshift__": "rshift"}
# Results whose elements are elements of the first operand.
_SAME = {"gather", "index_select", "index", "embedding", "clone", "_to_copy", "amax", "amin", "max"}
_SAME |= {"min", "sort", "flip", "roll", "repeat", "tril", "triu", "cummax", "cummin", "topk"}
_SAME |= {"lift_fresh_copy", "aminmax"}


def span_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, loose: bool = False
) -> Span | None:
    """Return the smallest and largest integer that an op's result can hold, None if not known.

    Args:
        func: The op.
        args: Its arguments.
        kwargs: Its arguments by name.
        loose: Whether the limits of what holds the operands count as well.
    """
    name = func._opname
    spans = [interval(a, loose=loose) for a in args]
    first = spans[0] if spans else None
    if name in ("randint", "clamp", "multinomial"):
        return _limited(func, name, args, kwargs, first)
    if name in ("index_put", "_unsafe_index_put"):
        accumulate = argument_of(func, "accumulate", args, kwargs)
        return None if accumulate else _union(first, spans[2])
    if name in ("copy", "fill"):
        return spans[1]
    if name in ("max", "min") and len(spans) > 1 and isinstance(args[1], torch.Tensor):
        return _union(first, spans[1])
    if name in _SAME:
        zero = (0, 0) if name in ("tril", "triu", "repeat") else first
        return _union(first, zero)
    if name in ("sum", "cumsum"):
        return _summed(func, args, kwargs, first)
    if name in ("neg", "abs") and first is not None:
        most = max(abs(first[0]), abs(first[1]))
        return (-first[1], -first[0]) if name == "neg" else (0, most)
    if name in ("where", "masked_fill"):
        other = 1 if name == "where" else 0
        return _union(spans[other], spans[2]) if len(spans) > 2 else None
    if name in ("cat", "stack"):
        parts = [interval(part, loose=loose) for part in args[0]]
        return None if None in parts else _hull(parts)
    return _binary(func, spans, kwargs)


def _binary(func: Any, spans: list[Span | None], kwargs: dict[str, Any]) -> Span | None:
    name = func._opname
    if name == "rsub":
        spans, name = spans[1::-1], "sub"
    rounding = kwargs.get("rounding_mode") if name == "div" else None
    if rounding is not None:
        name = "floor_divide"
    rule = _BINARY.get(name)
    if rule is None or len(spans) != 2 or kwargs.get("alpha", 1) != 1:
        return None
    first, second = spans
    if rule == "mod" and second is not None and second[0] > 0:
        return (0, second[1] - 1)
    if rule == "bitwise_and" and second is not None and second[0] == second[1] >= 0:
        return (0, second[1])
    if first is None or second is None or (rule == "floordiv" and second[0] <= 0):
        return None
    # What is truncated is no larger than what is rounded down, and no more than one above it.
    low, high = SPANS[rule](first, second)
    return (low, high + 1) if rounding == "trunc" and low < 0 else (low, high)


def _hull(spans: list[Any]) -> Span:
    return min(s[0] for s in spans), max(s[1] for s in spans)


def _union(a: Span | None, b: Span | None) -> Span | None:
    return None if a is None or b is None else _hull([a, b])


def _limited(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], known: Span | None
) -> Span | None:
    """Return the bounds of what an op draws or clamps."""
    if name == "multinomial":
        return (0, torch.Tensor.size(args[0])[-1] - 1)
    if name == "randint":
        low, high = (argument_of(func, which, args, kwargs) for which in ("low", "high"))
        least, most = number_span(low or 0), number_span(high)
        return (least[0], most[1] - 1) if least and most else None
    low, high = (argument_of(func, which, args, kwargs) for which in ("min", "max"))
    low = known[0] if known and low is None else low
    high = known[1] if known and high is None else high
    return (low, high) if isinstance(low, int) and isinstance(high, int) else None


def _summed(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: Span | None
) -> Span | None:
    source, dims = args[0], argument_of(func, "dim", args, kwargs)
    if known is None or not isinstance(source, torch.Tensor):
        return None
    sizes = torch.Tensor.size(source)
    dims = range(len(sizes)) if dims is None or dims == [] else dims
    count = 1
    for dim in dims if isinstance(dims, (list, tuple, range)) else [dims]:
        count *= sizes[dim] if sizes else 1
    return min(known[0] * count, known[0], 0), max(known[1] * count, known[1], 0)
