"""Losses of margins and of probabilities, with torch's gradients at their corners."""

from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.tracing.core.cumulative import cumulative
from tpuport.tracing.core.lowering_registry import lowering
from tpuport.tracing.lowerings._numeric import wide

aten = torch.ops.aten
_MEAN, _SUM = 1, 2


def _reduced(losses: jax.Array, reduction: int) -> jax.Array:
    if reduction == _MEAN:
        return jnp.mean(losses)
    return jnp.sum(losses) if reduction == _SUM else losses


@lowering(
    aten.binary_cross_entropy.default,
    reason="torchax's gradient is nan where a probability equals its target of 0 or 1",
)
def _binary_cross_entropy(
    x: jax.Array, target: jax.Array, weight: jax.Array | None = None, reduction: int = _MEAN
) -> jax.Array:
    """Return the cross entropy of probabilities; logarithms are at least -100."""
    losses = _cross_entropy(wide(x), wide(target))
    return _reduced(losses if weight is None else losses * wide(weight), reduction)


@jax.custom_jvp
def _cross_entropy(x: jax.Array, target: jax.Array) -> jax.Array:
    log, log_other = jnp.maximum(jnp.log(x), -100), jnp.maximum(jnp.log1p(-x), -100)
    return (target - 1) * log_other - target * log


@_cross_entropy.defjvp
def _cross_entropy_jvp(primals: Any, tangents: Any) -> Any:
    (x, target), (dx, dtarget) = primals, tangents
    slope = (x - target) / jnp.maximum((1 - x) * x, 1e-12)
    # torch limits the logarithms of the loss, not those of the target's gradient.
    return _cross_entropy(x, target), dx * slope + dtarget * (jnp.log1p(-x) - jnp.log(x))


def _rows(x: jax.Array) -> jax.Array:
    """Return [N, C] of [N, C], [C] or a single number."""
    return x.reshape(-1, x.shape[-1] if x.ndim else 1)


def _hinge(distance: jax.Array, p: int = 1) -> jax.Array:
    """Return the positive part; its gradient at 0 is 0."""
    positive = distance > 0
    safe = jnp.where(positive, distance, 1)
    return jnp.where(positive, safe if p == 1 else safe**p, 0)


@lowering(
    aten.multi_margin_loss.default,
    reason="torch's decomposition has another gradient at the margin",
)
def _multi_margin_loss(
    x: jax.Array,
    target: jax.Array,
    p: int = 1,
    margin: float = 1,
    weight: jax.Array | None = None,
    reduction: int = _MEAN,
) -> jax.Array:
    """Return by how much classes of `x` [N, C] (or [C]) come near the target class."""
    rows, places = _rows(wide(x)), target.reshape(-1)
    own = jnp.take_along_axis(rows, places[:, None], 1, mode="clip")
    losses = _hinge(margin - own + rows, p)
    if weight is not None:
        losses = losses * wide(weight)[places][:, None]
    others = jnp.arange(rows.shape[1]) != places[:, None]
    losses = jnp.sum(jnp.where(others, losses, 0), 1) / rows.shape[1]
    return _reduced(losses.reshape(x.shape[:-1]), reduction)


@lowering(
    aten.multilabel_margin_loss_forward.default,
    reason="torch's decomposition counts target classes among the others",
)
def _multilabel_margin_loss(
    x: jax.Array, target: jax.Array, reduction: int
) -> tuple[jax.Array, jax.Array]:
    """Return by how much other classes come near the target classes of `x` [N, C] (or [C]).

    The targets of a row end at its first -1.

    Returns:
        The loss by `reduction`, and which classes are targets.
    """
    rows, places = _rows(wide(x)), _rows(target)
    counted = cumulative(jnp.cumprod, (places >= 0).astype(jnp.int32), 1) > 0
    places = jnp.where(counted, places, 0)
    matches = (places[:, :, None] == jnp.arange(rows.shape[1])) & counted[:, :, None]
    is_target = jnp.any(matches, 1)
    own = jnp.take_along_axis(rows, places, 1, mode="clip")
    losses = _hinge(1 - own[:, :, None] + rows[:, None, :])
    pairs = counted[:, :, None] & ~is_target[:, None, :]
    losses = jnp.sum(jnp.where(pairs, losses, 0), (1, 2)) / rows.shape[1]
    return (
        _reduced(losses.reshape(x.shape[:-1]), reduction),
        is_target.reshape(target.shape).astype(x.dtype),
    )
