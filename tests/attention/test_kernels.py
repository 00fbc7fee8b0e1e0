"""Splash in interpret mode and blockwise attention equal eager PyTorch's, gradients included."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.cases import BLOCKWISE, CASES, FULL, SPLASH, Case, ours, torchs
from tpuport.cost.walking import sub_jaxprs
from tpuport.kernels.attention import AttentionOptions, attend

# fp32 sums of some hundred terms, in another order.
RTOL = 1e-5
# bf16 keeps 8 bits: operands, weights and two partial results are rounded to them.
RTOL_BF16 = 2e-2


def assert_equal(
    found: list[np.ndarray], wanted: list[np.ndarray], rtol: float, least: float = 0.0
) -> None:
    """Within a share of each array's largest number, which counts as `least` if it is smaller."""
    given = ("out", "dq", "dk", "dv")[: len(found)]
    for name, one, other in zip(given, found, wanted, strict=True):
        assert np.isfinite(one).all(), name
        scale = max(np.abs(other).max(), least)
        np.testing.assert_allclose(one, other, rtol=0, atol=rtol * scale, err_msg=name)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [FULL, BLOCKWISE], ids=lambda options: options.kernel)
def test_plain_jax_equals_torch(name: str, options: AttentionOptions):
    assert_equal(ours(CASES[name], options), torchs(CASES[name]), RTOL)


# What the others have in them, too.
COVERED = {"full", "padded queries"}


@functools.cache
def by_splash(name: str) -> list[np.ndarray]:
    return ours(CASES[name], SPLASH)


# The first in bfloat16 below; "first rows empty" is causal, and test_segments.py has queries and
# examples without keys.
SLOW = {"causal, scattered keys", "causal", "one example empty"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW))
        for name in sorted(CASES.keys() - COVERED)
    ],
)
def test_splash_equals_torch(name: str):
    assert_equal(by_splash(name), torchs(CASES[name]), RTOL)


@pytest.mark.parametrize("options", [SPLASH, BLOCKWISE], ids=lambda options: options.kernel)
def test_bf16_equals_torch_in_fp32(options: AttentionOptions):
    case = dataclasses.replace(CASES["causal, scattered keys"], dtype="bfloat16")
    assert_equal(ours(case, options), torchs(case), RTOL_BF16)


def test_rows_with_nothing_to_attend_to_are_zero():
    out, dq, *_ = by_splash("first rows empty")
    assert not out[:, :, :150].any()
    assert not dq[:, :, :150].any()
    assert np.abs(out[:, :, 150:]).min() > 0


def test_another_mask_gives_other_numbers():
    # What all the tests above rest on: a kernel that ignored its mask would fail them.
    masked, free = (ours(case, BLOCKWISE)[0] for case in (CASES["causal"], Case()))
    assert np.abs(masked - free).max() > 0.1


@pytest.mark.parametrize("options", [SPLASH, BLOCKWISE], ids=lambda options: options.kernel)
@pytest.mark.parametrize(("dtype", "expected"), [("float32", "HIGHEST"), ("bfloat16", "DEFAULT")])
def test_products_have_the_callers_precision_also_in_gradients(options, dtype, expected):
    """A kernel that multiplies bfloat16 "in float32" does not compile for a TPU."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return attend(q, k, v, options=options).astype(jnp.float32).sum()

    shape = jax.ShapeDtypeStruct((1, 2, 256, 128), dtype)
    # The scope ends before the gradient is taken.
    traced = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(shape, shape, shape)
    found = [eqn.params["precision"] for eqn in products(traced.jaxpr)]
    assert len(found) >= 7
    assert {str(side) for pair in found for side in pair} == {expected}


def products(jaxpr):
    """The products of a jaxpr and of all within it."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for inner in sub_jaxprs(eqn):
            yield from products(inner)
