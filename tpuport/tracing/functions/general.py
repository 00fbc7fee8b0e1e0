"""Handlers of torch functions that must not reach C++ unchanged while a trace runs.

C++ would ask a traced value for a Python number, or act outside the program.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from tpuport.foundation.user_frames import user_line
from tpuport.tracing.control_flow.cond import traced_check, truth
from tpuport.tracing.core import leaf_flags, or_number, sym_numbers
from tpuport.tracing.core.concretize import concrete_number, decide
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.host_tape import current_tape
from tpuport.tracing.core.row_list import RowList
from tpuport.tracing.core.speculation import RestartTrace
from tpuport.tracing.core.sym_node import NumberNode
from tpuport.tracing.core.tensor import TracedTensor, item, tolist, version
from tpuport.tracing.core.values import value_of, wrap_as
from tpuport.tracing.dispatch.meta_infer import to_meta
from tpuport.tracing.dynamic_shapes.extents import (
    attach,
    bound_of,
    extents_of,
    node_of,
    require_equal,
    resized,
    strip,
)
from tpuport.tracing.functions.registry import FUNCTIONS, Handler, function, holds_traced, traced

# -- Python numbers --------------------------------------------------------------------------------


@function(torch.Tensor.item, torch.ops.aten.item.default)
def _item(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = traced(trace, args[0])
    or_number.refuse(tensor)
    return NotImplemented if tensor is None else item(tensor)


@function(torch.Tensor.tolist)
def _tolist(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = traced(trace, args[0])
    return NotImplemented if tensor is None else tolist(tensor)


@function(torch.Tensor.__bool__, torch.is_nonzero, torch.Tensor.is_nonzero)
def _bool(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = traced(trace, args[0])
    return NotImplemented if tensor is None else decide(truth(tensor))


def _number(kind: type) -> Handler:
    def handler(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = traced(trace, args[0])
        if tensor is None:
            return NotImplemented
        if tensor.numel() != 1:
            msg = (
                "only one element tensors can be converted to Python scalars, got"
                f" {tuple(tensor.shape)}"
            )
            raise TypeError(msg)
        low, high = tensor._bounds or (-math.inf, math.inf)
        return concrete_number(tensor._elem.reshape(()), kind, low, high)

    return handler


FUNCTIONS[torch.Tensor.__float__] = _number(float)


FUNCTIONS[torch.Tensor.__int__] = _number(int)


FUNCTIONS[torch.Tensor.__index__] = _number(int)


FUNCTIONS[torch.Tensor.__complex__] = _number(complex)


@function(torch.Tensor.__contains__)
def _contains(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    if traced(trace, args[0]) is None and traced(trace, args[1]) is None:
        return NotImplemented
    return bool((args[1] == args[0]).any())


@function(torch.Tensor.numpy, torch.Tensor.__array__)
def _numpy(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = traced(trace, args[0])
    return NotImplemented if tensor is None else tensor.numpy()


@function(torch.tensor, torch.as_tensor, torch.asarray)
def _tensor(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    rest = {k: v for k, v in kwargs.items() if k in ("dtype",)}
    tape = current_tape()
    if tape is not None and tape.takes(data):
        return tape.record(func, (data,), rest)
    if isinstance(data, RowList):
        data = _rows_of(data, rest.get("dtype"))
    if isinstance(data, torch.Tensor):
        if traced(trace, data) is None:
            return NotImplemented
        if not rest.get("dtype"):
            or_number.refuse(data)
        made = data.detach().clone() if func is torch.tensor else data
        return made.to(rest["dtype"]) if rest.get("dtype") else made
    if isinstance(data, sym_numbers.SYMBOLIC):
        return _from_number(trace, data, rest.get("dtype"))
    if isinstance(data, (list, tuple)) and holds_traced(trace, data):
        rows = [_tensor_row(trace, item, rest) for item in data]
        return torch.stack(rows)
    return NotImplemented


def _rows_of(data: RowList, dtype: torch.dtype | None) -> torch.Tensor:
    """Return the tensor of a list; eager makes one of float32 of an empty list without a dtype."""
    if dtype is None:
        message = "an empty list makes a tensor of float32 here in PyTorch: pass a dtype"
        traced_check(data.count == 0, lambda: ValueError(message))
    return data.rows


@function(torch.Tensor.new_tensor)
def _new_tensor(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    like, *rest = args
    return _tensor(trace, torch.tensor, tuple(rest), {"dtype": like.dtype} | kwargs)


def _tensor_row(trace: Trace, item: Any, rest: dict[str, Any]) -> torch.Tensor:
    if isinstance(item, torch.Tensor):
        if not rest.get("dtype"):
            or_number.refuse(item)
        return item.detach().to(rest["dtype"]) if rest.get("dtype") else item.detach()
    made = _tensor(trace, torch.tensor, (item,), rest)
    return torch.tensor(item, **rest) if made is NotImplemented else made


def _from_number(trace: Trace, number: Any, dtype: torch.dtype | None) -> torch.Tensor:
    default = {
        torch.SymInt: torch.int64,
        torch.SymFloat: torch.get_default_dtype(),
        torch.SymBool: torch.bool,
    }
    if type(number) is torch.SymFloat and getattr(number.node, "is_numpy", False):
        default[torch.SymFloat] = torch.float64
    meta = torch.empty((), dtype=dtype or default[type(number)], device="meta")
    return wrap_as(func=None, value=sym_numbers.held(number), meta=meta, trace=trace)


# -- indexing by traced integers -------------------------------------------------------------------


def _index_parts(index: Any) -> list[Any]:
    return list(index) if isinstance(index, tuple) else [index]


def _number_index(trace: Trace, index: Any) -> tuple[Any, ...] | None:
    """Convert the 0-d traced integers (and slice ends) of an index to traced Python numbers.

    Return None if it has none.
    """
    parts = _index_parts(index)
    changed = False
    for position, part in enumerate(parts):
        if isinstance(part, slice):
            ends = [_slice_end(trace, end) for end in (part.start, part.stop, part.step)]
            if any(isinstance(end, torch.SymInt) for end in ends):
                parts[position], changed = slice(*ends), True
            continue
        if isinstance(part, torch.SymInt) and isinstance(part.node, NumberNode):
            changed = True
            continue
        tensor = traced(trace, part)
        if (
            tensor is None
            or tensor.dim()
            or tensor.dtype is torch.bool
            or tensor.dtype.is_floating_point
        ):
            continue
        parts[position], changed = item(tensor), True
    return tuple(parts) if changed else None


def _slice_end(trace: Trace, end: Any) -> Any:
    tensor = traced(trace, end)
    return end if tensor is None else item(tensor)


@function(torch.Tensor.__getitem__)
def _getitem(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    source, index = args
    stacked = _stacked(trace, index)
    if stacked is not index:
        return source[stacked]
    parts = _number_index(trace, index)
    if parts is None:
        return NotImplemented
    if traced(trace, source) is None:
        source = _read_only(trace, source)
    view, rest = _select_numbers(source, parts)
    return view[rest] if rest else view


def _read_only(trace: Trace, source: torch.Tensor) -> torch.Tensor:
    """Return a traced copy of a host tensor, which stays a host constant as it is only read.

    Where the part that is taken of it, or the tensor itself, is written to later the trace begins
    again, and takes a view here.
    """
    site = user_line()
    if trace.explorer is None or site in trace.explorer.plan.views:
        return source
    made = wrap_as(None, value_of(source), to_meta(source), trace)
    before = version(source)

    def is_written() -> bool:
        alias = trace.alias(source)
        is_promoted = alias is not None and version(alias) > 0
        return version(made) > 0 or is_promoted or version(source) != before

    trace.shared.note_copied(is_written, lambda: RestartTrace(views=site))
    return made


def _stacked(trace: Trace, index: Any) -> Any:
    """Make tensors of the lists of traced values in an index: C++ would read their values."""

    def one(part: Any) -> Any:
        if isinstance(part, RowList):
            return part.rows
        sequence = isinstance(part, (list, tuple)) and holds_traced(trace, part)
        return _tensor(trace, torch.tensor, (part,), {}) if sequence else part

    if not isinstance(index, tuple):
        return one(index)
    parts = tuple(map(one, index))
    same = all(a is b for a, b in zip(parts, index, strict=True))
    return index if same else parts


def _select_numbers(
    source: torch.Tensor, parts: tuple[Any, ...]
) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Apply the traced integers of an index as selects (views); return the index that remains."""
    used = sum(
        1 if not _is_mask(p) else p.dim() for p in parts if p is not None and p is not Ellipsis
    )
    rest: list[Any] = []
    dim = 0
    for part in parts:
        if isinstance(part, torch.SymInt):
            source = torch.ops.aten.select.int(source, dim, part)
            continue
        rest.append(part)
        if part is Ellipsis:
            dim += source.dim() - (
                used - sum(1 for p in parts[: len(rest)] if isinstance(p, torch.SymInt))
            )
            dim = max(dim, 0)
        elif part is not None:
            dim += part.dim() if _is_mask(part) else 1
    return source, tuple(rest)


def _is_mask(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)


@function(torch.Tensor.__setitem__)
def _setitem(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    target, index, value = args
    stacked = _stacked(trace, index)
    if stacked is not index:
        target[stacked] = value
        return None
    parts = _number_index(trace, index)
    if parts is None:
        return NotImplemented
    view, rest = _select_numbers(target, parts)
    if any(isinstance(part, torch.Tensor) for part in rest):
        view[rest] = value
        return None
    view = view[rest] if rest else view
    value = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=view.dtype)
    view.copy_(_as_long(value, view))
    return None


def _as_long(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Give a value the data-dependent sizes of what it is written to, which eager requires."""
    own, lead = dict(extents_of(value)), target.dim() - value.dim()
    plain = strip(value)
    for dim, node in extents_of(target).items():
        at = dim - lead
        if at < 0 or (at not in own and bound_of(value, at) == 1):
            continue
        message = f"the value does not have the size of dimension {dim} that it is written to"
        require_equal(node, own.get(at) or node_of(bound_of(value, at)), message)
        plain = resized(plain, at, bound_of(target, dim))
        own[at] = node
    return attach(plain.clone(), own) if own else value


# -- devices, autograd ------------------------------------------------------------------


@function(torch.Tensor.cpu, torch.Tensor.pin_memory, torch.Tensor.share_memory_)
def _same(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    return NotImplemented if traced(trace, args[0]) is None else args[0]


@function(torch._assert)
def _assert(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    condition = args[0]
    message = args[1] if len(args) > 1 else kwargs.get("message", "")
    if not isinstance(condition, sym_numbers.SYMBOLIC) and traced(trace, condition) is None:
        return NotImplemented
    held = truth(condition)
    failed = wrap_as(
        None, jnp.logical_not(held), torch.empty((), dtype=torch.bool, device="meta"), trace
    )
    traced_check(failed, lambda: AssertionError(message))
    return None


@function(torch.Tensor.detach_)
def _detach_in_place(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = traced(trace, args[0])
    if tensor is None:
        return NotImplemented
    leaf_flags.detach(tensor)
    return args[0]


def _answer(name: str) -> Handler:
    """Return the handler of an attribute that asks for gradients, of a host tensor too.

    A traced value may have been written to it.
    """

    def handler(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = traced(trace, args[0])
        return NotImplemented if tensor is None else getattr(tensor, name)

    return handler


for _name in ("requires_grad", "is_leaf", "grad_fn"):
    FUNCTIONS[vars(torch._C.TensorBase)[_name].__get__] = _answer(_name)


@function(vars(torch._C.TensorBase)["data"].__set__)
def _set_data(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    """Give a weight another value; refuse that for other host tensors, which would lose theirs.

    A traced value has no memory that torch could give them.
    """
    tensor, value = args
    value = traced(trace, value)
    if value is None or isinstance(tensor, TracedTensor):
        return NotImplemented
    weight = trace.substitutes.get(id(tensor))
    if weight is not None:
        weight.data = value
        return None
    if _is_window(trace.alias(tensor), value):
        return None  # `Module.to` of a layer that the call makes
    if trace.is_foreign(tensor):
        raise port_error(
            f"`.data` of a tensor of shape {tuple(tensor.shape)} that is neither an argument nor"
            " state of the ported module gets a value of the program",
            code="TPU406",
            remedy="make it a buffer of the module, or convert the module that owns it",
        )
    raise port_error(
        f"`.data` of a tensor of shape {tuple(tensor.shape)} with known values gets a value of the"
        " program",
        code="TPU201",
        remedy="assign the tensor instead, x = y, or write to it in place, x.copy_(y)",
    )


def _is_window(tensor: TracedTensor | None, value: TracedTensor) -> bool:
    """Return whether a tensor is the same window into the same memory as a value."""
    if tensor is None or tensor._storage is not value._storage or tensor.shape != value.shape:
        return False
    where = tensor.stride(), tensor.storage_offset()
    return where == (value.stride(), value.storage_offset())


@function(torch.from_numpy)
def _from_numpy(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(args[0], np.ndarray):
        return NotImplemented
    return args[0] if isinstance(args[0], torch.Tensor) else NotImplemented
