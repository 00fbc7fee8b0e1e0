"""Ring attention: keys and values go from chip to chip, with one softmax over all of them.

Runs inside `shard_map`. Source: Liu et al., Ring Attention, arxiv.org/abs/2310.01889.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpuport.kernels.attention.problem import Gradients, Local
from tpuport.kernels.attention.splash import merge


def forward(
    kernel: Any,
    local: Local,
    axes: tuple[str, ...],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return output and logsumexp over the keys of all chips; else like `kernel.forward`.

    Args:
        kernel: module with `forward` and `backward`.
        local: this chip's work.
        axes: the mesh axes of the sequence.
        q: this chip's queries.
        k: this chip's keys.
        v: this chip's values.
    """
    size = lax.axis_size(axes)
    merged: Any = None
    for step in range(size):
        now = _at(local, axes, step, k.shape[2])
        found = kernel.forward(now, q, k, v)
        merged = (found[0].astype(jnp.float32), found[1]) if step == 0 else merge(merged, found)
        if step < size - 1:
            k, v, local = _pass_on((k, v, local), axes)
    return merged[0].astype(q.dtype), merged[1]


def backward(
    kernel: Any,
    local: Local,
    axes: tuple[str, ...],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    grad: jax.Array,
) -> Gradients:
    """Compute gradients; those of keys and values travel with them, and end where they began."""
    size = lax.axis_size(axes)
    d_q = jnp.zeros(q.shape, jnp.float32)
    d_kv = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    captured: Any = None
    for step in range(size):
        now = _at(local, axes, step, k.shape[2])
        found = kernel.backward(now, q, k, v, out, lse, grad)
        d_q = d_q + found.q
        d_kv = d_kv[0] + found.k, d_kv[1] + found.v
        add = found.captured
        captured = add if step == 0 else tuple(a + b for a, b in zip(captured, add, strict=True))
        d_kv = _pass_on(d_kv, axes)
        if step < size - 1:
            k, v, local = _pass_on((k, v, local), axes)
    return Gradients(
        d_q.astype(q.dtype), d_kv[0].astype(k.dtype), d_kv[1].astype(v.dtype), captured
    )


def _at(local: Local, axes: tuple[str, ...], step: int, num_keys: int) -> Local:
    """Return this chip's work at one step, whose keys began `step` chips before it."""
    source = (lax.axis_index(axes) - step) % lax.axis_size(axes)
    return dataclasses.replace(local, origin=dataclasses.replace(local.origin, k=source * num_keys))


def _pass_on(tree: Any, axes: tuple[str, ...]) -> Any:
    """Send everything that belongs to keys to the next chip."""
    size = lax.axis_size(axes)
    to_next = [(chip, (chip + 1) % size) for chip in range(size)]

    def send(x: jax.Array) -> jax.Array:
        return lax.ppermute(x, axes, to_next)

    def send_any(x: Any) -> Any:
        if isinstance(x, Local):
            return dataclasses.replace(x, parts=x.parts.with_keys(send))
        return send(x)

    return tuple(send_any(x) for x in tree)
