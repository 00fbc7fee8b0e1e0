"""The blocks that the kernel visits: together what is seen, each once, masked at edges only."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuport.kernels.attention.schedule import InBand, Piece, ScheduleBand, UpTo, make_pieces

LIMITS = st.none() | st.integers(-30, 30)


@st.composite
def bands(draw: Any) -> tuple[ScheduleBand, tuple[int, int], tuple[int, int]]:
    """A band, numbers of blocks, and their sizes."""
    sizes = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    lengths = draw(st.integers(1, 30)), draw(st.integers(1, 30))
    num_blocks = -(-lengths[0] // sizes[0]), -(-lengths[1] // sizes[1])
    num_keys = draw(st.integers(0, lengths[1]))
    shift = draw(st.integers(-40, 40))
    return ScheduleBand(draw(LIMITS), draw(LIMITS), shift, lengths[0], num_keys), num_blocks, sizes


def seen_of(band: ScheduleBand, rows: int, columns: int) -> np.ndarray:
    """(rows, columns): what the band says, written out."""
    queries, keys = np.arange(rows)[:, None], np.arange(columns)[None, :]
    distance = keys - queries - band.shift
    seen = np.broadcast_to(keys < band.num_keys, (rows, columns)).copy()
    if band.low is not None:
        seen &= distance >= band.low
    if band.high is not None:
        seen &= distance <= band.high
    return seen


def visits(piece: Piece, by_key: bool) -> list[tuple[int, int]]:
    """(block of queries, block of keys) of each visit of the kernel."""
    data_next, active = np.asarray(piece.info.data_next)[0], np.asarray(piece.info.block_mask)[0]
    places = np.argwhere(active)
    if by_key:
        return [(int(data_next[i, j]), int(j)) for i, j in places]
    return [(int(i), int(data_next[i, j])) for i, j in places]


def assembled(
    pieces: list[Piece], num_blocks: tuple[int, int], sizes: tuple[int, int], by_key: bool
) -> np.ndarray:
    """(rows, columns): how often the kernel counts each pair of a query and a key."""
    (q_size, k_size), count = (
        sizes,
        np.zeros([n * s for n, s in zip(num_blocks, sizes, strict=True)]),
    )
    for piece in pieces:
        for i, j in visits(piece, by_key):
            block = np.s_[i * q_size : (i + 1) * q_size, j * k_size : (j + 1) * k_size]
            if piece.function is None:
                count[block] += 1
                continue
            positions = np.asarray(piece.info.q_sequence)[block[0], None]
            count[block] += piece.function(positions, np.arange(count.shape[1])[None, block[1]])
    return count


@pytest.mark.parametrize("by_key", [False, True])
@given(bands())
def test_a_known_band_is_covered_once(by_key: bool, drawn: Any):
    band, num_blocks, sizes = drawn
    pieces = make_pieces(band, num_blocks, sizes, by_key=by_key)
    count = assembled(pieces, num_blocks, sizes, by_key)[: band.num_queries]
    np.testing.assert_array_equal(count, seen_of(band, *count.shape))


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("limits", [(None, None), (None, 3), (-5, None), (-5, 3)])
@given(shift=st.integers(-40, 40))
def test_a_traced_place_is_covered_once(by_key: bool, limits: Any, shift: int):
    band = ScheduleBand(*limits, shift, 18, 20)
    pieces = traced_pieces(limits, by_key, False)(shift, 20)
    count = assembled(pieces, (5, 7), (4, 3), by_key)[:18]
    np.testing.assert_array_equal(count, seen_of(band, *count.shape))


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("limits", [(None, None), (None, 3)])
@given(shift=st.integers(-40, 40), num_keys=st.integers(0, 20))
def test_a_traced_number_of_keys_is_covered_once(
    by_key: bool, limits: Any, shift: int, num_keys: int
):
    band = ScheduleBand(*limits, shift, 18, num_keys)
    pieces = traced_pieces(limits, by_key, True)(shift, num_keys)
    assert [type(piece.function) for piece in pieces] == [type(None), UpTo]
    count = assembled(pieces, (5, 7), (4, 3), by_key)[:18]
    np.testing.assert_array_equal(count, seen_of(band, *count.shape))


@functools.cache
def traced_pieces(limits: Any, by_key: bool, count_too: bool) -> Any:
    """`make_pieces` of 18 queries and up to 20 keys, jitted over the place and number of keys."""
    functions = []

    @jax.jit
    def infos(shift: jax.Array, num_keys: jax.Array) -> Any:
        band = ScheduleBand(*limits, shift, 18, num_keys if count_too else 20)
        pieces = make_pieces(band, (5, 7), (4, 3), by_key=by_key)
        functions[:] = [(piece.function, piece.at_edge) for piece in pieces]
        return [piece.info for piece in pieces]

    def run(shift: int, num_keys: int) -> list[Piece]:
        found = infos(shift, num_keys)
        return [Piece(info, *known) for info, known in zip(found, functions, strict=True)]

    return run


def test_only_blocks_at_an_edge_are_masked():
    # 112,856 keys in blocks of 2048: the last block holds 216 of them, all others are full.
    band = ScheduleBand(None, None, 0, 112_856, 112_856)
    whole, edge = make_pieces(band, (37, 56), (3072, 2048))
    assert (whole.function, int(whole.info.block_mask.sum())) == (None, 37 * 55)  # pyright: ignore
    assert (edge.function, edge.info.block_mask.shape) == (InBand(None, None, 112_856), (1, 37, 1))  # pyright: ignore


def test_a_traced_number_of_keys_masks_one_block_a_row():
    def blocks(num_keys: jax.Array) -> tuple[Any, ...]:
        pieces = make_pieces(ScheduleBand(None, None, 0, 8192, num_keys), (4, 8), (2048, 1024))
        return tuple(piece.info.block_mask.sum() for piece in pieces)  # pyright: ignore

    assert [int(n) for n in jax.jit(blocks)(jnp.int32(5000))] == [4 * 4, 4]
    assert [int(n) for n in jax.jit(blocks)(jnp.int32(8192))] == [4 * 8, 0]


def test_what_is_unmasked_and_divides_is_one_call():
    (piece,) = make_pieces(ScheduleBand(None, None, 0, 8192, 8192), (4, 8), (2048, 1024))
    assert piece.function is None


def test_nothing_seen_is_no_call():
    assert make_pieces(ScheduleBand(None, -9000, 0, 8192, 8192), (4, 8), (2048, 1024)) == []
