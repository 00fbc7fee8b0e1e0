"""The dispatch of ATen ops: every op on a traced tensor comes through here.

An op is first run on meta tensors, which gives torch's own shapes, dtypes, strides, aliasing and
errors; then its value comes from a lowering: ours (`lowerings/`), else torchax's, else torch's
decomposition. Tensors that do not depend on the program's inputs stay plain CPU tensors, are
computed by torch, and become constants when they meet a traced one.
"""

import functools
from typing import Any

import torch

from tpuport.tracing.core import series
from tpuport.tracing.core.context import Trace, current
from tpuport.tracing.core.loop_sites import OPS_APART, note_joined, note_long
from tpuport.tracing.core.op_handler import op_handler
from tpuport.tracing.core.op_info import op_info
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.core.values import map_tensors
from tpuport.tracing.dispatch.compute import dispatch_value
from tpuport.tracing.dispatch.dtype_checks import CHECKED, check_dtypes
from tpuport.tracing.dispatch.foreach import register_foreach
from tpuport.tracing.dispatch.inplace_ops import dispatch_write
from tpuport.tracing.dispatch.value_checks import RULES, check_values
from tpuport.tracing.dispatch.view_ops import as_strided, dispatch_view, inplace_view
from tpuport.tracing.dynamic_shapes import counted_rows
from tpuport.tracing.dynamic_shapes.dispatch import dispatch as dispatch_bounded
from tpuport.tracing.dynamic_shapes.handlers import involved
from tpuport.tracing.dynamic_shapes.selection import traced_mask
from tpuport.tracing.lowerings import load as load_lowerings

load_lowerings()
register_foreach()

aten = torch.ops.aten


@op_handler
def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one ATen op that has a traced operand, or draws random numbers in a trace.

    Raises:
        PortError: no lowering, or a form of the op that cannot be kept exact.
    """
    trace = current()
    if trace is not None:
        trace.count_ops += 1
        if not trace.count_ops % OPS_APART:
            note_long()
        whole = series.joined(trace, func, args, kwargs) if trace.has_rows else None
        if trace.has_runs and whole is None:
            whole = counted_rows.joined(trace, func, args, kwargs)
        if whole is not None:
            return whole
    if trace is not None and not trace.checked and func._opname in CHECKED:
        check_dtypes(func, args, kwargs, takes_int32=trace.takes_int32)
    if trace is None or trace.checked or func._opname not in RULES:
        result = _run(trace, func, args, kwargs)
        if func is aten.cat.default:
            note_joined(args[0], result)
        if trace is not None and kwargs.get("check_errors"):
            status = (result[-1], func._opname)
            check_values(trace, aten._linalg_check_errors.default, status, {})
        return result
    check_values(trace, func, args, kwargs)
    with trace.values_checked():
        return _run(trace, func, args, kwargs)


def _run(trace: Trace | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    info = op_info(func)
    if trace is not None and not info.writes and (trace.dynamic or func._opname in _SELECTIONS):
        if (func._opname in _SELECTIONS and _selects(func, args)) or involved(args, kwargs):
            # Handlers call torch, which reads the host's memory of a tensor that has an alias.
            given = tuple(map_tensors(functools.partial(_alias, trace), a) for a in args)
            with trace.values_checked():
                result = dispatch_bounded(func, given, kwargs)
            if result is not NotImplemented:
                return result
    if info.special is not None:
        return info.special(*args, **kwargs)
    if info.inplace_view:
        return inplace_view(func, args, kwargs)
    if info.writes:
        return dispatch_write(func, info, args, kwargs)
    if info.view is not None:
        return dispatch_view(func, info, args, kwargs)
    if func is aten.as_strided.default:
        return as_strided(*args, **kwargs)
    return dispatch_value(func, info, args, kwargs)


_SELECTIONS = {"nonzero", "masked_select", "index", "index_put", "masked_scatter", "bincount"}
_SELECTIONS |= {"_unique2", "unique_consecutive", "unique_dim", "nms"}
# Of these the size of the result depends on data whatever is traced.
_ALWAYS = {"nonzero", "bincount", "masked_select", "_unique2", "unique_consecutive"}
_ALWAYS |= {"unique_dim", "nms"}


def _alias(trace: Trace, value: Any) -> Any:
    """Return what holds the value of a tensor: its alias, if it is a host tensor with one."""
    is_host = isinstance(value, torch.Tensor) and not isinstance(value, TracedTensor)
    found = trace.alias(value) if is_host else None
    return value if found is None else found


def _selects(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an op selects or counts by traced values."""
    if func._opname in _ALWAYS:
        return True
    masks = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    return any(traced_mask(m) for m in masks)
