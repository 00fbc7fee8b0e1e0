"""Which blocks of keys each block of queries sees, as arrays that a program computes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpuport.foundation.errors import UsageError


class BlockLists(NamedTuple):
    """For each block of queries, the blocks of keys that it sees, in any order and none twice.

    Args:
        counts: (B or 1, Hq or 1, query blocks) int32, how many are seen.
        indices: (B or 1, Hq or 1, query blocks, width) int32; those after the count do not matter.
        slots: like `indices`: the place of each block's mask in `masks`; None if every score of a
            block that is seen counts.
        masks: (number, queries of a block, keys of a block) booleans, False where a score does not
            count; given if and only if `slots` is.
    """

    counts: jax.Array
    indices: jax.Array
    slots: jax.Array | None = None
    masks: jax.Array | None = None


def lists_of(seen: jax.Array) -> BlockLists:
    """Return the lists of a matrix of booleans (B or 1, Hq or 1, query blocks, key blocks)."""
    seen = jnp.asarray(seen, bool)
    order = jnp.argsort(~seen, axis=-1, stable=True).astype(jnp.int32)
    return BlockLists(seen.sum(-1, dtype=jnp.int32), order)


def matrix_of(lists: BlockLists, key_blocks: int) -> jax.Array:
    """Return, for each pair of blocks, 0 if it is not seen, else 1 plus its slot (or 1), int32."""
    batch, heads, rows, width = lists.indices.shape
    counts = jnp.broadcast_to(lists.counts, (batch, heads, rows))
    values = jnp.ones_like(lists.indices) if lists.slots is None else lists.slots + 1
    values = jnp.where(jnp.arange(width) < counts[..., None], values, 0)
    places = jnp.ogrid[:batch, :heads, :rows]
    zeros = jnp.zeros((batch, heads, rows, key_blocks), jnp.int32)
    # Of places after the count, any index is allowed, and adds nothing.
    indices = jnp.clip(lists.indices, 0, key_blocks - 1)
    return zeros.at[(*(p[..., None] for p in places), indices)].max(values)


def transposed(lists: BlockLists, key_blocks: int) -> BlockLists:
    """Return, for each block of keys, the blocks of queries that see it.

    Args:
        lists: the lists by blocks of queries.
        key_blocks: number of blocks of keys.
    """
    matrix = matrix_of(lists, key_blocks).swapaxes(-1, -2)
    found = lists_of(matrix > 0)
    if lists.slots is None:
        return found
    slots = jnp.take_along_axis(matrix, found.indices, axis=-1) - 1
    return found._replace(slots=jnp.maximum(slots, 0), masks=lists.masks)


def check_lists(
    lists: BlockLists, batch: int, heads: int, blocks: tuple[int, int], sizes: tuple[int, int]
) -> None:
    """Raise `UsageError` if lists do not describe so many blocks of so many rows.

    Args:
        lists: the lists.
        batch: examples of the queries.
        heads: heads of the queries.
        blocks: number of blocks of queries, and of keys.
        sizes: rows of a block of queries, and of keys.
    """
    counts, indices = lists.counts.shape, lists.indices.shape
    allowed = ({1, batch}, {1, heads}, {blocks[0]})
    fits = len(counts) == 3 and all(n in of for n, of in zip(counts, allowed, strict=True))
    if not fits or len(indices) != 4 or indices[:3] != counts:
        raise UsageError(
            f"lists of blocks have counts of shape {counts} and indices of shape {indices};"
            f" expected counts ({batch} or 1, {heads} or 1, {blocks[0]}) and indices with one dim"
            f" more, as queries come in blocks of {sizes[0]}. What to do: give each block of"
            " queries one list"
        )
    if (lists.slots is None) != (lists.masks is None):
        raise UsageError("lists of blocks with slots need masks, and masks need slots")
    if lists.slots is not None and lists.masks is not None:
        masks = lists.masks.shape
        if lists.slots.shape != indices or masks[1:] != sizes:
            raise UsageError(
                f"lists of blocks have slots of shape {lists.slots.shape} and masks of shape"
                f" {masks}; expected {indices} and (number, {sizes[0]}, {sizes[1]})"
            )


def local_lists_spec(lists: BlockLists, spec: Any, axes: tuple[Any, Any, Any]) -> BlockLists:
    """Return how lists are sharded whose queries are sharded over (batch, heads, sequence) axes.

    Args:
        lists: the lists.
        spec: `jax.sharding.PartitionSpec`.
        axes: mesh axes of the batch, of the heads and of the sequence.
    """
    batch, heads = (
        axis if size > 1 else ()
        for axis, size in zip(axes[:2], lists.counts.shape[:2], strict=True)
    )
    own = spec(batch, heads, axes[2])
    given = lists.slots is not None
    return BlockLists(own, own, own if given else None, spec() if given else None)
