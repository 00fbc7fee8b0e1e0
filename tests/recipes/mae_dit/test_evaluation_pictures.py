"""PSNR and SSIM: a window computed by hand, scikit-image, and the port."""

import numpy as np
import pytest
import torch

import tpuport
from recipes.mae_dit.evaluation.pictures import psnr, ssim


class _Both(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return psnr(x, y), ssim(x, y)


def _images(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.rand(2, 3, size, size + 2)
    return x, (x + 0.2 * torch.randn_like(x)).clamp(0, 1)


def test_ssim_is_that_of_its_windows() -> None:
    """Compute each window's statistics from its weighted pixels, in float64."""
    x, y = _images(12)
    places = np.arange(11) - 5
    weights = np.exp(-(places[:, None] ** 2 + places**2) / (2 * 1.5**2))
    weights /= weights.sum()
    scores = np.zeros((2, 3, 2, 4))
    for where in np.ndindex(scores.shape):
        n, c, i, j = where
        a, b = (v[n, c, i : i + 11, j : j + 11].double().numpy() for v in (x, y))
        ma, mb = (weights * a).sum(), (weights * b).sum()
        va, vb = (weights * (a - ma) ** 2).sum(), (weights * (b - mb) ** 2).sum()
        both = (weights * (a - ma) * (b - mb)).sum()
        scores[where] = (2 * ma * mb + 1e-4) * (2 * both + 9e-4)
        scores[where] /= (ma**2 + mb**2 + 1e-4) * (va + vb + 9e-4)
    np.testing.assert_allclose(ssim(x, y), scores.mean((1, 2, 3)), rtol=1e-5)
    ratios = 10 * np.log10(1 / ((x - y) ** 2).double().mean((1, 2, 3)).numpy())
    np.testing.assert_allclose(psnr(x, y), ratios, rtol=1e-5)
    found = tpuport.to_torch(tpuport.convert(_Both())(x, y))
    for a, b in zip(found, (psnr(x, y), ssim(x, y)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_equals_scikit_image() -> None:
    metrics = pytest.importorskip("skimage.metrics")
    x, y = _images(24)
    settings = {"data_range": 1.0, "gaussian_weights": True, "sigma": 1.5, "channel_axis": 0}
    for n in range(2):
        a, b = x[n].numpy(), y[n].numpy()
        want = metrics.structural_similarity(a, b, use_sample_covariance=False, **settings)
        assert ssim(x, y)[n] == pytest.approx(want, abs=1e-5)
        want = metrics.peak_signal_noise_ratio(a, b, data_range=1.0)
        assert psnr(x, y)[n] == pytest.approx(want, rel=1e-5)
