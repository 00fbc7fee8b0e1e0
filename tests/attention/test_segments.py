"""Segments: any ids give eager PyTorch's numbers, and those that rise skip what they can."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.cases import SPLASH, Case, torchs
from tests.attention.test_kernels import RTOL, RTOL_BF16, assert_equal
from tests.attention.test_schedule import visits
from tpuport.kernels.attention import Mask, attend, schedule
from tpuport.kernels.attention.schedule import NOBODY, Piece, ScheduleBand, SegmentIds, make_pieces
from tpuport.kernels.attention.splash import Sorting

QUERIES, KEYS = 420, 600
NO_BAND: dict[str, Any] = {}
CAUSAL: dict[str, Any] = {"causal": True, "offset": 180}
WINDOW: dict[str, Any] = {"window": (150, 20), "offset": 180}
RNG = np.random.default_rng(0)


@functools.cache
def splash(band: tuple[tuple[str, Any], ...], dtype: str) -> Any:
    """Output and gradients as a jitted function of arrays and ids, so that it compiles once."""

    @jax.jit
    def run(q: Any, k: Any, v: Any, grad: Any, q_ids: Any, kv_ids: Any, valid: Any) -> Any:
        mask = Mask(**dict(band), q_segments=q_ids, kv_segments=kv_ids, key_valid=valid)
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, mask, options=SPLASH), q, k, v)
        return out, *pull(grad)

    def found(case: Case, *ids: np.ndarray) -> list[np.ndarray]:
        arrays = (jnp.asarray(x, dtype) for x in case.arrays())
        return [np.asarray(x, np.float32) for x in run(*arrays, *ids)]

    return found


def check(
    band: dict[str, Any], ids: tuple[np.ndarray, ...], valid: Any = None, dtype: str = ""
) -> None:
    """`attend` with these ids equals torch with the mask that they stand for, written out."""
    q_ids, kv_ids = (np.asarray(x, np.int32) for x in ids)
    valid = np.ones(kv_ids.shape, bool) if valid is None else valid
    seen = (q_ids[:, :, None] == kv_ids[:, None, :]) & valid[:, None, :]
    distance = np.arange(KEYS)[None, :] - np.arange(QUERIES)[:, None]
    low, high = Mask(**band).band()
    seen &= (low is None or distance >= low) & (high is None or distance <= high)
    dtype = dtype or "float32"
    case = Case(seen=seen[:, None], queries=QUERIES, keys=KEYS, sizes=(8, 8), dtype=dtype)
    found = splash(tuple(band.items()), dtype)(case, q_ids, kv_ids, valid)
    # Gradients of a softmax over one key are zero, but for rounding.
    assert_equal(found, torchs(case), RTOL if dtype == "float32" else RTOL_BF16, least=1.0)


def packed(length: int, starts: list[int]) -> np.ndarray:
    """Ids of documents that begin at these places."""
    return np.searchsorted(np.sort(starts), np.arange(length), side="right")


@pytest.fixture(autouse=True, scope="module")
def short_rounds():
    """Rounds of one block: what has several at an edge takes several rounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "_ROUND", 1)
        yield
    splash.cache_clear()


# One example in the batch is another than the other.
ONE = np.zeros((2, QUERIES), int), np.zeros((2, KEYS), int)
EACH = tuple(np.stack([np.arange(n), np.arange(n)[::-1]]) for n in (QUERIES, KEYS))
SCATTERED = RNG.integers(0, 3, (2, QUERIES)), RNG.integers(-1, 3, (2, KEYS))
LARGE = tuple(np.take([NOBODY, 7, np.iinfo(np.int32).max], x % 3) for x in SCATTERED)
# The id that the kernel has for keys which nobody sees, and its neighbours, are ids as any other.
LOWEST = tuple(NOBODY + np.array([0, 1, 3])[x % 3] for x in SCATTERED)
NONE_IN_COMMON = np.zeros((2, QUERIES), int), np.ones((2, KEYS), int)


@pytest.mark.parametrize(
    "ids",
    [ONE, EACH, SCATTERED, LARGE, LOWEST, NONE_IN_COMMON],
    ids=["one", "each", "scattered", "large", "lowest", "none in common"],
)
def test_any_ids_give_what_torch_gives(ids: Any):
    check(NO_BAND, ids)


@settings(max_examples=6)
@given(st.data())
@pytest.mark.parametrize("band", [NO_BAND, CAUSAL, WINDOW], ids=["none", "causal", "window"])
def test_packed_documents_give_what_torch_gives(band: dict[str, Any], data: Any):
    ids = tuple(
        np.stack(
            [packed(n, data.draw(st.lists(st.integers(1, n - 1), max_size=6))) for _ in range(2)]
        )
        for n in (QUERIES, KEYS)
    )
    ends = data.draw(st.tuples(st.integers(0, KEYS), st.integers(0, KEYS)))
    check(band, ids, np.arange(KEYS) < np.array(ends)[:, None])


def test_bf16_documents_are_within_its_rounding():
    ids = tuple(np.stack([packed(n, [n // 3, n // 2]), packed(n, [99])]) for n in (QUERIES, KEYS))
    check(CAUSAL, ids, dtype="bfloat16")


# Which blocks are visited.


def pieces_of(
    q: Any, kv: Any, by_key: bool = False, band: ScheduleBand | None = None
) -> list[Piece]:
    """For blocks of 4 queries and 3 keys."""
    ids = SegmentIds(jnp.asarray(q, jnp.int32), jnp.asarray(kv, jnp.int32))
    num_blocks = len(q) // 4, len(kv) // 3
    return make_pieces(
        band or ScheduleBand(None, None, 0, len(q), len(kv)),
        num_blocks,
        (4, 3),
        by_key=by_key,
        ids=ids,
    )


def counted(pieces: list[Piece], ids: tuple[np.ndarray, np.ndarray], by_key: bool) -> np.ndarray:
    """(queries, keys): how often the kernels count each pair, all rounds together."""
    q, kv = ids
    count = np.zeros((len(q), len(kv)), int)
    for piece in pieces:
        rounds = [piece.info]
        if piece.rounds is not None:
            # One more than there are is nothing.
            rounds = [piece.of_round(n) for n in range(int(piece.rounds) + 1)]
        for info in rounds:
            for i, j in visits(Piece(info, None, piece.at_edge), by_key):
                block = np.s_[4 * i : 4 * i + 4, 3 * j : 3 * j + 3]
                seen = np.ones((4, 3), bool)
                if piece.at_edge:
                    seen = q[block[0], None] == kv[None, block[1]]
                if piece.function is not None:
                    positions = np.asarray(piece.info.q_sequence)[block[0], None]
                    seen = seen & piece.function(positions, np.arange(len(kv))[None, block[1]])
                count[block] += seen
    return count


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("high", [None, 2])
@settings(max_examples=40)
@given(st.data())
def test_each_pair_of_one_id_is_counted_once(by_key: bool, high: int | None, data: Any):
    draw = lambda n: data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))  # noqa: E731
    q, kv = np.array(draw(20)), np.array(draw(18))
    if data.draw(st.booleans()):
        q, kv = np.sort(q), np.sort(kv)
    kv = np.where(np.arange(18) < data.draw(st.integers(0, 18)), kv, NOBODY)
    band = ScheduleBand(None, high, 0, 20, 18)
    count = counted(pieces_of(q, kv, by_key, band), (q, kv), by_key)
    wanted = q[:, None] == kv[None, :]
    if high is not None:
        wanted &= np.arange(18)[None, :] - np.arange(20)[:, None] <= high
    np.testing.assert_array_equal(count, wanted)


def visited(pieces: list[Piece]) -> list[int]:
    return [int(np.asarray(piece.info.block_mask).sum()) for piece in pieces]


def test_one_segment_masks_nothing():
    whole, edge = pieces = pieces_of(np.zeros(40), np.zeros(60))
    assert visited(pieces) == [10 * 20, 0]
    assert (whole.rounds, int(edge.rounds)) == (None, 0)


def test_documents_skip_each_others_blocks():
    # Three of 48, one of which ends with 6 keys that are padding.
    ids = np.repeat([0, 1, 2], 48)
    kv = np.where(np.arange(144) < 138, ids, NOBODY)
    # Blocks of 12 x 16 in each document; those of padding alone are not visited either.
    assert visited(pieces_of(ids, kv)) == [12 * 16 + 12 * 16 + 12 * 14, 0]
    # Where a block holds two documents it is at the edge of both.
    whole, edge = visited(pieces_of(np.roll(ids, 2), kv))
    assert whole + edge < 12 * 48 + 3 * 48
    assert edge


@pytest.mark.parametrize("length", [1, 127, 128, 129, 1000, 40_000])
def test_keys_are_sorted_by_whether_they_are_valid(length: int):
    generator = np.random.default_rng(length)
    valid = generator.random((4, length)) > 0.3
    valid[1], valid[2], valid[3] = True, False, np.arange(length) < length // 2
    found = Sorting.by(jnp.asarray(valid))
    places = np.argsort(np.argsort(~valid, axis=1, kind="stable"), axis=1)
    np.testing.assert_array_equal(found.place, places)
    assert bool(found.is_sorted) == bool((places == np.arange(length)).all())
