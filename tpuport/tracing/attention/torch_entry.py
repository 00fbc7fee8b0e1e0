"""Attention on torch tensors for the shims, with more than `F.scaled_dot_product_attention`."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import torch

from tpuport.kernels.attention import AttentionOptions
from tpuport.tracing.attention.lower import AttentionOperands, structured_call
from tpuport.tracing.attention.masks.graph import Graph
from tpuport.tracing.attention.masks.score_function import Changed, ScoreFunction
from tpuport.tracing.attention.masks.structure import Structure, read, with_conditions
from tpuport.tracing.attention.masks.views import base
from tpuport.tracing.attention.options import options_for
from tpuport.tracing.core.context import Trace, current
from tpuport.tracing.core.tensor import TracedTensor, wrap
from tpuport.tracing.core.values import flow_of, grad_frozen, value_of, wrap_as


def kernel_options() -> AttentionOptions | None:
    """Return the attention options of the running trace; None for eager's way, or without trace."""
    trace = current()
    return None if trace is None else options_for(trace.options.target)


def places(count: int, device: Any = None) -> torch.Tensor:
    """Return `torch.arange(count)`, traced where a kernel serves attention.

    A mask made of it is then part of the program. It is not computed on the host, and a kernel that
    knows its structure need not build it in full.
    """
    if kernel_options() is None:
        return torch.arange(count, device=device)
    return wrap(jnp.arange(count, dtype=jnp.int32), torch.int64, trace=current())


def attend_tensors(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: Any = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor | None:
    """Compute attention by a kernel; return None where no kernel serves.

    Args:
        query: [B, H, L, D].
        key: [B, G, S, D]; H is a multiple of G.
        value: [B, G, S, Dv].
        mask: True where a query sees a key, broadcastable to [B, H, L, S].
        bias: Added to the scores, broadcastable likewise.
        scale: Factor of the scores; None for 1 / sqrt(D).
        softcap: Scores s become softcap * tanh(s / softcap) before the bias.
        dropout: Probability that a weight is dropped.
    """
    trace, options = current(), kernel_options()
    if trace is None or options is None or not isinstance(scale, int | float | None):
        return None
    shape = (*query.shape[:3], key.shape[2])
    found = Structure(shape)
    if bias is not None:
        found = read(value_of(bias), shape, frozen=grad_frozen([bias]))
    if mask is not None:
        found = with_conditions(found, Graph(frozen=True).of(value_of(mask)))
    dropped = trace.next_key(None) if dropout > 0 else None
    call = AttentionOperands(scale=scale, softcap=softcap, dropout=dropout, key=dropped)
    return _result(trace, (query, key, value), found, call, options)


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any,
    mask_mod: Any,
    scale: float | None,
) -> torch.Tensor | None:
    """Compute FlexAttention by a kernel; return None where none serves, or not this `score_mod`.

    Args:
        query: [B, H, L, D].
        key: [B, G, S, D].
        value: [B, G, S, Dv].
        score_mod: The user's function of a score and its four indices, or None. It may hide scores,
            add to them what does not depend on them, and cap them.
        mask_mod: The user's function of four indices, or None.
        scale: Factor of the scores; None for 1 / sqrt(D).
    """
    trace, options = current(), kernel_options()
    if trace is None or options is None:
        return None
    shape = (*query.shape[:3], key.shape[2])
    indices = [
        places(n).view([-1 if d == at else 1 for d in range(4)]) for at, n in enumerate(shape)
    ]
    found, softcap = Structure(shape), None
    if score_mod is not None:
        change = _change(trace, score_mod, indices, shape)
        if change is None:
            return None
        softcap = change.softcap
        if change.scale != 1:
            scale = change.scale * (query.shape[-1] ** -0.5 if scale is None else scale)
        found.bias = change.bias
        for node in change.conditions:
            found = with_conditions(found, node)
    if mask_mod is not None:
        found = with_conditions(found, Graph(frozen=True).of(value_of(mask_mod(*indices))))
    call = AttentionOperands(scale=scale, softcap=softcap)
    return _result(trace, (query, key, value), found, call, options)


def _change(trace: Trace, score_mod: Any, indices: list[Any], shape: Any) -> Changed | None:
    """Return what a `score_mod` does, read from its graph on scores that are never computed."""
    scores: Any = jnp.zeros(shape, jnp.float32)
    if not isinstance(scores, jax.core.Tracer):
        return None
    given = wrap(scores, torch.float32, trace=trace)
    result = score_mod(given, *indices)
    if not isinstance(result, TracedTensor):
        return None
    graph = Graph(frozen=grad_frozen([result]))
    placeholder = graph.of(scores).cut()
    function = ScoreFunction(
        placeholder,
        lambda node: base(node) is placeholder and node.shape == placeholder.shape,
        placeholder.shape,
    )
    found = function.effect(graph.of(result._elem))
    is_finite = found is not None and bool(found.conditions) and np.isfinite(found.fill)
    return None if is_finite else found


def _result(
    trace: Trace,
    operands: Any,
    found: Structure,
    call: AttentionOperands,
    options: AttentionOptions,
) -> torch.Tensor:
    q, k, v = (value_of(x) for x in operands)
    out = structured_call(trace, (q, k, v), found, call, options)
    query, value = operands[0], operands[2]
    meta = torch.empty((*query.shape[:3], value.shape[-1]), dtype=query.dtype, device="meta")
    return wrap_as(None, out, meta, trace, flow_of(list(operands)))
