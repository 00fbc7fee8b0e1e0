"""Attention over a mesh: what each chip holds and sends, and the gradients.

The gradient is written by hand around `shard_map`, not taken through it. So the backward pass sends
what the forward pass sends, in reverse, and sums nothing over axes that hold copies.

Where the sequence is sharded, "all_gather" brings all keys to every chip. "ulysses" asks for arrays
that are sharded over heads instead (Jacobs et al., arxiv.org/abs/2309.14509): the partitioner
inserts one all-to-all for each array that they are concatenated from. "ring" passes keys round (Liu
et al., arxiv.org/abs/2310.01889).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from tpuport.kernels.attention import blockwise, dense, flash, ring, splash
from tpuport.kernels.attention.problem import (
    AttentionProblem,
    Gradients,
    Local,
    Origin,
    Parts,
    is_float,
)

KERNELS = {"splash": splash, "dense": dense, "flash": flash, "blockwise": blockwise}
# Names the results for `jax.checkpoint_policies.save_only_these_names`.
OUTPUT_NAME = "tpuport_attention"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(
    problem: AttentionProblem, q: jax.Array, k: jax.Array, v: jax.Array, parts: Parts
) -> Any:
    """Compute attention (B, Hq, Sq, Dv) of global arrays, on one chip or over a mesh."""
    with jax.default_matmul_precision(problem.precision):
        return _forward(problem, q, k, v, parts)[0]


def _attention_forward(
    problem: AttentionProblem, q: jax.Array, k: jax.Array, v: jax.Array, parts: Parts
) -> tuple[jax.Array, Any]:
    with jax.default_matmul_precision(problem.precision):
        found = _forward(problem, q, k, v, parts, saving=problem.keeps_bits)
    results = tuple(checkpoint_name(x, OUTPUT_NAME) for x in found)
    return results[0], (q, k, v, parts, *results)


def _attention_backward(problem: AttentionProblem, saved: Any, grad: jax.Array) -> tuple[Any, ...]:
    parts: Parts = saved[3]
    with jax.default_matmul_precision(problem.precision):
        found = _backward(problem, saved, grad)
    left = iter(found.captured)
    captured = tuple(next(left) if is_float(c) else None for c in parts.captured)
    return found.q, found.k, found.v, Parts(captured=captured)


attention.defvjp(_attention_forward, _attention_backward)


class ShardedLayout(NamedTuple):
    """The PartitionSpecs of one attention's arrays, and how each chip handles its heads.

    Args:
        q: spec of queries and of the output.
        kv: spec of keys and values on entry.
        d_kv: spec of their gradients.
        lse: spec of the logsumexp.
        q_ids: spec of arrays (B, Sq) that are indexed by query.
        k_ids: spec of arrays (B, Sk) that are indexed by key.
        exchanged: whether heads are sharded over the axes of the sequence, too.
        picked: whether each chip holds all key heads, and picks those of its query heads.
        head_axes: the axes that query heads are sharded over inside `shard_map`.
    """

    q: P
    kv: P
    d_kv: P
    lse: P
    q_ids: P
    k_ids: P
    exchanged: bool
    picked: bool
    head_axes: tuple[str, ...]

    @property
    def bits(self) -> P:
        """Return the spec of the bits of dropout, (B, Hq, words, Sq)."""
        return P(self.lse[0], self.lse[1], None, self.lse[2])


def make_layout(problem: AttentionProblem, num_kv_heads: int, num_keys: int) -> ShardedLayout:
    """Return the layout of a problem over its mesh.

    Args:
        problem: a problem that has shards.
        num_kv_heads: key heads of the unsharded arrays.
        num_keys: keys of the unsharded arrays, on entry.
    """
    shards = problem.shards
    assert shards is not None
    batch, heads, sequence = shards.batch, shards.heads, shards.sequence
    exchanged = bool(sequence) and problem.sequence_parallel == "ulysses"
    inner = heads + sequence if exchanged else heads
    picked = num_kv_heads % _size(shards.mesh, inner) != 0
    kv_heads = None if picked else heads
    if exchanged:
        kv = P(batch, None if picked else inner)
    else:
        kv = P(batch, kv_heads, sequence if problem.sequence_parallel == "ring" else None)
    gathered = sequence and (picked if exchanged else problem.sequence_parallel == "all_gather")
    divides = num_keys % _size(shards.mesh, sequence) == 0
    d_kv = P(batch, kv[1], sequence) if gathered and divides else kv
    whole = exchanged or problem.sequence_parallel != "ring"
    return ShardedLayout(
        q=P(batch, inner, None if exchanged else sequence),
        kv=kv,
        d_kv=d_kv,
        lse=P(batch, inner, None if exchanged else sequence),
        q_ids=P(batch, None if exchanged else sequence),
        k_ids=P(batch, None if whole else sequence),
        exchanged=exchanged,
        picked=picked,
        head_axes=inner,
    )


def _size(mesh: Any, axes: tuple[str, ...]) -> int:
    """Return the number of chips along these axes together."""
    size = 1
    for axis in axes:
        size *= mesh.shape[axis]
    return size


def _parts_layout(layout: ShardedLayout, parts: Parts) -> Parts:
    return Parts(
        q_segments=layout.q_ids,
        kv_segments=layout.k_ids,
        key_valid=layout.k_ids,
        captured=tuple(P() for _ in parts.captured),
        key=P(),
    )


def _only_given(specs: Parts, parts: Parts) -> Parts:
    """Return the layout of those parts that are not None."""
    given = {
        field.name: getattr(specs, field.name)
        for field in dataclasses.fields(Parts)
        if getattr(parts, field.name) is not None
    }
    return Parts(**given)


def _forward(
    problem: AttentionProblem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    parts: Parts,
    *,
    saving: bool = False,
) -> tuple[jax.Array, ...]:
    """Return output, logsumexp, and if `saving` what else the kernel keeps for its gradient."""
    kernel, shards = KERNELS[problem.kernel], problem.shards
    more = {"saving": True} if saving else {}
    if shards is None:
        return kernel.forward(Local(problem, parts), q, k, v, **more)
    layout = make_layout(problem, k.shape[1], k.shape[2])

    def local(q: Any, k: Any, v: Any, parts: Parts) -> tuple[jax.Array, ...]:
        inside = Inside(problem, layout, parts, q.shape[0], q.shape[1], q.shape[2])
        k, v = inside.enter_kv(k), inside.enter_kv(v)
        if inside.is_ring:
            return ring.forward(kernel, inside.local, shards.sequence, q, k, v)
        return kernel.forward(inside.local, q, k, v, **more)

    specs = (layout.q, layout.kv, layout.kv, _only_given(_parts_layout(layout, parts), parts))
    mapped = jax.shard_map(
        local,
        mesh=shards.mesh,
        in_specs=specs,
        out_specs=(layout.q, layout.lse, *([layout.bits] if saving else ())),
        # Splash's pallas_call declares no varying mesh axes of its results, as the check wants.
        check_vma=False,
    )
    return mapped(q, k, v, parts)


def _backward(problem: AttentionProblem, saved: tuple[Any, ...], grad: jax.Array) -> Gradients:
    q, k, v, parts, out, lse, *more = saved
    kernel, shards = KERNELS[problem.kernel], problem.shards
    if shards is None:
        return kernel.backward(Local(problem, parts), q, k, v, out, lse, grad, *more)
    layout = make_layout(problem, k.shape[1], k.shape[2])

    def local(q: Any, k: Any, v: Any, parts: Parts, *rows: Any) -> Gradients:
        inside = Inside(problem, layout, parts, q.shape[0], q.shape[1], q.shape[2])
        (k, pull_k), (v, pull_v) = inside.enter_kv_back(k), inside.enter_kv_back(v)
        if inside.is_ring:
            axes = shards.sequence
            found = ring.backward(kernel, inside.local, axes, q, k, v, *rows)
        else:
            found = kernel.backward(inside.local, q, k, v, *rows)
        axes = shards.batch + shards.heads + shards.sequence
        captured = tuple(lax.psum(c, axes) if axes else c for c in found.captured)
        return Gradients(found.q, pull_k(found.k), pull_v(found.v), captured)

    specs = (layout.q, layout.kv, layout.kv, _only_given(_parts_layout(layout, parts), parts))
    floats = tuple(P() for c in parts.captured if is_float(c))
    mapped = jax.shard_map(
        local,
        mesh=shards.mesh,
        in_specs=(*specs, layout.q, layout.lse, layout.q, *(layout.bits for _ in more)),
        out_specs=Gradients(layout.q, layout.d_kv, layout.d_kv, floats),
        check_vma=False,
    )
    return mapped(q, k, v, parts, out, lse, grad, *more)


class Inside:
    """The work of one chip, inside `shard_map`, before and after the kernel.

    Args:
        problem: a problem that has shards.
        layout: layout of that problem.
        parts: this chip's parts.
        batch: examples that this chip holds.
        heads: query heads that this chip holds.
        queries: queries that this chip holds.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        layout: ShardedLayout,
        parts: Parts,
        batch: int,
        heads: int,
        queries: int,
    ) -> None:
        assert problem.shards is not None
        self.shards, self.layout = problem.shards, layout
        self.is_ring = bool(self.shards.sequence) and problem.sequence_parallel == "ring"
        self.num_heads = heads
        self.first_head = _index(layout.head_axes) * self.num_heads
        self.per_kv_head = 1
        self.local = Local(
            problem,
            parts,
            Origin(
                q=0 if layout.exchanged else _index(self.shards.sequence) * queries,
                batch=_index(self.shards.batch) * batch,
                head=self.first_head,
            ),
        )

    def enter_kv(self, x: jax.Array) -> jax.Array:
        """Return keys or values as the kernel takes them."""
        return self._pick(x) if self.layout.picked else x

    def enter_kv_back(self, x: jax.Array) -> Any:
        """Return keys or values as the kernel takes them, and what maps their gradient back."""
        if not self.layout.picked:
            return x, self._sum_copies
        picked, pull = jax.vjp(self._pick, x)
        return picked, lambda d: self._sum_copies(pull(d)[0])

    def _pick(self, x: jax.Array) -> jax.Array:
        """Select the key heads that this chip's query heads use."""
        per_kv_head = self._query_heads() // x.shape[1]
        if per_kv_head % self.num_heads == 0:
            first = self.first_head // per_kv_head
            return lax.dynamic_slice_in_dim(x, first, 1, axis=1)
        own = (self.first_head + jnp.arange(self.num_heads)) // per_kv_head
        return jnp.take(x, own, axis=1)

    def _query_heads(self) -> int:
        return self.num_heads * _size(self.shards.mesh, self.layout.head_axes)

    def _sum_copies(self, d: jax.Array) -> jax.Array:
        """Sum gradients over the chips that hold copies of the same keys."""
        sequence = self.shards.sequence
        scattered = self.layout.d_kv != self.layout.kv
        over = self.shards.heads if self.layout.picked else ()
        if sequence and not scattered and not self.is_ring:
            if self.layout.picked or not self.layout.exchanged:
                over += sequence
        total = d.astype(jnp.float32)
        if scattered:
            total = lax.psum_scatter(total, sequence, scatter_dimension=2, tiled=True)
        return (lax.psum(total, over) if over else total).astype(d.dtype)


def _index(axes: tuple[str, ...]) -> Any:
    """Return this chip's index along these axes together; 0 without any."""
    return lax.axis_index(axes) if axes else 0
