"""Schedules of splash: the blocks of keys to visit for each block of queries, and their masks.

The kernel masks every block it visits if it masks any, which costs a seventh to a third of its
time. So one attention is two schedules: the blocks that are seen completely, unmasked, and those at
an edge of the band. `merge` in `splash.py` puts their results together.

A schedule is computed from numbers alone. If these are static, it is made of numpy arrays and as
narrow as it can be; if they are traced (a chip's place in a sharded sequence, the length of one of
a batch's sequences, segments), it is made of the program's arrays.

Of segments the schedule knows the lowest and the highest id of each block. Blocks whose ids cannot
meet are skipped, blocks of one and the same id are seen completely, and the kernel compares the ids
of all others. Any ids give the right result; ids that rise along the sequence give a short
schedule.
How many blocks of a row are at an edge is known only at run time, and a step of the kernel that
does nothing takes time, too: so they are visited in rounds, as many as the longest row needs.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info

MaskInfo = splash_attention_mask_info.MaskInfo
# The fewest blocks of a row that a round visits, and the most rounds: each round reads and writes
# the complete result once more.
_ROUND, _MOST_ROUNDS = 4, 4
# The id of keys that nobody sees. No query has it.
NOBODY = np.iinfo(np.int32).min


class SegmentIds(NamedTuple):
    """Ids of queries and keys, padded to full blocks; equal ids see each other if in the band.

    Args:
        q: (blocks * size,) int32; above `NOBODY`.
        kv: (blocks * size,) int32.
    """

    q: Any
    kv: Any


def without_nobody(q: jax.Array, kv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Shift ids so that none is `NOBODY`; which ids are equal, and their order, stay the same.

    Args:
        q: (B, Sq) int32.
        kv: (B, Sk) int32.
    """

    def raised(q: jax.Array, kv: jax.Array) -> tuple[jax.Array, jax.Array]:
        # The ids below the first unused one go up by one. `count` is one more than there are ids,
        # so an unused one exists.
        count = q.size + kv.size + 1
        used = jnp.zeros(count, bool)
        for ids in (q, kv):
            place = jnp.where(ids < NOBODY + count, ids - NOBODY, count)
            used = used.at[place.reshape(-1)].set(True, mode="drop")
        unused = NOBODY + jnp.argmin(used).astype(jnp.int32)
        return q + (q < unused), kv + (kv < unused)

    # Without such a query nothing moves: keys with the id NOBODY are then rightly seen by none.
    return lax.cond((q == NOBODY).any(), raised, lambda q, kv: (q, kv), q, kv)


@dataclass(frozen=True)
class ScheduleBand:
    """The keys that a query sees: from `low` to `high` after it, among the first `num_keys`.

    Args:
        low: lowest key position minus query position; None for no limit.
        high: highest such; None for no limit.
        shift: position of the first query minus that of the first key; a number, maybe traced.
        num_queries: how many queries there are, without padding.
        num_keys: how many keys are seen at all; a number, maybe traced.
    """

    low: int | None
    high: int | None
    shift: Any
    num_queries: int
    num_keys: Any

    @property
    def is_known(self) -> bool:
        """Return whether all of the band is static, known when the program is compiled."""
        return not isinstance(self.shift, jax.Array) and not isinstance(self.num_keys, jax.Array)


@dataclass(frozen=True)
class InBand:
    """The kernel's mask function where the limits and the number of keys are static."""

    low: int | None
    high: int | None
    num_keys: int | None

    def __call__(self, q_ids: Any, k_ids: Any) -> Any:
        """Return booleans: whether the query at `q_ids` sees the key at `k_ids`."""
        tests = []
        if self.high is not None:
            tests.append(k_ids <= (q_ids + self.high if self.high else q_ids))
        if self.low is not None:
            tests.append(k_ids >= (q_ids + self.low if self.low else q_ids))
        if self.num_keys is not None:
            tests.append(k_ids < self.num_keys)
        seen = tests[0]
        for test in tests[1:]:
            seen = seen & test
        return seen


@dataclass(frozen=True)
class UpTo:
    """The mask function where each query's own last key is passed in place of its position."""

    def __call__(self, q_last: Any, k_ids: Any) -> Any:
        """Return booleans: whether the key at `k_ids` is not after `q_last`."""
        return k_ids <= q_last


@dataclass(frozen=True)
class Piece:
    """The blocks that one call of the kernel visits, for one size of blocks.

    Args:
        info: the schedule.
        function: the kernel's mask function; None for no mask.
        at_edge: whether the blocks are seen only in part, so that ids, if any, are compared.
        rounds: None, or the traced number of calls that visit them; `info` is then of all calls.
        round_size: blocks of a row that a round visits.
        axis: the axis along a row of the schedule's arrays.
    """

    info: MaskInfo
    function: InBand | UpTo | None
    at_edge: bool
    rounds: Any = None
    round_size: int = 0
    axis: int = 2

    def of_round(self, number: Any) -> MaskInfo:
        """Return the schedule of one call; past the last round, one that visits nothing."""
        schedule: Any = self.info.data_next, self.info.block_mask
        data_next, active = (
            lax.dynamic_slice_in_dim(x, number * self.round_size, self.round_size, self.axis)
            for x in schedule
        )
        active = jnp.where(number < self.rounds, active, 0).astype(active.dtype)
        return self.info._replace(data_next=data_next, block_mask=active)


def make_pieces(
    band: ScheduleBand,
    num_blocks: tuple[int, int],
    sizes: tuple[int, int],
    *,
    by_key: bool = False,
    ids: SegmentIds | None = None,
) -> list[Piece]:
    """Return the calls that together see exactly the band, between equal ids if there are ids.

    Args:
        band: the keys that each query sees.
        num_blocks: blocks of queries and of keys.
        sizes: rows of one block of queries and of keys.
        by_key: order the blocks for the kernel of key gradients, which goes by blocks of keys.
        ids: segments; keys past the band's have the id `NOBODY`, or are none.

    Returns:
        None, one or two pieces; none if nothing at all is seen.
    """
    seen, whole = _classify(np if band.is_known else jnp, band, num_blocks, sizes)
    axis = 0 if by_key else 1
    widths = _widths(band, seen, whole, _most_edge_blocks(band, num_blocks, sizes, by_key), axis)
    xp = np if band.is_known and ids is None else jnp
    if ids is not None:
        widths = widths[0], _width(band, seen, axis)
        may_meet, same = _compare_ids(ids, sizes)
        seen, whole = seen & may_meet, whole & same
    pieces = []
    for chosen, width, at_edge in ((whole, widths[0], False), (seen & ~whole, widths[1], True)):
        if width == 0:
            continue
        function, positions = None, None
        if at_edge and (ids is None or (band.low, band.high) != (None, None)):
            function, positions = _mask_function(band, num_blocks, sizes)
        rounds, size = None, width
        if at_edge and ids is not None:
            size = max(_ROUND, -(-width // _MOST_ROUNDS))
            width = -(-width // size) * size
            rounds = (chosen.sum(axis).max() + size - 1) // size
        data_next, block_mask = _order(xp, chosen, width, by_key)
        info = MaskInfo(data_next, None, block_mask, None, positions)
        pieces.append(Piece(info, function, at_edge, rounds, size, axis + 1))
    return pieces


def _widths(
    band: ScheduleBand, seen: Any, whole: Any, most_edge: int, axis: int
) -> tuple[int, int]:
    """Return the most blocks of a row that are seen completely, and the most at the band's edge."""
    edge = _width(band, seen & ~whole, axis)
    return _width(band, whole, axis), edge if band.is_known else min(edge, most_edge)


def _width(band: ScheduleBand, chosen: Any, axis: int) -> int:
    """Return the most chosen blocks along an axis, or all of them if only the run will tell."""
    return int(chosen.sum(axis).max()) if band.is_known else chosen.shape[axis]


def _compare_ids(ids: SegmentIds, sizes: tuple[int, int]) -> tuple[Any, Any]:
    """Return which blocks (queries, keys) may share an id, and which have one id between them."""
    q, k = (x.reshape(-1, size) for x, size in zip(ids, sizes, strict=True))
    lowest = jnp.where(k == NOBODY, np.iinfo(np.int32).max, k).min(1)
    may_meet = (lowest <= q.max(1)[:, None]) & (k.max(1) >= q.min(1)[:, None])
    one_each = (q == q[:, :1]).all(1)[:, None] & (k == k[:, :1]).all(1)
    return may_meet, one_each & (q[:, :1] == k[:, 0])


def _classify(
    xp: Any, band: ScheduleBand, num_blocks: tuple[int, int], sizes: tuple[int, int]
) -> tuple[Any, Any]:
    """Return which blocks (queries, keys) are seen at all, and which are seen completely.

    Queries that are padding count as neither.
    """
    (q_size, k_size), (num_q, num_k) = sizes, num_blocks
    q_first = xp.arange(num_q)[:, None] * q_size
    q_last = xp.minimum(q_first + q_size, band.num_queries) - 1 + band.shift
    q_first = q_first + band.shift
    k_first = xp.arange(num_k)[None, :] * k_size
    k_last = k_first + k_size - 1
    seen = (k_first < band.num_keys) & (q_last >= q_first)
    whole = (k_last < band.num_keys) & (q_last >= q_first)
    if band.low is not None:
        seen &= xp.minimum(k_last, band.num_keys - 1) - q_first >= band.low
        whole &= k_first - q_last >= band.low
    if band.high is not None:
        seen &= k_first - q_last <= band.high
        whole &= k_last - q_first <= band.high
    return seen, seen & whole


def _most_edge_blocks(
    band: ScheduleBand, num_blocks: tuple[int, int], sizes: tuple[int, int], by_key: bool
) -> int:
    """Return how many blocks of a row (of a column if `by_key`) can be seen in part."""
    (q_size, k_size), (num_q, num_k) = sizes, num_blocks
    edges = (band.low is not None) + (band.high is not None)
    if by_key:
        # The block where the keys end is at an edge for every block of queries.
        return num_q
    return min(num_k, edges * (-(-(q_size + k_size) // k_size) + 1) + 1)


def _order(xp: Any, chosen: Any, width: int, by_key: bool) -> tuple[Any, Any]:
    """Return (blocks to visit, whether to) of each row in the kernel's layout, chosen first.

    The chosen blocks come first.

    Places past the last chosen block repeat it, so that nothing is fetched for them.
    """
    rows = chosen.T if by_key else chosen
    # numpy calls it by kind, jax.numpy by name; False sorts before True.
    order = np.argsort(~rows, 1, kind="stable") if xp is np else jnp.argsort(~rows, 1, stable=True)
    count = rows.sum(1)[:, None]
    places = xp.arange(width)[None, :]
    visited = xp.take_along_axis(order, xp.minimum(places, xp.maximum(count - 1, 0)), 1)
    small = np.int8 if rows.shape[1] <= np.iinfo(np.int8).max else np.int16
    visited, active = visited.astype(small), (places < count).astype(np.int8)
    return (visited.T[None], active.T[None]) if by_key else (visited[None], active[None])


def _mask_function(
    band: ScheduleBand, num_blocks: tuple[int, int], sizes: tuple[int, int]
) -> tuple[InBand | UpTo, Any]:
    """Return the kernel's mask function, and the number that it takes for each query."""
    num_rows = num_blocks[0] * sizes[0]
    if not isinstance(band.num_keys, jax.Array):
        all_keys = num_blocks[1] * sizes[1]
        limit = None if band.num_keys >= all_keys else band.num_keys
        if (band.low, band.high, limit) == (None, None, None):
            limit = all_keys
        positions = jnp.arange(num_rows, dtype=jnp.int32) + band.shift
        return InBand(band.low, band.high, limit), positions
    assert band.low is None, "a traced number of keys leaves no room for a lower limit"
    last = jnp.asarray(band.num_keys, jnp.int32) - 1
    if band.high is None:
        return UpTo(), jnp.full(num_rows, last)
    ends = jnp.arange(num_rows, dtype=jnp.int32) + band.shift + band.high
    return UpTo(), jnp.minimum(ends, last)
