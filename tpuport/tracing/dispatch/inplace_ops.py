"""In-place writes: an op's functional form runs, and its result replaces the target's value."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from tpuport.tracing.core.context import current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.int64 import INT32
from tpuport.tracing.core.op_info import RENAMED, OpInfo
from tpuport.tracing.core.redispatch import call
from tpuport.tracing.core.storage import Flow
from tpuport.tracing.core.tensor import TracedTensor, meta_of
from tpuport.tracing.core.values import flat, flow_of, held_of, map_tensors, write
from tpuport.tracing.core.view_steps import OwnWindow
from tpuport.tracing.dispatch import meta_infer
from tpuport.tracing.dispatch.dtype_checks import NAMES
from tpuport.tracing.dispatch.int64_ops import is_pointwise
from tpuport.tracing.dynamic_shapes.extents import bound_of, extents_of, resized, strip
from tpuport.tracing.dynamic_shapes.handlers import involved


def dispatch_write(func: Any, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that writes to its operands, by its functional form."""
    if info.functional is None:
        raise port_error(
            f"{func} writes in place and has no form without side effects",
            code="TPU201",
            remedy="use an out-of-place operation",
        )
    targets: list[Any] = [args[i] if i < len(args) else kwargs.get(n) for i, n in info.writes]
    is_out = any(a.is_out for a in func._schema.arguments)
    given = kwargs
    if is_out:
        kwargs = {k: v for k, v in kwargs.items() if k not in [n for _, n in info.writes]}
    else:
        _check_write(func, info, args, kwargs)
    operands = flat(args, kwargs)
    _refuse_targets(func, args, targets, operands, is_out=is_out)
    if func in RENAMED:
        positional = [a for a in func._schema.arguments if not a.kwarg_only]
        args = (*args, *(a.default_value for a in positional[len(args) :]))
    flow = flow_of(operands)
    if _counts(func, args):
        args[0]._bounds = (INT32[0], INT32[1] - 1)
    for target in flat(tuple(targets), {}):
        if isinstance(target, TracedTensor) and any(type(s) is OwnWindow for s in target._chain):
            target._storage.version += 1  # torch makes the window anew, as one of all its memory
    result = call(info.functional, args, kwargs)
    results = result if isinstance(result, (list, tuple)) else [result]
    _refuse_casts(func, args, given, zip(targets, results, strict=False))
    for target, new in zip(targets, results, strict=False):
        if isinstance(target, (list, tuple)):
            for one, value in zip(target, new, strict=True):
                _write_one(one, value, flow, is_out=is_out)
        else:
            _write_one(target, new, flow, is_out=is_out)
    return targets[0] if len(targets) == 1 else tuple(targets)


def _refuse_targets(
    func: Any, args: tuple[Any, ...], targets: list[Any], operands: list[Any], *, is_out: bool
) -> None:
    """Refuse what eager refuses to write to."""
    for target in targets:
        if isinstance(target, torch.Tensor):
            _refuse_overlap(func, target)
            if not _is_fill(func, args):
                _refuse_shared(func, target, operands, is_out=is_out)
    written = [target for target in flat(tuple(targets), {}) if isinstance(target, TracedTensor)]
    if is_out:
        flow = flow_of([*written, *operands])
        if flow >= Flow.MAYBE:
            raise _by_autograd(
                f"{func._opname}(): functions with out=... arguments don't support automatic"
                " differentiation, but one of the arguments requires grad.",
                flow,
            )
    for target in written:
        refuse_by_autograd(target, operands)


def _refuse_casts(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: Iterable[tuple[Any, Any]]
) -> None:
    """Refuse a result that cannot be cast to the dtype of what it is written to, as eager does."""
    pairs = [pair for pair in written if all(isinstance(one, torch.Tensor) for one in pair)]
    cast = [(target, new) for target, new in pairs if target.dtype != new.dtype]
    if not cast or not (is_pointwise(func) or func._schema.arguments[-1].is_out):
        return
    for target, new in cast if is_pointwise(func) else ():
        if not torch.can_cast(new.dtype, target.dtype):
            have, want = (NAMES.get(one.dtype, one.dtype) for one in (new, target))
            raise RuntimeError(
                f"result type {have} can't be cast to the desired output type {want}"
            )
    if not is_pointwise(func):
        meta_infer.from_torch(
            func,
            tuple(map_tensors(meta_of, one) for one in args),
            {name: map_tensors(meta_of, one) for name, one in kwargs.items()},
        )
        raise port_error(
            f"{func._opname} with an out= tensor of another dtype, in which eager may compute",
            code="TPU201",
            remedy="give the out= tensor the result's dtype, or assign the result",
        )


def refuse_by_autograd(target: TracedTensor, operands: list[Any]) -> None:
    """Refuse a write that autograd refuses: to a leaf, or to a view that it could not follow.

    Raises:
        RuntimeError: as in eager.
        PortError: eager raises if a branch on a traced value went one way.
    """
    flow = flow_of([target, *operands])
    if flow < Flow.MAYBE:
        return
    if target._unwritable is not None:
        raise _by_autograd(target._unwritable, flow)
    if target.requires_grad and (target._is_parameter or target._of_leaf):
        what = "a leaf Variable" if target._is_parameter else "a view of a leaf Variable"
        raise RuntimeError(f"{what} that requires grad is being used in an in-place operation.")


def _by_autograd(message: str, flow: Flow) -> Exception:
    """Return the error of a write that eager refuses if what it writes to or reads requires grad.

    Args:
        message: what eager says.
        flow: of the write's operands.
    """
    if flow is Flow.SEEN:
        return RuntimeError(message)
    return port_error(
        "PyTorch refuses this write in place if its tensors require grad, which depends on a branch"
        f" on a traced value ({message})",
        code="TPU101",
        remedy="write to a clone of the tensor, or use the operation that is not in place",
    )


def _counts(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an op counts calls in the module's state: `num_batches_tracked.add_(1)`.

    It stays in 32 bits without a check, for which 2**31 calls are needed.
    """
    target, trace = args[0], current()
    if func._opname != "add_" or len(args) != 2 or type(args[1]) is not int or args[1] != 1:
        return False
    if trace is None or not isinstance(target, TracedTensor) or target.dtype is not torch.int64:
        return False
    return not target.dim() and any(target is state for state in trace.substitutes.values())


def _refuse_overlap(func: Any, target: torch.Tensor) -> None:
    """Refuse a write to elements that share memory, as eager does and meta tensors do not."""
    sizes = torch.Tensor.size(target)
    shared = any(s == 0 and n > 1 for s, n in zip(target.stride(), sizes, strict=True))
    if not shared or func._opname in ("fill_", "zero_"):
        return
    if func._opname in ("masked_fill_", "index_put_", "_index_put_impl_", "scatter_"):
        raise port_error(
            f"{func} writes to an expanded tensor, elements of which share memory",
            code="TPU202",
            remedy="call .clone() on it first",
        )
    msg = (
        "unsupported operation: more than one element of the written-to tensor refers to a"
        " single memory"
        " location. Please clone() the tensor before performing the operation."
    )
    raise RuntimeError(msg)


# Ops that eager lets read no element of what they write, and those that read as they like.
_APART = {"gather", "index_select", "take", "cat", "cumsum", "cumprod", "_index_put_impl_"}
_APART |= {"index_put_", "index_copy_", "index_add_", "index_reduce_", "put_"}
_APART |= {"scatter_", "scatter_add_", "scatter_reduce_"}
_ANYHOW = {"fill_", "masked_fill_", "index_fill_"}


def _refuse_shared(func: Any, target: torch.Tensor, operands: list[Any], *, is_out: bool) -> None:
    """Refuse a write to memory that an operand reads in another order, as eager does."""
    name = func._opname
    is_elementwise = name in ("copy_", "where") or is_pointwise(func)
    if name in _ANYHOW or not (name in _APART or is_elementwise):
        return
    for operand in operands:
        if not isinstance(operand, TracedTensor) or not isinstance(target, TracedTensor):
            continue
        if operand is target or operand._storage is not target._storage:
            continue
        _check_apart(target, operand, may_be_one=name not in _APART)
    if name in _APART and sum(operand is target for operand in operands) > (0 if is_out else 1):
        raise RuntimeError(_SHARED)


_SHARED = (
    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a"
    " single memory location. Please clone() the tensor before performing the operation."
)


def _is_fill(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether eager fills a mask with one number, which it reads first: `x[m] = x[0]`."""
    if func._opname not in ("index_put_", "_index_put_impl_"):
        return False
    _, indices, values, *accumulate = args
    masks = [index for index in indices if index is not None]
    is_one = torch.Tensor.numel(values) == 1 and not any(accumulate[:1])
    return is_one and all(meta_of(m).dtype in (torch.bool, torch.uint8) for m in masks)


def _check_apart(target: TracedTensor, operand: TracedTensor, *, may_be_one: bool) -> None:
    metas = meta_of(target), meta_of(operand)
    if not all(torch.ops.aten.is_non_overlapping_and_dense(meta) for meta in metas):
        _refuse_shift(target, operand)
        return
    a, b = (torch.Tensor.storage_offset(one) for one in (target, operand))
    m, n = (meta.numel() for meta in metas)
    is_one = a == b and metas[0].stride() == metas[1].stride() and metas[0].shape == metas[1].shape
    if m and n and a < b + n and b < a + m and not (is_one and may_be_one):
        raise RuntimeError(_SHARED)


def _refuse_shift(target: TracedTensor, operand: TracedTensor) -> None:
    """Refuse `x[:, 1:] = x[:, :-1]`, for which eager has no defined result.

    Eager does not look at tensors with gaps. It goes through memory in order, so what it reads
    behind the place where it writes is by then overwritten; on a GPU, threads race for it. What is
    read ahead (`x[:, :-1] = x[:, 1:]`) is still the old value.
    """
    metas = meta_of(target), meta_of(operand)
    if metas[0].stride() != metas[1].stride() or metas[0].shape != metas[1].shape:
        return
    a, b = (torch.Tensor.storage_offset(one) for one in (target, operand))
    if a > b and _share_elements(metas[0], int(a - b)):
        raise port_error(
            "an in-place write to a view reads elements of the same tensor that it overwrites, as"
            " x[:, 1:] = x[:, :-1] does; in eager PyTorch the result depends on the order of the"
            " elements in memory, and on the device",
            code="TPU202",
            remedy="read from a copy: x[:, 1:] = x[:, :-1].clone()",
        )


def _share_elements(meta: torch.Tensor, shift: int) -> bool:
    """Return whether a view shares elements with the one that lies `shift` elements further."""
    # Only addresses are compared; no element of either view is read.
    memory, strides = np.empty(shift + 1, np.uint8), meta.stride()
    first, second = (as_strided(memory[at:], meta.shape, strides) for at in (0, shift))
    return np.shares_memory(first, second)


def _write_one(target: torch.Tensor, new: Any, flow: Flow, *, is_out: bool) -> None:
    is_empty = torch.Tensor.numel(target) == 0
    if (is_out or is_empty) and torch.Tensor.size(target) != torch.Tensor.size(new):
        raise port_error(
            "an out= tensor that would be resized",
            code="TPU201",
            remedy="allocate it with the result's shape",
        )
    write(target, held_of(_as_long(new, target)), flow=flow)
    if isinstance(new, TracedTensor) and new._bounds and new.dtype == target.dtype:
        _keep_bounds(target, new._bounds)


def _as_long(new: Any, target: torch.Tensor) -> Any:
    """Return what is written with as much padding as the target has, where a size is data.

    The result of two operands with equal sizes has the padding of the shorter one.
    """
    extents = extents_of(target)
    if not extents or not isinstance(new, torch.Tensor) or new.dim() != target.dim():
        return new
    made = strip(new)
    for dim in extents:
        if 1 < bound_of(made, dim) < bound_of(target, dim):
            made = resized(made, dim, bound_of(target, dim))
    return made


def _keep_bounds(target: torch.Tensor, bounds: tuple[float, float]) -> None:
    """Record the bounds of what was written, if it is all that the storage holds."""
    trace = current()
    traced = target if isinstance(target, TracedTensor) or trace is None else trace.alias(target)
    if isinstance(traced, TracedTensor):
        storage = traced._storage
        if storage.held.size == torch.Tensor.numel(target):
            storage.bounds = (storage.held, target.dtype, bounds)


def _check_write(func: Any, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let torch refuse what it refuses in eager (shapes that do not broadcast, int += float)."""
    trace = current()
    if trace is not None and trace.dynamic and involved(args, kwargs):
        return
    if func._opname in ("index_put_", "masked_scatter_", "_index_put_impl_"):
        return  # the number of rows that a mask selects is not known
    # A 0-d host tensor stands for itself there, and this one must not be written to.
    written = [place for place, _ in info.writes]
    given = [map_tensors(meta_of, a) if i in written else a for i, a in enumerate(args)]
    meta_infer.infer(func, tuple(given), kwargs)
