"""One attention as the kernels take it: its static numbers apart from its arrays."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from tpuport.kernels.attention.mask import Blocks
from tpuport.kernels.attention.options import SequenceParallel, Shards
from tpuport.kernels.attention.tiles import DenseTiles, KernelTiles

# A tile of a further mask or bias, its captured arrays given: (arrays, q_start, k_start) -> tile.
Further = Callable[[Sequence[jax.Array], Any, Any], jax.Array]


@dataclass(frozen=True)
class AttentionProblem:
    """The static part of one attention, known when the program is compiled.

    Args:
        kernel: "splash", "dense", "flash" or "blockwise".
        scale: factor of the scores.
        softcap: see `full.cap`.
        low: lowest key position minus query position that is seen; None for no limit.
        high: highest such; None for no limit.
        num_queries: queries of the unsharded sequence, without padding.
        num_keys: keys of the unsharded sequence, likewise.
        tiles: tile sizes of the kernel; for "dense" those of splash, which computes gradients.
        dense: tile sizes of "dense" itself; else None.
        interpret: whether Pallas interprets the kernel.
        dropout: share of dropped weights; only flash and blockwise.
        drawn_of: heads, queries and keys of the array of weights whose random numbers these are.
        keeps_bits: whether the random numbers, a bit each, are kept for the gradient; only flash.
        further: further mask or bias by tile; only blockwise.
        fill: see `Mask.fill`; only blockwise.
        shards: the mesh and its axes, or None.
        sequence_parallel: strategy for a sharded sequence: "all_gather", "ring" or "ulysses".
        keys_whole: whether the chips' keys together are `num_keys`; else the last ones are padding.
        precision: precision of float32 products, as `jax.default_matmul_precision` takes it. It is
            kept here because gradients are traced after the caller's setting has ended.
    """

    kernel: str
    scale: float
    softcap: float | None
    low: int | None
    high: int | None
    num_queries: int
    num_keys: int
    tiles: KernelTiles
    dense: DenseTiles | None = None
    interpret: bool = False
    dropout: float = 0.0
    drawn_of: tuple[int, int, int] = (0, 0, 0)
    keeps_bits: bool = False
    further: Further | None = None
    fill: float | None = None
    shards: Shards | None = None
    sequence_parallel: SequenceParallel = "all_gather"
    keys_whole: bool = True
    precision: str | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Parts:
    """Arrays of one attention in addition to queries, keys and values; each may be None.

    Args:
        q_segments: (B, Sq) int32.
        kv_segments: (B, Sk) int32.
        key_valid: (B, Sk) booleans.
        captured: arrays that `Problem.further` reads.
        key: random key of dropout.
    """

    q_segments: Any = None
    kv_segments: Any = None
    key_valid: Any = None
    captured: tuple[Any, ...] = ()
    key: Any = None

    def with_keys(self, change: Callable[[jax.Array], jax.Array]) -> "Parts":
        """Apply `change` to the arrays that are indexed by key, as to the keys themselves."""
        kv = None if self.kv_segments is None else change(self.kv_segments)
        valid = None if self.key_valid is None else change(self.key_valid)
        return dataclasses.replace(self, kv_segments=kv, key_valid=valid)


@dataclass(frozen=True)
class Origin:
    """Positions of the first local query and key in the unsharded arrays; numbers, maybe traced."""

    q: Any = 0
    k: Any = 0
    batch: Any = 0
    head: Any = 0


@dataclass(frozen=True)
class Local:
    """The work of one chip: the problem, its local arrays, and their origin."""

    problem: AttentionProblem
    parts: Parts = Parts()
    origin: Origin = Origin()


class Gradients(NamedTuple):
    """Gradients of queries, keys, values, and of the captured arrays that hold real numbers."""

    q: Any
    k: Any
    v: Any
    captured: tuple[Any, ...] = ()


def is_float(array: Any) -> bool:
    """Return whether an array has gradients."""
    return jnp.issubdtype(jnp.result_type(array), jnp.floating)


def hoist(
    blocks: Blocks, sizes: tuple[int, int], within: tuple[int, int] | None
) -> tuple[Further, tuple[jax.Array, ...]]:
    """Turn a function of tiles into one that also takes its captured arrays, for gradients.

    Args:
        blocks: as in `Mask`.
        sizes: rows of queries and of keys of every tile.
        within: lengths of the sequences that `blocks` knows, if tiles may reach beyond them; a
            tile's values there have no meaning.
    """
    # A tile includes padding, so it may be longer than the sequence itself.
    known = sizes if within is None else tuple(map(min, sizes, within))
    start = jax.ShapeDtypeStruct((), jnp.int32)

    def inline(q: Any, k: Any) -> jax.Array:
        # A jitted function inside would keep the mesh axes from outside `shard_map`.
        with jax.disable_jit():
            return blocks(q, known[0], k, known[1])

    closed = jax.make_jaxpr(inline)(start, start)
    jaxpr = closed.jaxpr

    def further(captured: Sequence[jax.Array], q_start: Any, k_start: Any) -> jax.Array:
        starts = [jnp.asarray(q_start, jnp.int32), jnp.asarray(k_start, jnp.int32)]
        if within is None:
            return jax.core.eval_jaxpr(jaxpr, captured, *starts)[0]
        inside = [
            jnp.clip(start, 0, most - size)
            for start, most, size in zip(starts, within, known, strict=True)
        ]
        tile = jax.core.eval_jaxpr(jaxpr, captured, *inside)[0]
        for axis, now, want, size in zip((-2, -1), inside, starts, sizes, strict=True):
            if tile.ndim >= -axis and tile.shape[axis] > 1:
                rows = jnp.clip(want - now + jnp.arange(size), 0, tile.shape[axis] - 1)
                tile = jnp.take(tile, rows, axis=axis)
        return tile

    return further, tuple(jnp.asarray(const) for const in closed.consts)
