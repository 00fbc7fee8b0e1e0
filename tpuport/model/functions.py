"""Calls of the torch Python API that must not reach C++ as they are while a trace runs.

Two kinds: ones that would ask a traced value for a Python number, and ones that C++ would take
apart into pieces that XLA compiles worse (linear, matmul, einsum, attention).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tpuport.model import numbers
from tpuport.model.bounded import contractions
from tpuport.model.bounded.extents import attach, extents_of, strip
from tpuport.model.branching import traced_check, truth
from tpuport.model.decisions import concrete_number, decide
from tpuport.model.locate import port_error
from tpuport.model.meta import attention_meta, check_one_dtype, linear_meta, matmul_meta, to_meta
from tpuport.model.number_node import NumberNode
from tpuport.model.tensor import TracedTensor
from tpuport.model.trace import Trace
from tpuport.model.values import grad_frozen, value_of, wrap_as

# The C++ functions behind torch.nn.functional.
_NN: Any = torch._C._nn  # pyright: ignore[reportAttributeAccessIssue]  (not in the stubs)

Handler = Callable[[Trace, Any, tuple[Any, ...], dict[str, Any]], Any]
FUNCTIONS: dict[Any, Handler] = {}


def function(*targets: Any) -> Callable[[Handler], Handler]:
    """Register a handler for torch functions.

    It may return NotImplemented to let the call go its way.
    """

    def register(handler: Handler) -> Handler:
        for target in targets:
            FUNCTIONS[target] = handler
        return handler

    return register


def traced(trace: Trace, value: Any) -> TracedTensor | None:
    """`value` as a traced tensor if it is one or stands for one."""
    if isinstance(value, TracedTensor):
        return value
    return trace.alias(value) if isinstance(value, torch.Tensor) else None


# -- Python numbers --------------------------------------------------------------------------------


@function(torch.Tensor.item)
def _item(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = traced(trace, args[0])
    return NotImplemented if tensor is None else numbers.item(tensor)


@function(torch.Tensor.tolist)
def _tolist(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = traced(trace, args[0])
    return NotImplemented if tensor is None else numbers.tolist(tensor)


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
        return concrete_number(tensor._elem.reshape(()), kind)

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
    if isinstance(data, torch.Tensor):
        if traced(trace, data) is None:
            return NotImplemented
        made = data.detach().clone() if func is torch.tensor else data
        return made.to(rest["dtype"]) if rest.get("dtype") else made
    if isinstance(data, numbers.SYMBOLIC):
        return _from_number(trace, data, rest.get("dtype"))
    if isinstance(data, (list, tuple)) and _holds_traced(trace, data):
        rows = [_tensor_row(trace, item, rest) for item in data]
        return torch.stack(rows)
    return NotImplemented


def _tensor_row(trace: Trace, item: Any, rest: dict[str, Any]) -> torch.Tensor:
    if isinstance(item, torch.Tensor):
        return item.detach().to(rest["dtype"]) if rest.get("dtype") else item.detach()
    made = _tensor(trace, torch.tensor, (item,), rest)
    return torch.tensor(item, **rest) if made is NotImplemented else made


def _holds_traced(trace: Trace, data: Any) -> bool:
    if isinstance(data, (list, tuple)):
        return any(_holds_traced(trace, item) for item in data)
    return isinstance(data, numbers.SYMBOLIC) or traced(trace, data) is not None


def _from_number(trace: Trace, number: Any, dtype: torch.dtype | None) -> torch.Tensor:
    default = {
        torch.SymInt: torch.int64,
        torch.SymFloat: torch.get_default_dtype(),
        torch.SymBool: torch.bool,
    }
    meta = torch.empty((), dtype=dtype or default[type(number)], device="meta")
    return wrap_as(func=None, value=numbers.node_value(number), meta=meta, trace=trace, frozen=True)


# -- indexing by traced integers -------------------------------------------------------------------


def _index_parts(index: Any) -> list[Any]:
    return list(index) if isinstance(index, tuple) else [index]


def _number_index(trace: Trace, index: Any) -> tuple[Any, ...] | None:
    """An index with its 0-d traced integers (and slice ends) as traced Python numbers.

    None if it has none.
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
        parts[position], changed = numbers.item(tensor), True
    return tuple(parts) if changed else None


def _slice_end(trace: Trace, end: Any) -> Any:
    tensor = traced(trace, end)
    return end if tensor is None else numbers.item(tensor)


@function(torch.Tensor.__getitem__)
def _getitem(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    source, index = args
    parts = _number_index(trace, index)
    if parts is None:
        return NotImplemented
    if traced(trace, source) is None:
        # Only read: a copy is traced, and the host tensor stays a host constant.
        source = wrap_as(None, value_of(source), _metas([source])[0], trace, True)
    view, rest = _select_numbers(source, parts)
    return view[rest] if rest else view


def _select_numbers(
    source: torch.Tensor, parts: tuple[Any, ...]
) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Apply the traced integers of an index as selects (views); gives the index that remains."""
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
    parts = _number_index(trace, index)
    if parts is None:
        return NotImplemented
    view, rest = _select_numbers(target, parts)
    if rest:
        view[rest] = value
    else:
        view.copy_(
            value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=view.dtype)
        )
    return None


# -- what XLA would rather have whole --------------------------------------------------------------


def _any_traced(trace: Trace, values: Any) -> bool:
    return any(traced(trace, v) is not None for v in values if isinstance(v, torch.Tensor))


def _autocast(func: Any) -> bool:
    """Whether torch's CPU autocast is on: then C++ must see the call, to cast its operands."""
    del func
    return torch.is_autocast_enabled("cpu")


def _whole(trace: Trace, operands: list[Any], meta: Any, compute: Callable[..., jax.Array]) -> Any:
    tensors = [o for o in operands if isinstance(o, torch.Tensor)]
    if any(extents_of(t) for t in tensors):
        raise AssertionError("an operand of data-dependent size reached a whole op")
    value = compute(*[value_of(o) if isinstance(o, torch.Tensor) else o for o in operands])
    if isinstance(meta, torch.dtype):
        meta = torch.empty(value.shape, dtype=meta, device="meta")
    return wrap_as(None, value, meta, trace, grad_frozen(tensors))


def _metas(operands: list[Any]) -> list[Any]:
    return [to_meta(o) if isinstance(o, torch.Tensor) else o for o in operands]


@function(_NN.linear, torch.nn.functional.linear)
def _linear(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "weight", "bias")
    bound = dict(zip(names, args, strict=False)) | kwargs
    x, weight, bias = bound["input"], bound["weight"], bound.get("bias")
    if not _any_traced(trace, [x, weight, bias]) or _autocast(func):
        return NotImplemented
    if extents_of(weight) or (x.dim() - 1) in extents_of(x):
        return NotImplemented
    meta = linear_meta(x, weight, bias)
    if meta is None:
        check_one_dtype([x, weight, bias])
        meta = _NN.linear(*_metas([x, weight, bias]))

    def compute(x: jax.Array, w: jax.Array, b: jax.Array | None) -> jax.Array:
        y = jax.lax.dot_general(x, w, (((x.ndim - 1,), (w.ndim - 1,)), ((), ())))
        return y if b is None else y + b

    result = _whole(trace, [strip(x), weight, bias], meta, compute)
    return attach(result, dict(extents_of(x)))


@function(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm)
def _matmul(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    if len(args) != 2 or kwargs or not _any_traced(trace, args) or _autocast(func):
        return NotImplemented
    if not all(isinstance(a, torch.Tensor) for a in args):
        return NotImplemented
    if any(extents_of(a) for a in args):
        return contractions.matmul(*args)
    meta = matmul_meta(*args)
    if meta is None or func in (torch.bmm, torch.Tensor.bmm):
        check_one_dtype(args)
        product = torch.bmm if func in (torch.bmm, torch.Tensor.bmm) else torch.matmul
        meta = product(*_metas(list(args)))
    return _whole(trace, list(args), meta, jnp.matmul)


@function(torch.einsum, torch.functional.einsum)
def _einsum(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    if not args or not isinstance(args[0], str) or _autocast(func):
        return NotImplemented
    operands = (
        list(args[1]) if len(args) == 2 and isinstance(args[1], (list, tuple)) else list(args[1:])
    )
    if not _any_traced(trace, operands):
        return NotImplemented
    equation = args[0].replace(" ", "")
    if any(extents_of(o) for o in operands):
        return contractions.einsum(equation, operands)
    if len(operands) > 1:
        check_one_dtype(operands)
    dtypes = {o.dtype for o in operands}
    # Of one dtype the result has it too, and its shape is what jax computes: torch need not be
    # asked.
    meta = dtypes.pop() if len(dtypes) == 1 else torch.einsum(equation, *_metas(operands))
    return _whole(trace, operands, meta, lambda *xs: jnp.einsum(equation, *xs))


@function(torch.nn.functional.scaled_dot_product_attention, _NN.scaled_dot_product_attention)
def _attention(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    from tpuport.model.lowerings.attention import attention

    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    bound = dict(zip(names, args, strict=False)) | kwargs
    q, k, v, mask = bound["query"], bound["key"], bound["value"], bound.get("attn_mask")
    if not _any_traced(trace, [q, k, v, mask]):
        return NotImplemented
    if _autocast(func):
        dtype = torch.get_autocast_dtype("cpu")
        q, k, v = (t.to(dtype) if t.dtype.is_floating_point else t for t in (q, k, v))
    extents = {d: n for t in (q, k, v) for d, n in extents_of(t).items() if d < t.dim() - 2}
    if (q.dim() - 2) in extents_of(q):
        extents[q.dim() - 2] = extents_of(q)[q.dim() - 2]
    k, v = contractions.same_rows(k, v)
    if extents_of(k) or extents_of(mask):
        mask = contractions.key_mask(k, mask)
    q, k, v = (strip(t) for t in (q, k, v))
    dropout = float(bound.get("dropout_p") or 0.0)
    options = {
        "is_causal": bool(bound.get("is_causal", False)),
        "scale": bound.get("scale"),
        "enable_gqa": bool(bound.get("enable_gqa", False)),
    }
    meta = attention_meta(q, k, v, mask, options["enable_gqa"])
    if meta is None:
        check_one_dtype([q, k, v])
        meta = _NN.scaled_dot_product_attention(*_metas([q, k, v, mask]), **options)
    key = trace.next_key(None) if dropout > 0.0 else None
    if isinstance(options["scale"], numbers.SYMBOLIC):
        options["scale"] = numbers.node_value(options["scale"])

    def compute(q: jax.Array, k: jax.Array, v: jax.Array, m: jax.Array | None) -> jax.Array:
        return attention(q, k, v, m, dropout_key=key, dropout=dropout, **options)

    result = _whole(trace, [q, k, v, mask], meta, compute)
    return attach(result, extents) if extents else result


# -- randomness, devices, autograd -----------------------------------------------------------------


@function(torch.Tensor.cpu, torch.Tensor.pin_memory, torch.Tensor.share_memory_)
def _same(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    return NotImplemented if traced(trace, args[0]) is None else args[0]


@function(torch._assert)
def _assert(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    condition = args[0]
    message = args[1] if len(args) > 1 else kwargs.get("message", "")
    if not isinstance(condition, numbers.SYMBOLIC) and traced(trace, condition) is None:
        return NotImplemented
    held = truth(condition)
    failed = wrap_as(
        None, jnp.logical_not(held), torch.empty((), dtype=torch.bool, device="meta"), trace, True
    )
    traced_check(failed, lambda: AssertionError(message))
    return None


@function(torch.Tensor.detach_)
def _detach_in_place(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = traced(trace, args[0])
    if tensor is None:
        return NotImplemented
    detached: Any = tensor.detach()
    tensor._chain = detached._chain
    tensor._keep(jax.lax.stop_gradient(tensor._elem))
    tensor._frozen = True
    return args[0]


@function(
    torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward, torch.Tensor.register_hook
)
def _autograd(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    if not _holds_traced(trace, list(args)):
        return NotImplemented
    raise port_error(
        f"torch autograd ({getattr(func, '__name__', func)}) inside a ported function",
        code="TPU403",
        remedy="take gradients outside, with jax.grad of ported.apply",
    )


@function(torch.from_numpy)
def _from_numpy(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(args[0], np.ndarray):
        return NotImplemented
    return args[0] if isinstance(args[0], torch.Tensor) else NotImplemented


from tpuport.model import functions_numeric, functions_rnn  # noqa: E402, F401  (they register themselves)
