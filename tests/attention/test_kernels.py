"""Splash in interpret mode and blockwise attention equal eager PyTorch's, gradients included."""

import dataclasses

import numpy as np
import pytest

from tests.attention.cases import BLOCKWISE, CASES, FULL, SPLASH, Case, ours, torchs
from tpuport.attention import AttentionOptions

# fp32 sums of some hundred terms, in another order.
RTOL = 1e-5
# bf16 keeps 8 bits: operands, weights and two partial results are rounded to them.
RTOL_BF16 = 2e-2


def assert_equal(found: list[np.ndarray], wanted: list[np.ndarray], rtol: float) -> None:
    for name, one, other in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        assert np.isfinite(one).all(), name
        np.testing.assert_allclose(one, other, rtol=0, atol=rtol * np.abs(other).max(), err_msg=name)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [FULL, BLOCKWISE], ids=lambda options: options.kernel)
def test_plain_jax_equals_torch(name: str, options: AttentionOptions):
    assert_equal(ours(CASES[name], options), torchs(CASES[name]), RTOL)


@pytest.mark.parametrize("name", CASES)
def test_splash_equals_torch(name: str):
    assert_equal(ours(CASES[name], SPLASH), torchs(CASES[name]), RTOL)


@pytest.mark.parametrize("options", [SPLASH, BLOCKWISE], ids=lambda options: options.kernel)
def test_bf16_equals_torch_in_fp32(options: AttentionOptions):
    case = dataclasses.replace(CASES["causal, scattered keys"], dtype="bfloat16")
    assert_equal(ours(case, options), torchs(case), RTOL_BF16)


def test_rows_with_nothing_to_attend_to_are_zero():
    case = CASES["first rows empty"]
    out, dq, *_ = ours(case, SPLASH)
    assert not out[:, :, :150].any()
    assert not dq[:, :, :150].any()
    assert np.abs(out[:, :, 150:]).min() > 0


def test_another_mask_gives_other_numbers():
    # What all the tests above rest on: a kernel that ignored its mask would fail them.
    masked, free = (ours(case, BLOCKWISE)[0] for case in (CASES["causal"], Case()))
    assert np.abs(masked - free).max() > 0.1
