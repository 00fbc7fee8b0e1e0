"""Losses whose form in torch reads targets one by one.

Negative log likelihood and connectionist temporal classification.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from tpuport.tracing.core.context import current
from tpuport.tracing.core.cumulative import cumulative
from tpuport.tracing.core.lowering_registry import lowering, special
from tpuport.tracing.core.values import flow_of, value_of, wrap_as
from tpuport.tracing.lowerings._numeric import value_and_gradient, wide

aten = torch.ops.aten
_MEAN, _SUM = 1, 2


@lowering(
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
    reason="torch's decomposition gathers twice",
)
def _nll_loss(
    logs: jax.Array, target: jax.Array, weight: jax.Array | None, reduction: int, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    """Return -logs at the target class of `logs` [N, C, ...] (or [C]).

    Targets equal to `ignore_index` are ignored.

    Returns:
        The loss by `reduction` (0 none, 1 mean over the weights, 2 sum), and the total of the
        weights.
    """
    dtype = logs.dtype
    axis = 1 if logs.ndim > 1 else 0
    counted = target != ignore_index
    safe = jnp.where(counted, target, 0)
    picked = jnp.take_along_axis(wide(logs), jnp.expand_dims(safe, axis), axis, mode="clip")
    picked = jnp.squeeze(picked, axis)
    share = jnp.ones((), picked.dtype) if weight is None else wide(weight)[safe]
    share = jnp.where(counted, share, 0)
    losses = jnp.where(counted, -picked * share, 0)
    total = jnp.sum(share)
    if reduction == _MEAN:
        return jnp.sum(losses) / total, total.astype(dtype)
    if reduction == _SUM:
        return jnp.sum(losses), total.astype(dtype)
    return losses, jnp.zeros((), dtype)


@special(aten._ctc_loss.Tensor)
def _ctc_loss_of_tensors(
    logs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the CTC loss with lengths as tensors, which torch's own shape rule would read."""
    tensors = (logs, targets, input_lengths, target_lengths)
    logs_value, *others = (value_of(t) for t in tensors)
    results = _ctc_loss(logs_value, others[0], others[1], others[2], blank, zero_infinity)
    metas = [torch.empty(r.shape, dtype=logs.dtype, device="meta") for r in results]
    flow = flow_of([logs])
    loss, alphas = (
        wrap_as(None, r, m, current(), flow) for r, m in zip(results, metas, strict=True)
    )
    return loss, alphas


@lowering(aten._ctc_loss.default)
def _ctc_loss(
    logs: jax.Array,
    targets: jax.Array,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return the negative log probability of each target under all its alignments.

    This is the forward recursion of Graves et al. 2006.

    Args:
        logs: [T, N, C] log probabilities.
        targets: [N, S], or all targets concatenated.
        input_lengths: [N] number of valid steps.
        target_lengths: [N] number of valid labels.
        blank: class of the gap between labels.
        zero_infinity: whether an impossible target, whose loss is infinite, has no gradient.

    Returns:
        [N] losses, and the forward variables [N, T, 2 S + 1], which only torch's own backward
        reads.
    """
    steps, batch, _ = logs.shape
    longest = (
        max(target_lengths, default=0)
        if isinstance(target_lengths, Sequence)
        else targets.shape[-1]
    )
    input_lengths, target_lengths = jnp.asarray(input_lengths), jnp.asarray(target_lengths)
    labels = _padded(targets, target_lengths, longest, batch)
    extended = jnp.full((batch, 2 * longest + 1), blank, labels.dtype).at[:, 1::2].set(labels)
    before = jnp.pad(extended, ((0, 0), (2, 0)), constant_values=blank)[:, :-2]
    skips = (extended != blank) & (extended != before)
    emitted = jnp.take_along_axis(
        logs, jnp.broadcast_to(extended, (steps, *extended.shape)), 2, mode="clip"
    )
    place = jnp.arange(extended.shape[1])
    start = jnp.where(place < jnp.minimum(2, extended.shape[1]), emitted[0], -jnp.inf)
    last, later = _forward_variables(start, emitted, skips, input_lengths)
    ends = jnp.where(
        (place == 2 * target_lengths[:, None]) | (place == 2 * target_lengths[:, None] - 1),
        last,
        -jnp.inf,
    )
    # A target of no labels has the single place 0.
    loss = -_log_sum(*jnp.moveaxis(ends, 1, 0))
    loss = jnp.where(input_lengths == 0, jnp.where(target_lengths == 0, 0.0, jnp.inf), loss)
    # torch's gradient assumes that `logs` come from log_softmax, so it contains exp(logs).
    counted = (jnp.arange(steps)[:, None] < input_lengths)[..., None]
    loss = value_and_gradient(loss, loss + jnp.sum(jnp.where(counted, jnp.exp(logs), 0), (0, 2)))
    if zero_infinity:
        # The caller replaces the infinite loss; only the gradient is changed here.
        loss = value_and_gradient(loss, jnp.where(jnp.isinf(loss), 0.0, loss))
    else:
        # An impossible target has a gradient of nan.
        impossible = jnp.where(jnp.isinf(loss), jnp.nan, 0.0)
        reached = jnp.sum(jnp.where(counted, logs, 0), (0, 2))
        loss = value_and_gradient(loss, loss + impossible * reached)
    alphas = jnp.moveaxis(jnp.concatenate([start[None], later]), 0, 1)
    return loss, lax.stop_gradient(alphas)


def _forward_variables(
    start: jax.Array, emitted: jax.Array, skips: jax.Array, input_lengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the last forward variable, and all after the first, from log probabilities.

    `emitted` is [T, N, places].
    """

    def step(alpha: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        emission, time = now
        one = jnp.pad(alpha, ((0, 0), (1, 0)), constant_values=-jnp.inf)[:, :-1]
        two = jnp.pad(alpha, ((0, 0), (2, 0)), constant_values=-jnp.inf)[:, :-2]
        moved = _log_sum(alpha, one, jnp.where(skips, two, -jnp.inf)) + emission
        alpha = jnp.where((time < input_lengths)[:, None], moved, alpha)
        return alpha, alpha

    return lax.scan(step, start, (emitted[1:], jnp.arange(1, emitted.shape[0])))


def _padded(targets: jax.Array, lengths: jax.Array, longest: int, batch: int) -> jax.Array:
    """Return targets as rows [N, longest], whose entries past the length are never read."""
    if targets.ndim == 2:
        return targets[:, :longest]
    starts = cumulative(jnp.cumsum, lengths, 0) - lengths
    return jnp.take(targets, starts[:, None] + jnp.arange(longest), mode="clip").reshape(
        batch, longest
    )


def _log_sum(*terms: jax.Array) -> jax.Array:
    """Return the log of the sum of exponentials, with zero gradient where every term is -inf."""
    stacked = jnp.stack(terms)
    possible = jnp.max(stacked, 0) > -jnp.inf
    safe = jnp.where(possible, stacked, 0.0)
    return jnp.where(possible, jax.nn.logsumexp(safe, 0), -jnp.inf)
