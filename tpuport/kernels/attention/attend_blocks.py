"""`attend_blocks`, attention over lists of blocks that are data, on one chip or over a mesh."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tpuport.foundation.errors import UsageError
from tpuport.kernels.attention import block_sparse, block_sparse_backward
from tpuport.kernels.attention.block_fetch import LANES, Lists, SparseProblem
from tpuport.kernels.attention.block_lists import BlockLists, check_lists, local_lists_spec
from tpuport.kernels.attention.options import SequenceParallel, Shards

SERVED = ("bfloat16", "float32")


def attend_blocks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lists: Sequence[BlockLists],
    *,
    blocks: tuple[int, int],
    scale: float | None = None,
    interpret: bool = False,
    shards: Shards | None = None,
    sequence_parallel: SequenceParallel = "all_gather",
) -> tuple[jax.Array, jax.Array]:
    """Compute attention of queries to the blocks of keys that lists name.

    The lists may be traced arrays: no program is compiled again when they change. A block that two
    of the lists name counts twice, so they should name different ones. A query that sees no
    key gives 0, and minus infinity for its logsumexp. Reverse-mode gradients reach q, k and v,
    from both results.

    Args:
        q: queries (B, Hq, Sq, D), float32 or bfloat16.
        k: keys (B, Hkv, Sk, D); Hkv divides Hq.
        v: values (B, Hkv, Sk, Dv).
        lists: at least one; those with masks cost more than those without.
        blocks: queries of a block, and keys of a block, multiples of 128. The last block of either
            sequence may be shorter.
        scale: factor of the scores; 1 / sqrt(D) if None.
        interpret: whether Pallas interprets the kernels, on any platform: slow, for tests.
        shards: mesh axes that the arrays are sharded over.
        sequence_parallel: with "ulysses" the axes of the sequence are exchanged for heads, if they
            divide those of keys; else keys are gathered over them, and blocks of queries divided.

    Returns:
        The output (B, Hq, Sq, Dv), of q's dtype, and the logsumexp (B, Hq, Sq), float32.

    Raises:
        UsageError: shapes, dtypes or blocks do not go together.
    """
    _check(q, k, v, lists, blocks)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    inside = _exchanged(shards, k.shape[1]) if sequence_parallel == "ulysses" else shards
    problem = SparseProblem(
        *(scale, *blocks, interpret),
        precision=precision_of(q),
        shards=_dividing(inside, q, k, blocks[0]),
    )
    found: Any = _attention(problem, q, k, v, tuple(lists))
    out, lse = found
    if shards is not None and inside is not shards:
        out, lse = (_over_sequence(shards, x) for x in (out, lse))
    return out, lse


def _exchanged(shards: Shards | None, key_heads: int) -> Shards | None:
    """Return shards with the axes of the sequence over heads, if they divide them."""
    if shards is None or not shards.sequence:
        return shards
    axes = shards.heads + shards.sequence
    if key_heads % math.prod(shards.mesh.shape[axis] for axis in axes):
        return shards
    return Shards(shards.mesh, shards.batch, axes, ())


def _over_sequence(shards: Shards, x: jax.Array) -> jax.Array:
    """Shard a result over the sequence again, if its chips divide it."""
    if x.shape[2] % math.prod(shards.mesh.shape[axis] for axis in shards.sequence):
        return x
    spec = P(shards.batch, shards.heads, shards.sequence)
    return lax.with_sharding_constraint(x, NamedSharding(shards.mesh, spec))


def serves(q: jax.Array, k: jax.Array, v: jax.Array, blocks: tuple[int, int]) -> bool:
    """Return whether `attend_blocks` takes such arrays in such blocks."""
    if not q.ndim == k.ndim == v.ndim == 4 or 0 in (*q.shape, *k.shape, *v.shape):
        return False
    names = {str(x.dtype) for x in (q, k, v)}
    return (
        len(names) == 1
        and names <= set(SERVED)
        and k.shape[:3] == v.shape[:3]
        and q.shape[1] % k.shape[1] == 0
        and all(size > 0 and size % LANES == 0 for size in blocks)
    )


def precision_of(q: jax.Array) -> str | None:
    """Return the precision of products: the caller's setting for float32; 16 bits have one."""
    if q.dtype.itemsize < jnp.dtype("float32").itemsize:
        return "default"
    return jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]


def _check(q: Any, k: Any, v: Any, lists: Sequence[BlockLists], blocks: tuple[int, int]) -> None:
    shapes = f"{q.shape}, {k.shape} and {v.shape}"
    if not q.ndim == k.ndim == v.ndim == 4 or q.shape[1] % k.shape[1] or k.shape[:3] != v.shape[:3]:
        raise UsageError(
            "attend_blocks needs queries (B, Hq, Sq, D), keys (B, Hkv, Sk, D) and values (B, Hkv,"
            f" Sk, Dv), of which Hkv divides Hq, not {shapes}"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or 0 in q.shape or 0 in v.shape:
        raise UsageError(f"attend_blocks needs the same batch and head size, none 0, not {shapes}")
    names = {str(x.dtype) for x in (q, k, v)}
    if len(names) > 1 or not names <= set(SERVED):
        raise UsageError(
            f"attend_blocks takes bfloat16 or float32 arrays, all the same, not {sorted(names)}."
            " What to do: cast queries, keys and values"
        )
    if any(size % LANES or size < LANES for size in blocks):
        raise UsageError(f"blocks are {blocks}; expected multiples of {LANES}")
    if not lists:
        raise UsageError("attend_blocks needs at least one list of blocks")
    counts = -(-q.shape[2] // blocks[0]), -(-k.shape[2] // blocks[1])
    for one in lists:
        check_lists(one, q.shape[0], q.shape[1], counts, blocks)


def _dividing(shards: Shards | None, q: Any, k: Any, q_block: int) -> Shards | None:
    """Keep the axes that divide batch, key heads and blocks of queries; others repeat work."""
    if shards is None:
        return None
    blocks = q.shape[2] // q_block if q.shape[2] % q_block == 0 else 1
    kept: list[tuple[str, ...]] = []
    for axes, length in (
        (shards.batch, q.shape[0]),
        (shards.heads, k.shape[1]),
        (shards.sequence, blocks),
    ):
        size = math.prod(shards.mesh.shape[axis] for axis in axes)
        kept.append(axes if length % size == 0 else ())
    return Shards(shards.mesh, *kept)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    problem: SparseProblem, q: jax.Array, k: jax.Array, v: jax.Array, lists: Lists
) -> tuple[jax.Array, jax.Array]:
    with jax.default_matmul_precision(problem.precision):
        return _forward(problem, q, k, v, lists)


def _forward_rule(
    problem: SparseProblem, q: jax.Array, k: jax.Array, v: jax.Array, lists: Lists
) -> tuple[Any, Any]:
    found = _attention(problem, q, k, v, lists)
    return found, (q, k, v, lists, found)


def _backward_rule(problem: SparseProblem, saved: Any, grads: Any) -> tuple[Any, ...]:
    q, k, v, lists, results = saved
    with jax.default_matmul_precision(problem.precision):
        return *_backward(problem, q, k, v, lists, results, grads), None


_attention.defvjp(_forward_rule, _backward_rule)


def _forward(
    problem: SparseProblem, q: jax.Array, k: jax.Array, v: jax.Array, lists: Lists
) -> tuple[jax.Array, jax.Array]:
    shards = problem.shards
    run = functools.partial(block_sparse.forward, problem)
    if shards is None:
        return run(q, k, v, lists)
    rows, keys = _specs(shards)
    mapped = jax.shard_map(
        run,
        mesh=shards.mesh,
        in_specs=(rows, keys, keys, _lists_specs(shards, lists)),
        out_specs=(rows, rows),
        check_vma=False,
    )
    return mapped(q, k, v, lists)


def _backward(
    problem: SparseProblem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lists: Lists,
    results: tuple[jax.Array, jax.Array],
    grads: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    shards = problem.shards
    run = functools.partial(block_sparse_backward.backward, problem)
    if shards is None:
        return run(q, k, v, lists, results, grads)
    rows, keys = _specs(shards)

    def local(*args: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        d_q, *d_kv = run(*args)
        if shards.sequence:
            # Each chip has the share of its own queries.
            d_kv = [lax.psum(d.astype(jnp.float32), shards.sequence) for d in d_kv]
        d_k, d_v = (d.astype(x.dtype) for d, x in zip(d_kv, (k, v), strict=True))
        return d_q, d_k, d_v

    mapped = jax.shard_map(
        local,
        mesh=shards.mesh,
        in_specs=(rows, keys, keys, _lists_specs(shards, lists), (rows, rows), (rows, rows)),
        out_specs=(rows, keys, keys),
        check_vma=False,
    )
    return mapped(q, k, v, lists, results, grads)


def _specs(shards: Shards) -> tuple[P, P]:
    """Return the specs of arrays by queries, and by keys."""
    return P(shards.batch, shards.heads, shards.sequence), P(shards.batch, shards.heads)


def _lists_specs(shards: Shards, lists: Lists) -> Any:
    axes = shards.batch, shards.heads, shards.sequence
    return tuple(local_lists_spec(one, P, axes) for one in lists)
