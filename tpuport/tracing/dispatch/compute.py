"""Ops that only compute: metadata from torch, the value from a lowering or a decomposition."""

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import jax
import torch

from tpuport.foundation.errors import TpuportError
from tpuport.foundation.interop.seen_device import where_they_are
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.context import Trace, current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.keys import op_key
from tpuport.tracing.core.op_info import OpInfo, is_taken_apart
from tpuport.tracing.core.tensor import Flow, TracedTensor
from tpuport.tracing.core.values import flat, flow_of, map_tensors, value_of, wrap_as
from tpuport.tracing.core.view_steps import tied
from tpuport.tracing.dispatch import meta_infer
from tpuport.tracing.lowerings._numeric import broadcast_wide


def _known_masks(indices: Any) -> list[Any]:
    """Convert the host masks of an index list to positions: how many they select is known."""
    out: list[Any] = []
    for item in indices:
        if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
            out += list(item.nonzero().unbind(1))
        else:
            out.append(item)
    return out


def dispatch_value(func: Any, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that writes to no operand and returns no view."""
    trace = current()
    if func._opname in ("index", "index_put", "_unsafe_index_put"):
        args = (args[0], _known_masks(args[1]), *args[2:])
    if info.lower is None:
        return _decompose(func, args, kwargs)
    tensors = flat(args, kwargs)
    metas = meta_infer.infer(func, args, kwargs)
    if info.is_random:
        kwargs = {k: v for k, v in kwargs.items() if k != "generator"} | {
            "key": op_key(trace, kwargs)
        }
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "layout", "pin_memory")}
    jax_args = [map_tensors(value_of, a) for a in args]
    jax_kwargs = {k: map_tensors(value_of, v) for k, v in kwargs.items()}
    if torch.Tag.pointwise in func.tags and isinstance(metas, torch.Tensor):
        jax_args = [broadcast_wide(a, tuple(metas.shape)) for a in jax_args]
    is_number = any(isinstance(t, sym_numbers.SYMBOLIC) for t in tensors)
    value = _lower(func, info.lower, jax_args, jax_kwargs, is_number)
    flow = flow_of(tensors)
    if flow is Flow.SEEN and _has_zero_gradient(func, args, kwargs):
        value = tied(value, *map(value_of, tensors))
    result = _wrap_result(func, value, metas, trace, flow)
    if func._opname in _MARKS:
        _mark(func, args, kwargs, result)
    elif func._opname in _BOUNDS and result.dtype is torch.int64:
        result._bounds = _bounds_of(func, args, kwargs)
    return result


_BOUNDS = {"clamp", "remainder", "floor_divide", "randint", "multinomial", "gather", "index_select"}
_BOUNDS |= {"index", "embedding", "add", "sub", "mul"}


def _bounds_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the smallest and largest integer that a result can hold, None if that is not known."""
    name, known = func._opname, _interval(args[0])
    if name in ("clamp", "randint"):
        low, high = (
            _argument(func, which, args, kwargs)
            for which in (("min", "max") if name == "clamp" else ("low", "high"))
        )
        if name == "randint":
            return (low or 0, high - 1) if isinstance(high, int) else None
        low = known[0] if known and low is None else low
        high = known[1] if known and high is None else high
        return (low, high) if isinstance(low, int) and isinstance(high, int) else None
    if name == "multinomial":
        return (0, torch.Tensor.size(args[0])[-1] - 1)
    if name in ("gather", "index_select", "index", "embedding"):
        return known
    other = _interval(args[1])
    if other is None or kwargs.get("alpha", 1) != 1 or len(args) > 2:
        return None
    if name == "remainder":
        return (0, other[1] - 1) if other[0] > 0 else None
    if known is None:
        return None
    if name == "floor_divide":
        return (known[0] // other[0], known[1] // other[0]) if 0 < other[0] == other[1] else None
    operation = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}[name]
    ends = [operation(a, b) for a in known for b in other]
    return (min(ends), max(ends)) if max(map(abs, ends)) < 1 << 31 else None


def _interval(value: Any) -> tuple[int, int] | None:
    """Return the smallest and largest value of an operand, where they are known."""
    if isinstance(value, int):
        return (value, value)
    return value._bounds if isinstance(value, TracedTensor) else None


# Ops with a gradient of zeros in eager, which their lowerings may not read all operands for; and
# those that have one where a number among their arguments is 0 (an exponent, a factor).
_ZERO_GRADIENT = {"fill", "zero", "copy", "bernoulli", "copysign", "floor_divide"}
_ZERO_BY_NUMBER = {"pow", "addmm", "addmv", "addbmm", "baddbmm", "addr"}


def _has_zero_gradient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = func._opname
    if name in _ZERO_BY_NUMBER:
        return any(type(v) in (int, float) and v == 0 for v in (*args, *kwargs.values()))
    return name in _ZERO_GRADIENT or (name == "div" and kwargs.get("rounding_mode") is not None)


_MARKS = {
    "sum",
    "bitwise_not",
    "logical_not",
    "topk",
    "argmax",
    "argmin",
    "argsort",
    "sort",
    "clone",
    "_to_copy",
}


def _mark(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Record facts about a result: the mask that it negates, the bounds of a count or an index."""
    source, name = args[0], func._opname
    if name in ("bitwise_not", "logical_not"):
        if isinstance(source, TracedTensor) and source.dtype is torch.bool:
            result._negates = (source, source._elem)
    elif name == "sum":
        if (
            isinstance(source, TracedTensor)
            and result.dtype is torch.int64
            and torch.Tensor.numel(result)
        ):
            low, high = (0, 1) if source.dtype is torch.bool else source._bounds or (None, None)
            if low is not None and high is not None:
                count = torch.Tensor.numel(source) // torch.Tensor.numel(result)
                result._bounds = (min(low * count, 0), high * count)
    elif name in ("clone", "_to_copy"):
        if isinstance(source, TracedTensor):
            result._bounds = (0, 1) if source.dtype is torch.bool else source._bounds
    elif isinstance(source, torch.Tensor) and source.dim():
        dim = _argument(func, "dim", args, kwargs)
        size = torch.Tensor.numel(source) if dim is None else torch.Tensor.size(source)[dim]
        indices = result[1] if isinstance(result, tuple) else result
        indices._bounds = (0, size - 1)


def _argument(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the value of one argument of an op, its default if it was not given."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            given = args[position] if position < len(args) else argument.default_value
            return kwargs.get(name, given)
    return None


def _lower(
    func: Any, lower: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], is_number: bool
) -> Any:
    """Run a lowering; `is_number` says whether a traced number is among the arguments."""
    trace = current()
    if trace is not None:
        name = str(func)
        trace.recorder.counters.ops[name] = trace.recorder.counters.ops.get(name, 0) + 1
    try:
        with jax.named_scope(func._opname):
            return lower(*args, **kwargs)
    except TpuportError:
        raise
    except Exception as error:
        if is_number:
            raise port_error(
                f"{func._opname} needs the value of a number that depends on the program's inputs",
                code="TPU103",
                remedy="pass it as a Python number (it is then static)",
                cause=error,
            ) from error
        raise port_error(
            f"the lowering of {func} to JAX failed: {type(error).__name__}:"
            f" {str(error).splitlines()[0] if str(error) else ''}",
            code="TPU105",
            remedy=(
                "this is a gap in tpuport or torchax: please report it with this line;"
                " until then use other operations"
            ),
            cause=error,
        ) from error


def _wrap_result(func: Any, value: Any, meta: Any, trace: Trace | None, flow: Flow) -> Any:
    if isinstance(meta, torch.Tensor):
        return wrap_as(func, value, meta, trace, flow)
    if isinstance(meta, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) < len(meta):
            msg = f"the lowering of {func} gave {type(value).__name__}, expected {len(meta)} values"
            raise AssertionError(msg)
        parts = [
            None if m is None else _wrap_result(func, v, m, trace, flow)
            for v, m in zip(value, meta, strict=False)
        ]
        return type(meta)(parts) if type(meta) in (list, tuple) else tuple(parts)
    return value


def _decompose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op without a lowering by torch's own decomposition."""
    from torch._decomp import decomposition_table

    trace = current()
    rule = None if is_taken_apart(func) else decomposition_table.get(func)
    mode = trace.dispatch_mode if trace is not None else None
    try:
        if rule is not None:
            result = _within(mode, rule, args, kwargs)
        else:
            result = _within(mode, func.decompose, args, kwargs)
    except NotImplementedError as error:
        result, cause = NotImplemented, error
    else:
        cause = None
    if result is NotImplemented:
        raise port_error(
            f"{func} has no lowering to JAX",
            code="TPU105",
            remedy=(
                "register one with tpuport.tracing.lowerings.lowering, or rewrite this line with"
                " other torch operations"
            ),
            cause=cause,
        )
    return result


def _within(mode: Any, rule: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with where_they_are(), mode or contextlib.nullcontext():
        return rule(*args, **kwargs)
