"""Linear, matmul, einsum and attention, each lowered as one operation.

C++ would decompose them into ops that XLA compiles worse.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.tracing.attention.lower import AttentionOperands, attention_call
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.autocast import autocast_dtype, to_autocast
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.values import flow_of, grad_frozen, value_of, wrap_as
from tpuport.tracing.dispatch.int64_ops import in_64
from tpuport.tracing.dispatch.meta_infer import check_one_dtype, to_meta
from tpuport.tracing.dispatch.meta_rules import attention_meta, linear_meta, matmul_meta
from tpuport.tracing.dispatch.meta_strides import as_attended
from tpuport.tracing.dynamic_shapes import contractions
from tpuport.tracing.dynamic_shapes.extents import attach, extents_of, filled, isolated
from tpuport.tracing.functions import promotion
from tpuport.tracing.functions.registry import any_traced, function
from tpuport.tracing.lowerings._numeric import broadcast_wide, is_low

# The C++ functions behind torch.nn.functional.
_NN: Any = torch._C._nn  # pyright: ignore[reportAttributeAccessIssue]  (not in the stubs)


def _cast(operands: list[Any]) -> list[Any]:
    """Cast operands as an active autocast does in C++, which does not see calls lowered here."""
    dtype = autocast_dtype()
    return operands if dtype is None else [to_autocast(o, dtype) for o in operands]


def _whole(trace: Trace, operands: list[Any], meta: Any, compute: Callable[..., jax.Array]) -> Any:
    tensors = [o for o in operands if isinstance(o, torch.Tensor)]
    if any(extents_of(t) for t in tensors):
        raise AssertionError("an operand of data-dependent size reached an op lowered as one")
    if any(t.dtype is torch.int64 for t in tensors):
        value = in_64(compute, operands)
    else:
        value = compute(*[value_of(o) if isinstance(o, torch.Tensor) else o for o in operands])
    if isinstance(meta, torch.dtype):
        meta = torch.empty(value.shape, dtype=meta, device="meta")
    return wrap_as(None, value, meta, trace, flow_of(tensors))


def _metas(operands: list[Any]) -> list[Any]:
    return [to_meta(o) if isinstance(o, torch.Tensor) else o for o in operands]


@function(torch.sparse.mm, torch.sparse.addmm)
def _sparse_product(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    """Multiply a sparse tensor of the host, which is a constant, by a traced one."""
    product = torch.mm if func is torch.sparse.mm else torch.addmm
    matrices = [one for one in args if isinstance(one, torch.Tensor)]
    if not any_traced(trace, args) or len(matrices) < len(args):  # a name of a reduction
        return NotImplemented
    dense = [one if one.layout is torch.strided else one.to_dense() for one in matrices]
    return product(*dense, **kwargs)


@function(_NN.linear, torch.nn.functional.linear)
def _linear(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "weight", "bias")
    bound = dict(zip(names, args, strict=False)) | kwargs
    x, weight, bias = bound["input"], bound["weight"], bound.get("bias")
    if not any_traced(trace, [x, weight, bias]):
        return NotImplemented
    x, weight, bias = promotion.layer(_cast([x, weight, bias]))
    if extents_of(weight) or (x.dim() - 1) in extents_of(x):
        return NotImplemented
    meta = linear_meta(x, weight, bias)
    if meta is None:
        check_one_dtype([x, weight, bias])
        meta = _NN.linear(*_metas([x, weight, bias]))

    # Under autocast the bias is added before the product is rounded, as C++ does it.
    is_fused = bias is not None and autocast_dtype() is not None

    def compute(x: jax.Array, w: jax.Array, b: jax.Array | None) -> jax.Array:
        kept = jnp.float32 if is_fused and is_low(x) else None
        dims = (((x.ndim - 1,), (w.ndim - 1,)), ((), ()))
        y = jax.lax.dot_general(x, w, dims, preferred_element_type=kept)
        if b is None:
            return y
        y = y + broadcast_wide(b, y.shape)
        return y if kept is None else y.astype(x.dtype)

    result = _whole(trace, [filled(x, 0), weight, bias], meta, compute)
    return isolated(attach(result, dict(extents_of(x))))


@function(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm)
def _matmul(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    if len(args) != 2 or kwargs or not any_traced(trace, args):
        return NotImplemented
    if not all(isinstance(a, torch.Tensor) for a in args):
        return NotImplemented
    args = _cast(list(args))
    if any(extents_of(a) for a in args):
        return contractions.matmul(*args)
    args = promotion.product(args)
    meta = matmul_meta(*args)
    if meta is None or func in (torch.bmm, torch.Tensor.bmm):
        check_one_dtype(args)
        product = torch.bmm if func in (torch.bmm, torch.Tensor.bmm) else torch.matmul
        meta = product(*_metas(list(args)))
    return _whole(trace, list(args), meta, jnp.matmul)


def _is_one_product(equation: str) -> bool:
    """Return whether an einsum is one product of two matrices, summed over dims of both."""
    given, _, wanted = equation.partition("->")
    operands = given.split(",")
    if len(operands) != 2 or "->" not in equation or "." in equation:
        return False
    left, right = (set(one) for one in operands)
    summed = (left | right) - set(wanted)
    return bool(summed) and summed <= left & right


@function(torch.einsum, torch.functional.einsum)
def _einsum(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    if not args or not isinstance(args[0], str):
        return NotImplemented
    operands = (
        list(args[1]) if len(args) == 2 and isinstance(args[1], (list, tuple)) else list(args[1:])
    )
    if not any_traced(trace, operands):
        return NotImplemented
    equation = args[0].replace(" ", "")
    if autocast_dtype() is not None:
        if not _is_one_product(equation):
            # C++ decides which of its steps are products, whose operands are cast.
            return NotImplemented
        operands = _cast(operands)
    operands = promotion.product(operands)
    if any(extents_of(o) for o in operands):
        return contractions.einsum(equation, operands)
    if any(o.dtype != operands[0].dtype for o in operands):
        # Those without a sum are elementwise, and promote; the product of a sum raises.
        return NotImplemented
    # The result has the dtype of the operands, and jax computes its shape: torch, which is slow,
    # is not asked.
    dtype = operands[0].dtype
    try:
        return _whole(trace, operands, dtype, lambda *xs: jnp.einsum(equation, *xs))
    except ValueError:
        torch.einsum(equation, *_metas(operands))  # raises what eager does, of another class
        raise


@function(torch.nn.functional.scaled_dot_product_attention, _NN.scaled_dot_product_attention)
def _attention(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    bound = dict(zip(names, args, strict=False)) | kwargs
    q, k, v, mask = bound["query"], bound["key"], bound["value"], bound.get("attn_mask")
    if not any_traced(trace, [q, k, v, mask]):
        return NotImplemented
    q, k, v, mask = promotion.attention(q, k, v, mask)
    dtype = autocast_dtype()
    if dtype is not None:
        q, k, v, mask = (to_autocast(t, dtype) for t in (q, k, v, mask))
    extents = {d: n for t in (q, k, v) for d, n in extents_of(t).items() if d < t.dim() - 2}
    if (q.dim() - 2) in extents_of(q):
        extents[q.dim() - 2] = extents_of(q)[q.dim() - 2]
    k, v = contractions.same_rows(k, v)
    if extents_of(k) or extents_of(mask):
        mask = contractions.key_mask(k, mask)
    q, k, v = (filled(t, 0) for t in (q, k, v))
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
    causal, grouped = options["is_causal"], options["enable_gqa"]
    meta = as_attended(meta, [q, k, v], mask, dropout=dropout, causal=causal, grouped=grouped)
    key = trace.next_key(None) if dropout > 0.0 else None
    if isinstance(options["scale"], sym_numbers.SYMBOLIC):
        options["scale"] = sym_numbers.node_value(options["scale"])
    frozen = mask is None or not mask.dtype.is_floating_point or grad_frozen([mask])

    def compute(q: jax.Array, k: jax.Array, v: jax.Array, m: jax.Array | None) -> jax.Array:
        call = AttentionOperands(m, dropout=dropout, key=key, frozen=frozen, **options)
        return attention_call(trace, q, k, v, call)

    result = _whole(trace, [q, k, v, mask], meta, compute)
    return isolated(attach(result, extents)) if extents else result
