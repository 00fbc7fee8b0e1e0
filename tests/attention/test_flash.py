"""Dropout drawn tile by tile gives the matrix of scores' numbers: values, gradients, any mesh."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.cases import BLOCKWISE, CASES, FULL, SMALL, Case, ours
from tests.attention.test_kernels import RTOL, RTOL_BF16, assert_equal
from tests.attention.test_sharded import shards
from tpuport.kernels.attention import AttentionOptions, Shards, attend, flash, random_bits

pytestmark = pytest.mark.filterwarnings(
    "ignore::tpuport.kernels.attention.dispatch.AttentionWarning"
)

FLASH = AttentionOptions(interpret=True, blocks=SMALL)
RATE = 0.3


def dropped(case: Case, options: AttentionOptions, where: Shards | None = None) -> list[np.ndarray]:
    """Output and gradients of q, k, v with dropout, jitted."""
    return ours(case, options, where, dropout=RATE, key=jax.random.key(5))


@functools.cache
def by_matrix(name: str) -> list[np.ndarray]:
    return dropped(CASES[name], FULL)


# Those that stay have in them what these have.
SLOW = {"full", "causal", "window", "padded keys", "one example empty", "padded queries"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES]
)
def test_the_kernel_equals_the_matrix_of_scores(name: str):
    assert_equal(dropped(CASES[name], FLASH), by_matrix(name), RTOL)


@pytest.mark.parametrize("name", ["causal segments", "known padded keys", "odd sizes"])
def test_blockwise_draws_the_same_numbers(name: str):
    assert_equal(dropped(CASES[name], BLOCKWISE), by_matrix(name), RTOL)


def test_bfloat16_equals_the_matrix_of_scores_in_float32():
    case = dataclasses.replace(CASES["causal, scattered keys"], dtype="bfloat16")
    rounded = [np.asarray(jnp.asarray(x, "bfloat16"), np.float32) for x in case.arrays()]

    class Rounded(Case):
        def arrays(self) -> list[np.ndarray]:
            return rounded

    exact = Rounded(**{**vars(case), "dtype": "float32"})
    assert_equal(dropped(case, FLASH), dropped(exact, FULL), RTOL_BF16)


def test_too_many_bits_are_drawn_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flash, "_MOST_KEPT", 0)
    found = dropped(CASES["causal segments"], FLASH)
    assert_equal(found, by_matrix("causal segments"), RTOL)


def test_queries_in_several_chunks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flash, "_MOST_QUERIES", 1)
    found = dropped(CASES["causal, scattered keys"], FLASH)
    assert_equal(found, by_matrix("causal, scattered keys"), RTOL)


@pytest.mark.parametrize(
    ("way", "axes"),
    [
        ("all_gather", {"data": 2, "tensor": 2, "sequence": 2}),
        ("ulysses", {"tensor": 2, "sequence": 2}),
        pytest.param("ring", {"data": 2, "sequence": 2}, marks=pytest.mark.slow),
    ],
)
def test_each_chip_draws_its_own(way: Any, axes: dict[str, int]):
    name = "causal, scattered keys"
    options = dataclasses.replace(FLASH, sequence_parallel=way)
    assert_equal(dropped(CASES[name], options, shards(**axes)), by_matrix(name), RTOL)


def test_a_key_of_another_kind_draws_by_tile():
    q, k, v, _ = (jnp.asarray(x) for x in Case(queries=40, keys=50).arrays())
    key = jax.random.key(0, impl="rbg")
    out = attend(q, k, v, dropout=RATE, key=key, options=FLASH)
    assert np.abs(out - attend(q, k, v, options=BLOCKWISE)).max() > 0.1


def test_keys_may_be_mapped():
    q, k, v = (jnp.asarray(x) for x in Case(queries=40, keys=50).arrays()[:3])
    keys = jax.random.split(jax.random.key(1), 3)

    def outs(keys: jax.Array, options: AttentionOptions) -> jax.Array:
        def gradient(key: jax.Array) -> jax.Array:
            def total(q: jax.Array) -> jax.Array:
                return (attend(q, k, v, dropout=RATE, key=key, options=options) ** 2).sum()

            return jax.grad(total)(q)

        return jax.vmap(gradient)(keys)

    found, wanted = (jax.jit(outs, static_argnums=1)(keys, o) for o in (FLASH, FULL))
    # Gradients of a sum over all results, which the kernel adds up in blocks.
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    for_tpu = AttentionOptions(platform="tpu", chip="v6e")
    traced = jax.jit(outs, static_argnums=1).trace(keys, for_tpu)
    assert flash.BACKWARD in traced.lower(lowering_platforms=("tpu",)).as_text()


# The numbers themselves.


def test_elements_have_the_bits_of_the_whole_array():
    key, shape = jax.random.key(7), (3, 5, 70)
    row, column = (jnp.arange(n, dtype=jnp.uint32) for n in (15, 70))
    number = random_bits.number_of(row[:, None], 70, column)
    words = random_bits.words_of(key)
    bits = random_bits.bits_of((words[0], words[1]), *number)
    np.testing.assert_array_equal(bits.reshape(shape), jax.random.bits(key, shape))


@pytest.mark.parametrize("rate", [0.1, 0.5, 1e-9, 1 - 2**-24, 0.3])
def test_a_comparison_of_integers_is_that_of_uniform_numbers(rate: float):
    key = jax.random.key(8)
    bits = jax.random.bits(key, (10_000,))
    kept = random_bits.are_kept(bits, rate)
    np.testing.assert_array_equal(kept, jax.random.bernoulli(key, 1 - rate, (10_000,)))
    limit = int(np.ceil(float(np.float32(1 - rate)) * 2**23))
    edge = jnp.asarray([limit - 1, min(limit, 2**23 - 1)], jnp.uint32) << 9
    np.testing.assert_array_equal(random_bits.are_kept(edge, rate), [limit > 0, limit > 2**23 - 1])


def test_numbers_may_need_more_than_a_word():
    rng = np.random.default_rng(0)
    row, column = (rng.integers(0, n, 1000, np.uint32) for n in (2**32 - 1, 100_000))
    high, low = random_bits.number_of(jnp.asarray(row), 100_000, jnp.asarray(column))
    wanted = row.astype(object) * 100_000 + column
    assert [int(h) << 32 | int(x) for h, x in zip(high, low, strict=True)] == list(wanted)


@pytest.mark.parametrize("keys", [16, 208, 256, 512, 640, 1024])
def test_words_hold_every_bit(keys: int):
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, (keys, 128))
    words = flash._packed(kept)
    assert words.dtype == np.uint32
    assert words.shape[0] * 32 >= keys
    np.testing.assert_array_equal(flash._unpacked(words, keys), kept)


@pytest.mark.parametrize(
    ("queries", "keys", "is_faster"),
    [(2048, 2048, True), (256, 256, True), (577, 577, True), (128, 128, False), (20, 2048, False)],
)
def test_the_kernel_is_for_blocks_that_are_full_enough(queries: int, keys: int, is_faster: bool):
    assert flash.is_faster(queries, keys) == is_faster
