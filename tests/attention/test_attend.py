"""What `attend` chooses, refuses and says; bias and dropout; and the case that a tuner times."""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.attention.cases import BLOCKWISE, FULL, SPLASH, Case
from tests.attention.test_kernels import RTOL
from tests.attention.test_sharded import shards
from tpuport.foundation.errors import UsageError
from tpuport.kernels.attention import AttentionOptions, Mask, Shards, attend, dispatch
from tpuport.kernels.attention.dispatch import AttentionWarning
from tpuport.kernels.attention.kernel_case import KernelCase, build_kernel

CASE = Case(queries=50, keys=70)
RNG = np.random.default_rng(0)
BIAS = RNG.standard_normal((2, 4, 50, 70), dtype=np.float32)


def qkv(case: Case = CASE) -> list[jax.Array]:
    return [jnp.asarray(x) for x in case.arrays()[:3]]


def tiles_of(bias: Any) -> Any:
    """`Mask.blocks` of a whole array (B, H, Sq, Sk)."""

    def blocks(q_start: Any, q_size: int, k_start: Any, k_size: int) -> jax.Array:
        starts = (0, 0, q_start, k_start)
        return jax.lax.dynamic_slice(bias, starts, (*bias.shape[:2], q_size, k_size))

    return blocks


# Bias.


@pytest.mark.parametrize(
    ("where", "way"),
    [
        (None, "all_gather"),
        ({"sequence": 4}, "all_gather"),
        ({"sequence": 4}, "ring"),
        ({"data": 2, "tensor": 2, "sequence": 2}, "ulysses"),
    ],
)
def test_a_bias_and_its_gradient_equal_torch(where: dict[str, int] | None, way: Any):
    options = dataclasses.replace(BLOCKWISE, sequence_parallel=way)
    axes = None if where is None else shards(**where)

    def out(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
        mask = Mask(causal=True, offset=20, blocks=tiles_of(bias))
        return attend(q, k, v, mask, options=options, shards=axes)

    *arrays, grad = (jnp.asarray(x) for x in CASE.arrays())
    found = jax.jit(lambda *x: jax.vjp(out, *x)[1](grad))(*arrays, jnp.asarray(BIAS))
    inputs = [torch.from_numpy(np.array(x)).requires_grad_() for x in (*arrays, BIAS)]
    seen = torch.from_numpy(np.arange(70)[None, :] - np.arange(50)[:, None] <= 20)
    masked = torch.where(seen, inputs[3], -torch.inf)
    result = torch.nn.functional.scaled_dot_product_attention(
        *inputs[:3], attn_mask=masked, enable_gqa=True
    )
    result.backward(torch.from_numpy(np.array(grad)))
    for one, other in zip(found, inputs, strict=True):
        assert other.grad is not None
        np.testing.assert_allclose(one, other.grad, rtol=0, atol=RTOL * other.grad.abs().max())


@pytest.mark.parametrize("options", [BLOCKWISE, FULL], ids=lambda options: options.kernel)
def test_a_row_whose_bias_hides_all_is_zero(options: AttentionOptions):
    hidden = np.where(np.arange(50)[:, None] < 7, -np.inf, BIAS)

    def out(q: jax.Array) -> jax.Array:
        k, v = qkv()[1:]
        return attend(q, k, v, Mask(blocks=tiles_of(jnp.asarray(hidden))), options=options)

    result = jax.jit(out)(qkv()[0])
    grad = jax.jit(jax.grad(lambda q: out(q).sum()))(qkv()[0])
    assert np.isfinite(result).all()
    assert np.isfinite(grad).all()
    assert not np.asarray(result)[:, :, :7].any()
    assert not np.asarray(grad)[:, :, :7].any()


def test_a_mask_by_tiles_equals_the_same_mask_by_structure():
    by_tile = Mask(
        blocks=lambda q, nq, k, nk: k + jnp.arange(nk)[None, :] <= q + jnp.arange(nq)[:, None]
    )
    one, other = (attend(*qkv(), mask, options=BLOCKWISE) for mask in (by_tile, Mask(causal=True)))
    np.testing.assert_allclose(one, other, atol=RTOL)


# Dropout.


def test_dropout_keeps_the_mean_and_its_gradient_is_that_of_what_was_kept():
    q, k, v = qkv(Case(queries=40, keys=50, heads=(2, 2), batch=1))

    @jax.jit
    def out(v: jax.Array, key: jax.Array) -> jax.Array:
        return attend(q, k, v, dropout=0.4, key=key, options=BLOCKWISE)

    keys = jax.random.split(jax.random.key(0), 60)
    mean = np.mean([out(v, key) for key in keys], 0)
    plain = attend(q, k, v, options=BLOCKWISE)
    # The standard error of sixty draws is 0.09; without 1 / (1 - p) the mean is off by 0.42.
    assert np.abs(mean - plain).max() < 0.2
    assert np.abs(out(v, keys[0]) - plain).max() > 0.2
    # The output is linear in v, so its gradient along v is the output itself.
    found, pull = jax.vjp(lambda v: out(v, keys[0]), v)
    (grad,) = pull(found)
    np.testing.assert_allclose((grad * v).sum(), (found * found).sum(), rtol=1e-4)


@pytest.mark.parametrize("options", [BLOCKWISE, FULL], ids=lambda options: options.kernel)
def test_the_gradient_under_dropout_is_that_of_the_function(options: AttentionOptions):
    q, k, v = qkv()
    step = jnp.asarray(RNG.standard_normal(q.shape, dtype=np.float32))

    def total(q: jax.Array) -> jax.Array:
        key = jax.random.key(3)
        return (attend(q, k, v, dropout=0.3, key=key, options=options) ** 2).sum()

    slope = (jax.jit(jax.grad(total))(q) * step).sum()
    total = jax.jit(total)
    difference = (total(q + 1e-2 * step) - total(q - 1e-2 * step)) / 2e-2
    np.testing.assert_allclose(slope, difference, rtol=2e-2)


# What is chosen, and what is said.


def test_keys_that_end_within_a_block_take_the_sizes_of_a_masked_kernel(
    monkeypatch: pytest.MonkeyPatch,
):
    asked = []
    tiles = dispatch.choose_tiles
    monkeypatch.setattr(
        dispatch, "choose_tiles", lambda **kw: asked.append(kw["mask"]) or tiles(**kw)
    )
    for length in (256, 200):
        x = jnp.zeros((1, 1, length, 8))
        jax.eval_shape(lambda x: attend(x, x, x, options=SPLASH), x)
    assert asked == ["full", "full", "padding"]


@pytest.fixture
def kernels_used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that run, in order; and nothing has been said before."""
    used: list[str] = []

    def run(problem: Any, q: Any, k: Any, v: Any, parts: Any) -> jax.Array:
        used.append(problem.kernel)
        return jnp.zeros((*q.shape[:3], v.shape[-1]))

    monkeypatch.setattr(dispatch, "attention", run)
    monkeypatch.setattr(dispatch, "_said", set())
    return used


def test_auto_takes_splash_on_a_tpu_and_blockwise_elsewhere(kernels_used: list[str]):
    attend(*qkv(), options=AttentionOptions(platform="tpu", chip="v6e"))
    attend(*qkv(), options=AttentionOptions(platform="cpu"))
    attend(*qkv())
    attend(*qkv(), options=AttentionOptions(interpret=True))
    assert kernels_used == ["splash", "blockwise", "blockwise", "splash"]


TPU = AttentionOptions(platform="tpu")
NOT_FOR_SPLASH = [
    ("an arbitrary mask or bias", {"mask": Mask(blocks=tiles_of(jnp.asarray(BIAS)))}),
    ("dropout", {"dropout": 0.1, "key": jax.random.key(0)}),
]


def test_auto_draws_dropout_in_the_kernel_on_a_tpu(kernels_used: list[str]):
    dropout = NOT_FOR_SPLASH[1][1]
    attend(*qkv(), **dropout, options=TPU)
    attend(*qkv(), **dropout, options=dataclasses.replace(TPU, kernel="blockwise"))
    attend(*qkv(), **dropout, options=AttentionOptions(platform="cpu"))
    other = {**dropout, "key": jax.random.key(0, impl="rbg")}
    with pytest.warns(AttentionWarning, match="Splash attention cannot serve dropout"):
        attend(*qkv(), **other, options=TPU)
    assert kernels_used == ["flash", "blockwise", "blockwise", "blockwise"]


@pytest.mark.parametrize(("reason", "arguments"), NOT_FOR_SPLASH[:1])
def test_what_splash_cannot_serve_is_said_once(
    kernels_used: list[str], reason: str, arguments: dict[str, Any]
):
    message = f"Splash attention cannot serve {reason}: blockwise attention is used, slower"
    with pytest.warns(AttentionWarning, match=message):
        attend(*qkv(), **arguments, options=TPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(*qkv(), **arguments, options=TPU)
    assert kernels_used == ["blockwise"] * 2


@pytest.mark.parametrize(("reason", "arguments"), NOT_FOR_SPLASH)
def test_splash_by_name_refuses_what_it_cannot_serve(reason: str, arguments: dict[str, Any]):
    with pytest.raises(UsageError, match=f"cannot serve {reason}. What to do: leave the kernel"):
        attend(*qkv(), **arguments, options=SPLASH)


def test_fp16_is_not_for_splash(kernels_used: list[str]):
    with pytest.warns(AttentionWarning, match="float16 operands"):
        attend(*(x.astype("float16") for x in qkv()), options=TPU)
    assert kernels_used == ["blockwise"]


X = jnp.zeros((2, 4, 8, 16))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X[0], X, X), r"of 4 dimensions .*, not \(4, 8, 16\)"),
        ((X, X[..., :8], X), "queries .B, Hq, Sq, D., keys"),
        ((X, X, X[:, :, :4]), "queries .B, Hq, Sq, D., keys"),
        ((X, X[:, :3], X[:, :3]), "4 query heads cannot share 3 key heads"),
        ((X, X, X, Mask(q_segments=jnp.zeros((2, 8)))), "q_segments and kv_segments, or neither"),
    ],
)
def test_shapes_that_do_not_go_together_are_refused(arguments: tuple[Any, ...], message: str):
    with pytest.raises(UsageError, match=message):
        attend(*arguments)


def test_dropout_without_a_key_is_refused():
    with pytest.raises(UsageError, match="Dropout needs a key"):
        attend(X, X, X, dropout=0.1)


@pytest.mark.parametrize("name", ["kernel", "sequence_parallel"])
def test_an_unknown_option_is_refused(name: str):
    with pytest.raises(UsageError, match=f"There is no {name} 'flash'. What to do: choose one of"):
        AttentionOptions(**{name: "flash"})  # pyright: ignore


def test_no_keys_at_all_give_zero():
    out = attend(X, X[:, :, :0], X[:, :, :0])
    assert out.shape == X.shape
    assert not out.any()


def test_an_axis_of_one_chip_is_nobodys():
    one = shards(data=1, sequence=1)
    used = dispatch.usable_shards(Shards(one.mesh, ("data",), (), ("sequence",)), (3, 1, 5, 7))
    assert used is not None
    assert (used.batch, used.heads, used.sequence) == ((), (), ())


# The case that a tuner times.


@pytest.mark.parametrize("mask", ["full", "causal", "window", "padding", "segments", "long"])
def test_a_case_traces_to_the_calls_that_it_names(mask: str):
    is_long, length = mask == "long", 16384 if mask == "long" else 4096
    kind = "segments" if is_long else mask
    case = KernelCase("v6e", 4, length, length, 128, mask=kind, num_kv_heads=2)
    built = build_kernel(case)
    jaxpr = str(jax.make_jaxpr(built.function)(*built.args))
    assert jaxpr.count("pallas_call[") == len(built.calls)
    assert (built.blocks.q, built.blocks.kv) == (2048, 2048)
    expected = {
        "full": [(False, 16, 16)],
        "causal": [(False, 8, 4), (True, 8, 8)],
        "window": [(True, 16, 12)],
        "padding": [(False, 8, 8), (True, 8, 8)],
        "segments": [(True, 16, 16)],
        # The last key is not seen: blocks of it are at the edge, one in each row of eight.
        "long": [(False, 256, 224), (True, 128, 32)],
    }
    assert [(call.masked, call.steps, call.active) for call in built.calls] == expected[mask]
    assert [call.runs for call in built.calls] == [1] * len(built.calls)


def test_the_flops_of_a_case_are_those_of_what_is_seen():
    count = lambda mask: build_kernel(KernelCase("v6e", 2, 1024, 1024, 64, mask=mask)).flops  # noqa: E731
    assert count("full") == 4 * 64 * 2 * 1024 * 1024
    assert count("causal") == 4 * 64 * 2 * 1024 * 1025 // 2
    assert count("window") < count("causal") / 3


def test_a_case_of_an_unknown_mask_is_refused():
    with pytest.raises(UsageError, match="There is no kind of mask 'odd'"):
        build_kernel(KernelCase("v6e", 1, 128, 128, 64, mask="odd"))
