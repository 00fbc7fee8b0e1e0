"""Attention over lists of blocks that are data equals float64 PyTorch, gradients included."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.attention.test_kernels import RTOL, RTOL_BF16, assert_equal
from tests.attention.test_sharded import shards
from tpuport.foundation.errors import UsageError
from tpuport.kernels.attention import block_fetch, block_sparse, block_sparse_backward
from tpuport.kernels.attention.attend_blocks import attend_blocks
from tpuport.kernels.attention.block_lists import BlockLists, lists_of, matrix_of, transposed

# Neither length is whole blocks, and blocks of queries and of keys differ.
BLOCKS, QUERIES, KEYS = (128, 256), 300, 600
ROWS, COLUMNS = 3, 3
RNG = np.random.default_rng(0)
MASKS = RNG.random((4, *BLOCKS)) < 0.3
MASKS[3] = False
# (batch, query heads), (batch, key heads)
HEADS = {"one head": ((1, 1), (1, 1)), "shared key heads": ((2, 4), (2, 2))}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch at most two blocks at a time, so that small lists have several rounds."""
    monkeypatch.setattr(block_sparse, "_KEYS", 512)
    monkeypatch.setattr(block_fetch, "MASKED_KEYS", 256)
    monkeypatch.setattr(block_sparse_backward, "_ROWS", 256)


def arrays(heads: str, dtype: str) -> list[jax.Array]:
    """Queries, keys, values, and the gradients of the output and of the logsumexp."""
    rng, (q, kv) = np.random.default_rng(1), HEADS[heads]
    shapes = ((*q, QUERIES, 16), (*kv, KEYS, 16), (*kv, KEYS, 8), (*q, QUERIES, 8), (*q, QUERIES))
    made = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    return [*made[:4], made[4].astype(jnp.float32)]


@functools.cache
def jitted(over: Any = None, way: Any = "all_gather") -> Any:
    """Output, logsumexp and gradients, of lists that are arguments: compiled once a shape."""

    @jax.jit
    def run(lists: Any, q: Any, k: Any, v: Any, grad: Any, d_lse: Any) -> Any:
        def attention(q: Any, k: Any, v: Any) -> Any:
            how = {"interpret": True, "shards": over, "sequence_parallel": way}
            return attend_blocks(q, k, v, lists, blocks=BLOCKS, **how)

        (out, lse), pull = jax.vjp(attention, q, k, v)
        return out, *pull((grad, jnp.where(jnp.isneginf(lse), 0, d_lse))), lse

    return run


def seen_by(lists: tuple[BlockLists, ...], heads: tuple[int, int]) -> np.ndarray:
    """Write lists out as booleans (batch, heads, queries, keys)."""
    seen = np.zeros((*heads, ROWS * BLOCKS[0], COLUMNS * BLOCKS[1]), bool)
    for one in lists:
        counts = np.broadcast_to(one.counts, (*heads, ROWS))
        indices = np.broadcast_to(one.indices, (*heads, *one.indices.shape[2:]))
        slots = None if one.slots is None else np.broadcast_to(one.slots, indices.shape)
        for place in np.ndindex(*heads, ROWS):
            for at in range(counts[place]):
                rows = slice(place[2] * BLOCKS[0], (place[2] + 1) * BLOCKS[0])
                index = indices[(*place, at)]
                columns = slice(index * BLOCKS[1], (index + 1) * BLOCKS[1])
                mask = True if slots is None else np.asarray(one.masks)[slots[(*place, at)]]
                seen[place[0], place[1], rows, columns] |= mask
    return seen[:, :, :QUERIES, :KEYS]


def in_float64(lists: Any, q: Any, k: Any, v: Any, grad: Any, d_lse: Any) -> list[np.ndarray]:
    """The same, of a matrix of scores."""
    q, k, v, grad, d_lse = (
        torch.from_numpy(np.asarray(x, np.float64)) for x in (q, k, v, grad, d_lse)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    seen = torch.from_numpy(seen_by(lists, tuple(q.shape[:2])))
    share = q.shape[1] // k.shape[1]
    k_all, v_all = (x.repeat_interleave(share, 1) for x in (k, v))
    some = seen.any(-1)
    scores = torch.where(seen, q @ k_all.mT / 4, -torch.inf)
    lse = torch.logsumexp(torch.where(some[..., None], scores, 0), -1)
    out = torch.where(seen, (scores - lse[..., None]).exp(), 0) @ v_all
    ((out * grad).sum() + torch.where(some, lse * d_lse, 0).sum()).backward()
    found = (out, *(x.grad for x in inputs), torch.where(some, lse, -torch.inf))
    return [x.detach().numpy() for x in found]


def some_lists(seed: int, shape: tuple[int, int], *, masked: bool) -> tuple[BlockLists, ...]:
    """Random lists, of which the first row of the first head sees nothing."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 3, (*shape, ROWS, COLUMNS))
    kinds[0, 0, 0] = 0
    full = lists_of(jnp.asarray(kinds == 1))
    if not masked:
        return (full,)
    partial = lists_of(jnp.asarray(kinds == 2))
    slots = jnp.asarray(rng.integers(0, len(MASKS), partial.indices.shape), jnp.int32)
    return full, partial._replace(slots=slots, masks=jnp.asarray(MASKS))


def check(lists: Any, given: list[jax.Array], rtol: float) -> list[np.ndarray]:
    found = [np.asarray(x, np.float64) for x in jitted()(lists, *given)]
    wanted = in_float64(lists, *given)
    np.testing.assert_array_equal(np.isneginf(found[4]), np.isneginf(wanted[4]))
    assert_equal(found[:4], wanted[:4], rtol, least=0.1)
    # A logsumexp of some hundred keys is about five, so this is `rtol` of it.
    some = ~np.isneginf(wanted[4])
    np.testing.assert_allclose(found[4][some], wanted[4][some], rtol=0, atol=rtol * 5)
    return found


@pytest.mark.parametrize(
    ("heads", "lists_shape"),
    [
        ("shared key heads", (2, 4)),
        pytest.param("shared key heads", (1, 1), marks=pytest.mark.slow),
    ],
)
def test_lists_and_masks_equal_float64(heads: str, lists_shape: tuple[int, int]):
    given = arrays(heads, "float32")
    for seed in (1, 2):
        found = check(some_lists(seed, lists_shape, masked=True), given, RTOL)
        assert not found[0][0, 0, :128].any()
        assert not found[1][0, 0, :128].any()
    # Another list is another argument, and the program is the same.
    size = jitted()._cache_size()
    check(some_lists(3, lists_shape, masked=True), given, RTOL)
    assert jitted()._cache_size() == size


def test_bfloat16_equals_float64_and_all_or_no_blocks_do():
    given = arrays("one head", "bfloat16")
    for seen in (np.ones((1, 1, ROWS, COLUMNS)), np.zeros((1, 1, ROWS, COLUMNS))):
        some = (lists_of(jnp.asarray(seen, bool)),)
        found = check(some, given, RTOL_BF16)
        assert found[0].any() == seen.any()
        assert all(x.dtype == jnp.bfloat16 for x in jitted()(some, *given)[:4])
    check(some_lists(4, (1, 1), masked=False), given, RTOL_BF16)


def test_a_negative_scale_is_that_of_negated_queries():
    q, k, v, *_ = arrays("one head", "float32")
    lists = some_lists(5, (1, 1), masked=False)
    run: Any = functools.partial(attend_blocks, blocks=BLOCKS, interpret=True)
    one, two = run(q * 40, k, v, lists, scale=-0.5), run(-q * 40, k, v, lists, scale=0.5)
    np.testing.assert_array_equal(one[0], two[0])
    assert np.isfinite(one[0]).all()


def test_indices_after_the_count_do_not_matter():
    given = arrays("one head", "bfloat16")
    (lists,) = some_lists(5, (1, 1), masked=False)
    after = np.arange(COLUMNS) >= np.asarray(lists.counts)[..., None]
    other = lists._replace(indices=jnp.where(after, 10_000, lists.indices))
    for one, two in zip(jitted()((lists,), *given), jitted()((other,), *given), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(two, np.float32))


def test_scores_far_below_zero_keep_their_weights():
    # What is padding, or no block, would have a score of zero and be the maximum.
    q, k, *rest = arrays("one head", "bfloat16")
    given = [jnp.abs(q) * 4 + 4, -jnp.abs(k) * 4 - 4, *rest]
    check(some_lists(6, (1, 1), masked=False), given, RTOL_BF16 * 3)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_keys_that_are_seen_far_above_those_of_the_base_keep_their_weights(dtype: str):
    q, k, *rest = arrays("one head", dtype)
    q, k = jnp.abs(q) + 1, jnp.abs(k) + 1
    # The first keys of each block are those whose scores are the base; the last have weights that
    # no float32 holds beside theirs.
    place = jnp.arange(KEYS) % BLOCKS[1]
    k = k * jnp.where(place < block_sparse._SAMPLE, 0.01, 4 * (place // 64 + 1))[:, None].astype(
        dtype
    )
    full, partial = some_lists(5, (1, 1), masked=True)
    rtol = RTOL_BF16 * 3 if dtype == "bfloat16" else RTOL * 10
    for lists in ((full, partial), (partial, full)):
        check(lists, [q, k, *rest], rtol)
    found = jitted()((full,), q, k.at[0, 0, 40].set(jnp.nan), *rest)
    seen = np.asarray(seen_by((full,), (1, 1)))[0, 0, :, 40]
    np.testing.assert_array_equal(np.isnan(np.asarray(found[4])[0, 0]), seen)


@pytest.mark.parametrize(
    ("axes", "way"),
    [
        ({"tensor": 2}, "all_gather"),
        ({"sequence": 2}, "all_gather"),
        ({"data": 2, "sequence": 2}, "ulysses"),
    ],
)
def test_a_mesh_equals_one_chip(axes: dict[str, int], way: str):
    given = arrays("shared key heads", "float32")
    # Whole blocks of queries, which two chips share.
    given = [x if n in (1, 2) else x[:, :, :256] for n, x in enumerate(given)]
    lists = tuple(
        x._replace(counts=x.counts[:, :, :2], indices=x.indices[:, :, :2])
        for x in some_lists(7, (2, 4), masked=False)
    )
    over = shards(**axes)
    run = jitted(over, way)
    assert "shard_map" in str(jax.make_jaxpr(run)(lists, *given))
    for one, two in zip(run(lists, *given), jitted()(lists, *given), strict=True):
        # Gradients of keys are added over the chips, in another order.
        np.testing.assert_allclose(one, two, rtol=0, atol=2e-5)


def test_transposed_lists_name_the_same_pairs_and_slots():
    for one in some_lists(8, (2, 1), masked=True):
        matrix = np.asarray(matrix_of(one, COLUMNS))
        back = np.asarray(matrix_of(transposed(one, COLUMNS), ROWS))
        np.testing.assert_array_equal(matrix, back.swapaxes(-1, -2))
        assert matrix.any()


def test_what_does_not_fit_is_refused():
    q, k, v, *_ = arrays("one head", "float32")
    (lists,) = some_lists(9, (1, 1), masked=False)
    run: Any = functools.partial(attend_blocks, interpret=True, blocks=BLOCKS)
    with pytest.raises(UsageError, match="multiples of 128"):
        run(q, k, v, [lists], blocks=(64, 128))
    with pytest.raises(UsageError, match=r"counts \(1 or 1, 1 or 1, 3\)"):
        run(q, k, v, [lists._replace(counts=lists.counts[:, :, :2])])
    with pytest.raises(UsageError, match="all the same"):
        run(q, k.astype(jnp.bfloat16), v, [lists])
    with pytest.raises(UsageError, match="need masks"):
        run(q, k, v, [lists._replace(slots=lists.indices)])
    with pytest.raises(UsageError, match="at least one"):
        run(q, k, v, [])
    with pytest.raises(UsageError, match="Hkv divides"):
        run(q, jnp.concatenate([k, k], 1), v, [lists])
    masks = jnp.zeros((1, 128, 128), bool)
    with pytest.raises(UsageError, match="masks of shape"):
        run(q, k, v, [lists._replace(slots=lists.indices, masks=masks)])
    with pytest.raises(UsageError, match="the same batch"):
        run(q, k[..., :8], v, [lists])
