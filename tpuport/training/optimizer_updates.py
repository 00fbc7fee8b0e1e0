"""Updates of torch's optimizers that optax has otherwise or not at all, by parameter.

The names are those of torch's documentation: `g` a gradient, `t` the number of the step.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

# The slots of a parameter before and after a step, and what is subtracted in units of the rate.
_Slots = dict[str, jax.Array]
_Update = Callable[[jax.Array, _Slots, jax.Array], tuple[jax.Array, _Slots]]


def by_parameter(slots: dict[str, float], step: _Update) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that keeps slots like each parameter, and counts its steps.

    Args:
        slots: The slots by name, with what they hold before the first step.
        step: Called with a gradient, the slots and the number of the step (a float, from 1);
            returns the update and the slots after it.
    """

    def init(params: Any) -> Any:
        filled = {
            name: jax.tree.map(lambda p, value=value: jnp.full_like(p, value), params)
            for name, value in slots.items()
        }
        return filled, jnp.zeros(len(jax.tree.leaves(params)), jnp.int32)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        del params
        held, counts = state
        has_gradient = extra.get("has_gradient")
        paths, tree = jax.tree_util.tree_flatten_with_path(updates)
        flags = [has_gradient[path[-1].key] if has_gradient else True for path, _ in paths]  # type: ignore[union-attr]
        counts = counts + jnp.asarray(flags).astype(jnp.int32)
        by_name = {name: jax.tree.leaves(one) for name, one in held.items()}
        made, after = [], {name: [] for name in held}
        for index, (_, g) in enumerate(paths):
            own = {name: leaves[index] for name, leaves in by_name.items()}
            out, own = step(g, own, counts[index].astype(jnp.float32))
            made.append(out.astype(g.dtype))
            for name, value in own.items():
                after[name].append(value.astype(by_name[name][index].dtype))
        unflatten = jax.tree_util.tree_unflatten
        return unflatten(tree, made), ({n: unflatten(tree, v) for n, v in after.items()}, counts)

    return optax.GradientTransformationExtraArgs(init, update)


def _rest(beta: float | jax.Array, t: jax.Array) -> jax.Array:
    """Return 1 - beta^t, also where that is small beside one."""
    if isinstance(beta, jax.Array):
        return -jnp.expm1(t * jnp.log(beta))
    return -jnp.expm1(t * math.log(beta)) if beta > 0 else jnp.ones_like(t)


def amsgrad(b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """Return Adam's scaling by the largest second moment so far."""

    def step(g: jax.Array, s: _Slots, t: jax.Array) -> tuple[jax.Array, _Slots]:
        m, v = b1 * s["m"] + (1 - b1) * g, b2 * s["v"] + (1 - b2) * g * g
        top = jnp.maximum(s["top"], v)
        out = m / _rest(b1, t) / (jnp.sqrt(top) / jnp.sqrt(_rest(b2, t)) + eps)
        return out, {"m": m, "v": v, "top": top}

    return by_parameter({"m": 0.0, "v": 0.0, "top": 0.0}, step)


def dampened(momentum: float, dampening: float) -> optax.GradientTransformationExtraArgs:
    """Return SGD's momentum, to which gradients after the first count less."""

    def step(g: jax.Array, s: _Slots, t: jax.Array) -> tuple[jax.Array, _Slots]:
        m = jnp.where(t == 1, g, momentum * s["m"] + (1 - dampening) * g)
        return m, {"m": m}

    return by_parameter({"m": 0.0}, step)


def adagrad(decay: float, eps: float, start: float) -> optax.GradientTransformationExtraArgs:
    """Return Adagrad's scaling by the root of the sum of squares, with a rate that decays."""

    def step(g: jax.Array, s: _Slots, t: jax.Array) -> tuple[jax.Array, _Slots]:
        total = s["sum"] + g * g
        return g / (jnp.sqrt(total) + eps) / (1 + (t - 1) * decay), {"sum": total}

    return by_parameter({"sum": start}, step)


def adadelta(rho: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """Return Adadelta's scaling by the root of earlier updates over that of gradients."""

    def step(g: jax.Array, s: _Slots, t: jax.Array) -> tuple[jax.Array, _Slots]:
        del t
        v = rho * s["v"] + (1 - rho) * g * g
        out = jnp.sqrt(s["u"] + eps) / jnp.sqrt(v + eps) * g
        return out, {"v": v, "u": rho * s["u"] + (1 - rho) * out * out}

    return by_parameter({"v": 0.0, "u": 0.0}, step)


def adamax(b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """Return Adam's scaling by the largest gradient instead of the second moment."""

    def step(g: jax.Array, s: _Slots, t: jax.Array) -> tuple[jax.Array, _Slots]:
        m, top = b1 * s["m"] + (1 - b1) * g, jnp.maximum(b2 * s["top"], jnp.abs(g) + eps)
        return m / _rest(b1, t) / top, {"m": m, "top": top}

    return by_parameter({"m": 0.0, "top": 0.0}, step)


def nadam(
    b1: float, b2: float, eps: float, momentum_decay: float
) -> optax.GradientTransformationExtraArgs:
    """Return Adam's scaling with Nesterov's momentum, whose weight grows."""

    def weight(t: jax.Array) -> jax.Array:
        return b1 * (1 - 0.5 * jnp.exp(t * (momentum_decay * math.log(0.96))))

    def step(g: jax.Array, s: _Slots, t: jax.Array) -> tuple[jax.Array, _Slots]:
        m, v = b1 * s["m"] + (1 - b1) * g, b2 * s["v"] + (1 - b2) * g * g
        product, following = s["product"] * weight(t), weight(t + 1)
        scale = jnp.sqrt(v / _rest(b2, t)) + eps
        first = (1 - weight(t)) / (1 - product) * g
        return (first + following / (1 - product * following) * m) / scale, {
            "m": m,
            "v": v,
            "product": product,
        }

    return by_parameter({"m": 0.0, "v": 0.0, "product": 1.0}, step)
