"""The kernel for queries that all see the same keys equals eager PyTorch, gradients included."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.attention.cases import CASES, FULL, SPLASH, Case, ours, torchs
from tests.attention.test_kernels import RTOL, RTOL_BF16, assert_equal
from tests.attention.test_sharded import shards
from tpuport.cost.kernels import find_calls
from tpuport.kernels.attention import AttentionOptions, Mask, Shards, attend, dense
from tpuport.kernels.attention.problem import AttentionProblem, Local, Parts
from tpuport.kernels.attention.tiles import DenseTiles, KernelTiles
from tpuport.tracing.scan_layers.jaxpr_equal import same_program

DENSE = AttentionOptions(interpret=True, chip="v6e")
# Two tiles a step, as many steps as the lengths need.
SMALL = DenseTiles(q=128, kv=256, kv_tile=128)
# Lengths that are no whole blocks, a shared key head, and keys known or not to be padding.
SERVED = ("odd sizes", "known padded keys", "scattered keys")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, whatever the sizes are."""
    monkeypatch.setattr(dense, "choose", lambda **sizes: SMALL)


def names(function: Any, *args: Any) -> list[str]:
    return [call.name for call in find_calls(jax.make_jaxpr(function)(*args))]


def output(case: Case, options: AttentionOptions = DENSE, over: Shards | None = None) -> np.ndarray:
    """The output alone, which takes a quarter of the time of its gradients."""

    @jax.jit
    def run(q: Any, k: Any, v: Any, mask: dict[str, Any]) -> jax.Array:
        return attend(q, k, v, Mask(**{**case.mask, **mask}), options=options, shards=over)

    traced = {name: value for name, value in case.mask.items() if isinstance(value, jax.Array)}
    q, k, v = (jnp.asarray(x, case.dtype) for x in case.arrays()[:3])
    return np.asarray(run(q, k, v, traced), np.float32)


@pytest.mark.parametrize("name", SERVED)
def test_it_equals_torch(name: str):
    assert_equal([output(CASES[name])], torchs(CASES[name])[:1], RTOL)


@pytest.mark.parametrize("tiles", [(128, 128, 128), (256, 384, 256)])
def test_any_number_of_tiles_equals_torch(tiles: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dense, "choose", lambda **sizes: DenseTiles(*tiles))
    case = CASES["padded keys"]
    assert_equal([output(case)], torchs(case)[:1], RTOL)


def test_bf16_equals_torch_in_fp32():
    case = dataclasses.replace(CASES["scattered keys"], dtype="bfloat16")
    assert_equal([output(case)], torchs(case)[:1], RTOL_BF16)


def test_sharp_scores_are_nearer_to_fp64_than_splashs():
    # Splash rounds the scaled queries, which moves a score by a share of its size.
    case = Case(queries=128, keys=512, heads=(1, 1), sizes=(128, 128), batch=1, dtype="bfloat16")
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in case.arrays()[:3])
    q = q * 8
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(torch.from_numpy(np.asarray(x, np.float64)) for x in (q, k, v))
    ).numpy()

    def error(options: AttentionOptions) -> float:
        found = jax.jit(lambda q, k, v: attend(q, k, v, options=options))(q, k, v)
        return float(np.sqrt(np.mean((np.asarray(found, np.float64) - exact) ** 2)))

    assert error(DENSE) < 0.6 * error(SPLASH)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (128, 256)])
def test_sizes_of_one_and_whole_blocks_equal_torch(queries: int, keys: int):
    case = Case(queries=queries, keys=keys, heads=(1, 1), batch=1)
    assert_equal([output(case)], torchs(case)[:1], RTOL)


def test_it_is_the_kernel_that_runs():
    q = jax.ShapeDtypeStruct((1, 2, 200, 64), jnp.float32)
    valid = jax.ShapeDtypeStruct((1, 200), jnp.bool_)

    def run(q: Any, valid: Any, **mask: Any) -> jax.Array:
        return attend(q, q, q, Mask(key_valid=valid, **mask), options=DENSE)

    assert names(run, q, valid) == [dense.NAME]
    assert dense.NAME not in names(functools.partial(run, causal=True), q, valid)


def test_gradients_equal_torchs_and_an_example_without_keys_has_none():
    found = ours(CASES["one example empty"], DENSE)
    assert_equal(found, torchs(CASES["one example empty"]), RTOL)
    for array in found:
        assert not array[1].any()
        assert np.abs(array[0]).max() > 0


def test_where_no_key_is_seen_all_is_zero():
    case = Case({"key_valid": np.zeros((1, 300), bool)}, heads=(1, 1))
    assert not output(case).any()


@pytest.mark.parametrize("known", [True, False])
def test_scores_far_below_zero_keep_their_weights(known: bool):
    # What is padding has a score of zero by itself, and would then be the maximum.
    q, k, v = (jnp.asarray(x) for x in Case(keys=200, heads=(2, 2), sizes=(16, 16)).arrays()[:3])
    q, k = jnp.abs(q) * 8 + 8, -jnp.abs(k) * 8 - 8

    def run(valid: Any, options: AttentionOptions) -> jax.Array:
        return attend(q, k, v, Mask(key_valid=valid), options=options)

    valid = np.arange(200)[None] < 150
    one = jax.jit(functools.partial(run, valid if known else jnp.asarray(valid), DENSE))()
    np.testing.assert_allclose(one, run(valid, FULL), atol=1e-3)
    assert np.abs(one).max() > 0.1


def steep(name: str, dtype: str = "float32") -> tuple[Any, np.ndarray]:
    """Queries, keys and values whose scores rise or fall by thousands along the keys; who is seen.

    The keys that give a query its base are every tenth, so most of these rises come between them.
    """
    q, k, v = (jnp.asarray(x) for x in Case(keys=320, heads=(2, 2), sizes=(16, 16)).arrays()[:3])
    steps = {
        "up": np.linspace(-400, 400, 320),
        "down": np.linspace(400, -400, 320),
        "peaks": np.where(np.arange(320) % 10 == 7, 300.0, -300.0),
        "a peak in the last block": np.where(np.arange(320) == 301, 500.0, 0.0),
        "a peak that nobody sees": np.where(np.arange(320) == 301, 500.0, -200.0),
    }[name]
    valid = np.broadcast_to(np.arange(320) < (299 if "nobody" in name else 320), (2, 320))
    first = jnp.asarray(steps / 16, jnp.float32)[:, None]
    q, k = q.at[..., 0].set(4 * 16), k.at[..., :1].set(jnp.broadcast_to(first, k[..., :1].shape))
    # Of the first head the second half falls where the other rises.
    q = q.at[:, 0, 64:, 0].mul(-1)
    return tuple(x.astype(dtype) for x in (q, k, v)), valid


STEEP = ("up", "down", "peaks", "a peak in the last block", "a peak that nobody sees")


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in STEEP), ("up", "bfloat16")]
)
def test_scores_that_rise_by_more_than_a_float_holds_equal_torch(name: str, dtype: str):
    (q, k, v), valid = steep(name, dtype)

    @jax.jit
    def run(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, Mask(key_valid=jnp.asarray(valid)), options=DENSE)

    found, vjp = jax.vjp(run, q, k, v)
    leaves = [torch.from_numpy(np.array(x, np.float64)).requires_grad_() for x in (q, k, v)]
    mask = torch.from_numpy(valid.copy())[:, None, None]
    expected = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask)
    expected.backward(torch.ones_like(expected))
    # Scores of hundreds have errors of some 1e-4 in float32, and weights as much; in bfloat16
    # weights and results are rounded to 8 bits.
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-3
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected.detach().numpy(), atol=tolerance
    )
    gradients = vjp(jnp.ones_like(found))
    for gradient, leaf in zip(gradients[2:], leaves[2:], strict=True):
        largest = leaf.grad.abs().max()
        error = np.abs(np.asarray(gradient, np.float64) - leaf.grad.numpy()).max()
        assert error < tolerance * largest


def test_what_is_no_number_stays_in_its_query():
    q, k, v = (jnp.asarray(x) for x in Case(heads=(2, 2)).arrays()[:3])
    run = jax.jit(lambda q: attend(q, k, v, options=DENSE))
    for bad in (jnp.nan, jnp.inf):
        found = np.array(run(q.at[0, 0, 3, 0].set(bad)))
        assert np.isnan(found[0, 0, 3]).any()
        found[0, 0, 3] = np.asarray(run(q))[0, 0, 3]
        np.testing.assert_allclose(found, run(q), atol=1e-6)


def test_numbers_in_keys_that_nobody_sees_do_not_matter():
    q, k, v = (jnp.asarray(x) for x in Case(heads=(2, 2)).arrays()[:3])
    valid = jnp.asarray(np.random.default_rng(3).random((2, 300)) < 0.5)
    hidden = ~valid[:, None, :, None]
    run = jax.jit(lambda k, v: attend(q, k, v, Mask(key_valid=valid), options=DENSE))
    spoilt = run(jnp.where(hidden, jnp.nan, k), jnp.where(hidden, jnp.inf, v))
    np.testing.assert_array_equal(run(k, v), spoilt)


@pytest.mark.parametrize("way", ["ring"])
def test_a_sharded_sequence_equals_torch(way: Any):
    case = dataclasses.replace(CASES["padded keys"], heads=(4, 4))
    options = dataclasses.replace(DENSE, sequence_parallel=way)
    assert_equal([output(case, options, shards(sequence=4))], torchs(case)[:1], RTOL)


def test_the_logsumexp_is_that_of_all_keys():
    q, k, v = (jnp.asarray(x) for x in Case(heads=(2, 2)).arrays()[:3])
    tiles = KernelTiles(128, 128, 128, 128, 128)
    problem = AttentionProblem(
        "dense", 0.25, None, None, None, 200, 300, tiles, dense=SMALL, interpret=True
    )
    valid = jnp.arange(300)[None] < jnp.asarray([[250], [0]])
    local = Local(problem, Parts(key_valid=valid))
    lse = jax.jit(functools.partial(dense.forward, local))(q, k, v)[1]
    scores = 0.25 * np.einsum("hqd,hkd->hqk", q[0], k[0, :, :250])
    np.testing.assert_allclose(lse[0], jax.nn.logsumexp(scores, axis=-1), rtol=1e-6, atol=1e-5)
    assert np.isneginf(lse[1]).all()


def test_two_traces_of_it_are_one_program():
    """Else blocks that call it are taken for different ones, and none becomes a loop."""
    x = jax.ShapeDtypeStruct((1, 1, 49152, 128), jnp.bfloat16)
    valid = jax.ShapeDtypeStruct((1, 49152), bool)

    def attention(q: jax.Array, valid: jax.Array) -> jax.Array:
        options = AttentionOptions(platform="tpu", chip="v6e")
        return attend(q, q, q, Mask(key_valid=valid), options=options)

    first = jax.make_jaxpr(attention)(x, valid)
    jax.clear_caches()
    second = jax.make_jaxpr(attention)(x, valid)
    assert dense.NAME in str(first)
    assert same_program(first, second)
    negated = jax.make_jaxpr(lambda q, valid: attention(q, ~valid))(x, valid)
    assert not same_program(first, negated)
