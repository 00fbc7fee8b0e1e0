"""Ops that only compute: metadata from torch, the value from a lowering or a decomposition."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

from tpuport.foundation.errors import PortError, TpuportError
from tpuport.foundation.interop.seen_device import where_they_are
from tpuport.tracing.core import or_number, sym_numbers
from tpuport.tracing.core.context import Trace, current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.int64 import INT32, is_within
from tpuport.tracing.core.keys import op_key
from tpuport.tracing.core.op_info import OpInfo, is_taken_apart
from tpuport.tracing.core.storage import Flow
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.core.values import flat, flow_of, map_tensors, value_of, wrap_as
from tpuport.tracing.core.view_steps import tied
from tpuport.tracing.dispatch import dtypes, meta_infer
from tpuport.tracing.dispatch.int64_ops import (
    argument_of,
    floating_dtype,
    is_pointwise,
    needs_64,
    operand,
    python_number,
    run_64,
    span_of,
)
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
    if kwargs.get("device") == _META:
        return metas  # torch asks so for the sizes of a tangent that is zero
    if not info.is_random:
        dtypes.refuse(func, args, kwargs, tensors)
    if info.is_random:
        kwargs = {k: v for k, v in kwargs.items() if k != "generator"} | {
            "key": op_key(trace, kwargs)
        }
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "layout", "pin_memory")}
    is_number = any(isinstance(t, sym_numbers.SYMBOLIC) for t in tensors)
    as_eager = functools.partial(_as_eager, func, args, kwargs, tensors)
    lower = functools.partial(_lower, func, info.lower, as_eager, is_number=is_number)
    repeats = False
    if needs_64(func, args, kwargs, metas):
        value = run_64(func, lower, args, kwargs, metas)
    else:
        operands, named = _operands(func, args, kwargs, tensors, metas)
        value = lower(operands, named)
        repeats = any(value is one for one in operands)
    mark = or_number.check(func, tensors, metas)
    flow = Flow.STOPPED if func._opname in _CREATIONS else flow_of(tensors)
    if flow >= Flow.MAYBE and _has_zero_gradient(func, args, kwargs):
        value = tied(value, *map(value_of, tensors))
    result = _wrap_result(func, value, metas, trace, flow)
    _mark(func, args, kwargs, result)
    if isinstance(result, TracedTensor):
        result._repeats = repeats
    if isinstance(result, TracedTensor) and not result.dim():
        given = [t for t in tensors if isinstance(t, torch.Tensor)]
        result._or_number = bool(given) and all(getattr(t, "_or_number", False) for t in given)
        result._unlike_number = mark
    return result


def _operands(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any], metas: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arrays that an op computes with in 32 bits."""
    dtype = floating_dtype(func, tensors, metas)

    def array(value: Any) -> Any:
        return operand(dtype, value)

    jax_args = [map_tensors(array, python_number(dtype, a)) for a in args]
    if is_pointwise(func) and isinstance(metas, torch.Tensor):
        jax_args = [broadcast_wide(a, tuple(metas.shape)) for a in jax_args]
    return jax_args, {k: map_tensors(array, v) for k, v in kwargs.items()}


_META = torch.device("meta")
# Ops that read no value of their operand, only its shape and dtype.
_CREATIONS = {
    f"{name}_like" for name in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")
}
_CREATIONS |= {f"new_{name}" for name in ("zeros", "ones", "full", "empty")}
# Ops with a gradient of zeros in eager, which their lowerings may not read all operands for; and
# those that have one where a number among their arguments is 0 (an exponent, a factor).
_ZERO_GRADIENT = {"fill", "zero", "copy", "bernoulli", "copysign", "floor_divide"}
_ZERO_BY_NUMBER = {"pow", "addmm", "addmv", "addbmm", "baddbmm", "addr"}


def _has_zero_gradient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = func._opname
    if name in _ZERO_BY_NUMBER:
        return any(type(v) in (int, float) and v == 0 for v in (*args, *kwargs.values()))
    return name in _ZERO_GRADIENT or (name == "div" and kwargs.get("rounding_mode") is not None)


_INDICES = {"topk", "argmax", "argmin", "argsort", "sort", "max", "min"}


def _mark(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Record facts about a result: the mask that it negates, the bounds of integers."""
    name = func._opname
    if name in ("bitwise_not", "logical_not"):
        source = args[0]
        if isinstance(source, TracedTensor) and source.dtype is torch.bool:
            result._negates = (source, source._elem)
        return
    values = result[0] if isinstance(result, tuple) and result else result
    if isinstance(values, TracedTensor) and values.dtype in _WHOLE and name not in _ARGUMENTS:
        span = span_of(func, args, kwargs) or _truncated(func, args)
        if is_within(span, INT32):
            values._bounds = span
    elif isinstance(values, TracedTensor) and values.dtype is torch.float32:
        values._bounds = _drawn(func, args, kwargs)
    if name in _INDICES and (name in _ARGUMENTS or isinstance(result, tuple)):
        _mark_indices(func, args, kwargs, result[1] if isinstance(result, tuple) else result)


def _truncated(func: Any, args: tuple[Any, ...]) -> tuple[int, int] | None:
    """Return the bounds of integers that are made of floats with bounds."""
    source = args[0] if args else None
    if func._opname != "_to_copy" or not isinstance(source, TracedTensor) or not source._bounds:
        return None
    return math.trunc(source._bounds[0]), math.trunc(source._bounds[1])


def _drawn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, float] | None:
    """Return the bounds of float32 numbers that an op draws evenly, as `.item()` can ask for them.

    A draw from 0 is below its upper limit, also when it is rounded.
    """
    low, high = 0.0, 1.0
    if func._opname == "uniform":
        low, high = (argument_of(func, name, args, kwargs) for name in ("from", "to"))
    elif func._opname not in ("rand", "rand_like"):
        return None
    if not (isinstance(low, (int, float)) and isinstance(high, (int, float)) and low <= high):
        return None
    if low == 0 and high > 0:
        high = float(np.nextafter(np.float32(high), np.float32(0)))
    return (min(low, high), max(low, high))


_WHOLE = {torch.int64, torch.int32}
_ARGUMENTS = {"argmax", "argmin", "argsort"}


def _mark_indices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    source = args[0]
    if isinstance(source, torch.Tensor) and source.dim():
        dim = argument_of(func, "dim", args, kwargs)
        size = torch.Tensor.numel(source) if dim is None else torch.Tensor.size(source)[dim]
        result._bounds = (0, size - 1)


def _lower(
    func: Any,
    lower: Callable[..., Any],
    as_eager: Callable[[], None],
    args: list[Any],
    kwargs: dict[str, Any],
    is_number: bool,
) -> Any:
    """Run a lowering; `is_number` says whether a traced number is among the arguments.

    If it fails, `as_eager` may raise what eager raises.
    """
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
        as_eager()
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


def _as_eager(func: Any, args: Any, kwargs: Any, tensors: list[Any]) -> None:
    """Raise what eager raises for operands of these sizes and dtypes, if it does."""
    if all(isinstance(t, torch.Tensor) and t.numel() <= _MOST_ASKED for t in tensors):
        zeros = functools.partial(
            map_tensors, lambda t: torch.zeros(torch.Tensor.size(t), dtype=t.dtype)
        )
        func(*map(zeros, args), **{name: zeros(value) for name, value in kwargs.items()})


# Larger operands are not made to see what eager raises for them.
_MOST_ASKED = 2**20


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
            result = within(mode, rule, args, kwargs)
        else:
            result = within(mode, func.decompose, args, kwargs)
    except NotImplementedError as error:
        result, cause = NotImplemented, error
    else:
        cause = None
    if result is NotImplemented and (kernel := _kernel_of_users(func)) is not None:
        return within(mode, kernel, args, kwargs)
    if result is NotImplemented:
        raise _not_lowered(func, cause)
    return result


def _not_lowered(func: Any, cause: Exception | None) -> PortError:
    """Return the error for an operation that nothing turns into jax's."""
    if "sparse" in func._opname:
        return port_error(
            f"{func} makes or reads a sparse tensor of values of the program",
            code="TPU105",
            remedy="make it of tensors that depend on no input, or before the call, and it is a"
            " constant; or sum rows instead of a product with it"
            " (x.new_zeros(n, d).index_add(0, rows, values[:, None] * x[columns]))",
            cause=cause,
        )
    return port_error(
        f"{func} has no lowering to JAX",
        code="TPU105",
        remedy=(
            "register one with tpuport.tracing.lowerings.lowering, or rewrite this line with"
            " other torch operations"
        ),
        cause=cause,
    )


def _kernel_of_users(func: Any) -> Callable[..., Any] | None:
    """Return what runs an operator as a package has written it in Python (`torch.library`).

    None for an operator of torch, or one in C++. Gradients are refused: where a backward is
    registered, this runs as the forward of a custom function, without them.
    """
    namespace, _, name = func.name().partition("::")
    if namespace in _OF_TORCH:
        return None
    place = f"{namespace}/{name}/"

    def run(*args: Any, **kwargs: Any) -> Any:
        flows = torch.is_grad_enabled() and any(t.requires_grad for t in flat(args, kwargs))
        if flows:
            raise port_error(
                f"a gradient goes through {func.name()}, an operator that is made by torch.library"
                " without a backward",
                code="TPU403",
                remedy="register one with torch.library.register_autograd; in code that is not"
                " yours, leave the class to eager PyTorch: tpuport run --eager NAME",
            )
        return func._op_dk(kernel, *args, **kwargs)

    for key in ("CompositeExplicitAutograd", "CPU"):
        if place + key in torch.library._impls:
            kernel = getattr(torch._C.DispatchKey, key)
            return run
    return None


# Their operators that are written in Python are decompositions, which are tried before.
_OF_TORCH = frozenset({"aten", "prims", "higher_order", "inductor", "torchvision", "torchaudio"})


def within(mode: Any, rule: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a function in the mode of a trace, in which ops on host tensors are seen too."""
    with where_they_are(), mode or contextlib.nullcontext():
        return rule(*args, **kwargs)
