"""What the kernels of `block_sparse.py` have in common: lists as inputs, blocks fetched by them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpuport.kernels.attention.block_lists import BlockLists
from tpuport.kernels.attention.options import Shards

LANES = 128
# Keys that are fetched at a time where a block has a mask.
MASKED_KEYS = 768

# Each block that is fetched at a time has copies of its own in the program.
_MOST_BLOCKS = 8
# Keys of one product, the best first; of those that are an odd number of blocks of 128, 384.
_TILES = (768, 512, 384, 256, 128)

Lists = tuple[BlockLists, ...]


@dataclass(frozen=True)
class SparseProblem:
    """The static part of one attention over lists of blocks.

    Args:
        scale: factor of the scores.
        q_block: queries of a block, a multiple of 128.
        kv_block: keys of a block, a multiple of 128.
        interpret: whether Pallas interprets the kernels.
        precision: precision of float32 products, as `jax.default_matmul_precision` takes it.
        shards: the mesh and its axes, or None.
    """

    scale: float
    q_block: int
    kv_block: int
    interpret: bool = False
    precision: str | None = None
    shards: Shards | None = None


def pad_dim(x: jax.Array, axis: int, unit: int) -> jax.Array:
    """Pad a dim with zeros at its end to a multiple of `unit`."""
    more = -x.shape[axis] % unit
    return jnp.pad(x, [(0, more if a == axis else 0) for a in range(x.ndim)]) if more else x


def blocks_at_once(keys: int, block: int) -> int:
    """Return how many blocks are fetched at a time, as many as make up so many keys at most."""
    return max(min(keys // block, _MOST_BLOCKS), 1)


def _entries(lists: BlockLists, blocks: int) -> jax.Array:
    """Pack lists as (B or 1, Hq or 1, blocks, 1 or 2, 1 + width): the count comes first.

    Every number is brought within its bounds, as the kernels do not check them.
    """
    counts = jnp.clip(lists.counts, 0, lists.indices.shape[3])[..., None]
    rows = [jnp.concatenate([counts, jnp.clip(lists.indices, 0, blocks - 1)], -1)]
    if lists.slots is not None and lists.masks is not None:
        slots = jnp.clip(lists.slots, 0, lists.masks.shape[0] - 1)
        rows.append(jnp.concatenate([jnp.zeros_like(counts), slots], -1))
    return jnp.stack(rows, 3).astype(jnp.int32)


def _entries_spec(entries: jax.Array) -> pl.BlockSpec:
    batch, heads, _, rows, width = entries.shape

    def place(b: Any, h: Any, i: Any) -> tuple[Any, ...]:
        return b if batch > 1 else 0, h if heads > 1 else 0, i, 0, 0

    return pl.BlockSpec((None, None, None, rows, width), place, memory_space=pltpu.SMEM)


def _masks(lists: Lists) -> list[jax.Array]:
    """Return the masks of those lists that have some, keys by queries."""
    return [x.masks.swapaxes(1, 2).astype(jnp.int8) for x in lists if x.masks is not None]


def list_inputs(lists: Lists, blocks: int) -> tuple[list[jax.Array], list[pl.BlockSpec]]:
    """Return the inputs that describe lists, and their specs: entries, then masks in HBM.

    Args:
        lists: the lists.
        blocks: how many blocks there are to see.
    """
    entries, masks = [_entries(x, blocks) for x in lists], _masks(lists)
    anywhere = [pl.BlockSpec(memory_space=pl.ANY) for _ in masks]
    return [*entries, *masks], [*(_entries_spec(x) for x in entries), *anywhere]


def rows_spec(rows: int, width: int, share: int = 1) -> pl.BlockSpec:
    """Return the spec of one block of rows of (B, H, rows, width)."""
    return pl.BlockSpec((None, None, rows, width), lambda b, h, i: (b, lax.div(h, share), i, 0))


PARALLEL = pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "arbitrary"), disable_bounds_checks=True
)


def tile_of(keys: int) -> int:
    """Return the keys of one product, which divide so many."""
    return next(tile for tile in _TILES if keys % tile == 0)


def mask_scratch(lists: Lists, rows: int, size: int) -> list[Any]:
    """Return the buffer of so many rows of masks, if any list has some."""
    if all(x.masks is None for x in lists):
        return []
    return [pltpu.VMEM((2, rows, size), jnp.int8)]


def cost(
    problem: SparseProblem, lists: Lists, q: jax.Array, k: jax.Array, dims: int
) -> pl.CostEstimate:
    """Return the work of full lists, over `dims` numbers a score: how full they are is data."""
    width = min(sum(x.indices.shape[3] for x in lists), k.shape[2] // problem.kv_block)
    scores = q.shape[0] * q.shape[1] * q.shape[2] * width * problem.kv_block
    moved = q.nbytes * 2 + scores // problem.q_block * dims * k.dtype.itemsize
    return pl.CostEstimate(
        flops=2 * scores * dims, transcendentals=scores, bytes_accessed=int(moved)
    )


class Fetched(NamedTuple):
    """Blocks that were fetched.

    Args:
        slot: which of the two buffers they are in.
        left: how many blocks of the list there are from the first of these on.
        indices: the index of each.
    """

    slot: Any
    left: Any
    indices: tuple[Any, ...]


class Fetch(NamedTuple):
    """One block to fetch.

    Args:
        slot: to which of the two buffers.
        place: its number there.
        index: its index.
        mask: the slot of its mask; None without masks.
        exists: whether the list has it; else the index is that of the last one.
    """

    slot: Any
    place: int
    index: Any
    mask: Any
    exists: Any


# Returns the copies of one block.
Copies = Callable[[Fetch], Sequence[Any]]


def visit(
    entries: Any,
    group: int,
    copies: Copies,
    buffers: tuple[Sequence[Any], Any],
    compute: Callable[[Fetched], None],
    first: Callable[[Any], None] = lambda slot: None,
) -> None:
    """Fetch the blocks of one list and compute with them, `group` at a time.

    After the last block, the last one is fetched again in place of those that do not exist.

    Args:
        entries: the list, as `list_inputs` packs it.
        group: blocks that are fetched at a time.
        copies: returns the copies of one block.
        buffers: what the copies of a group fill, each with two slots before its dims; and their
            semaphores.
        compute: computes with the blocks that were fetched.
        first: called with the slot of the first blocks before anything is computed with them.
    """
    count = entries[0, 0]
    steps = lax.div(count + (group - 1), group)

    def places(step: Any) -> list[Any]:
        return [1 + jnp.minimum(step * group + g, count - 1) for g in range(group)]

    def fetch(step: Any, slot: Any) -> list[Any]:
        found: list[Any] = []
        for g, place in enumerate(places(step)):
            mask = entries[1, place] if entries.shape[0] > 1 else None
            exists = step * group + g < count
            found += copies(Fetch(slot, g, entries[0, place], mask, exists))
        return found

    @pl.when(steps > 0)
    def _start() -> None:
        for copy in fetch(0, 0):
            copy.start()
        _wait(buffers, 0)
        first(0)

    def one(step: Any, carry: Any) -> Any:
        slot, following = lax.rem(step, 2), step + 1 < steps

        @pl.when(following)
        def _next() -> None:
            for copy in fetch(step + 1, 1 - slot):
                copy.start()

        indices = tuple(entries[0, place] for place in places(step))
        compute(Fetched(slot, count - step * group, indices))
        pl.when(following)(lambda: _wait(buffers, 1 - slot))
        return carry

    lax.fori_loop(0, steps, one, 0)


def _wait(buffers: tuple[Sequence[Any], Any], slot: Any) -> None:
    """Wait until all copies to a slot of the buffers have arrived."""
    for buffer in buffers[0]:
        # Waits for as many bytes as all copies to this buffer have.
        pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], buffers[1].at[slot]).wait()


def copy_in(array: Any, at: tuple[Any, ...], buffer: Any, done: Any, slot: Any) -> Any:
    """Return the copy of `array[at]` in HBM to a buffer, with the semaphore of its slot."""
    return pltpu.make_async_copy(array.at[at], buffer, done.at[slot])


def rows_at(index: Any, size: int) -> Any:
    """Return the slice of block `index`."""
    return pl.ds(pl.multiple_of(index * size, size), size)
