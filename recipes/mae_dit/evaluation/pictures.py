"""Distances between an image and its reconstruction: PSNR and SSIM, one for each image."""

import torch
from torch.nn import functional as F

_WINDOW, _SIGMA = 11, 1.5
_C1, _C2 = 0.01**2, 0.03**2


def psnr(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the peak signal-to-noise ratio in dB, (B,), of images (B, C, H, W) in [0, 1].

    It is inf for equal images.
    """
    return -10 * torch.log10(((x - y) ** 2).mean((1, 2, 3)))


def ssim(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the structural similarity (B,) of images (B, C, H, W) in [0, 1], H and W at least 11.

    As Wang et al. 2004 define it: Gaussian windows of 11 pixels with a deviation of 1.5 that lie
    within the image, population covariances, and the mean over channels.
    """
    offsets = torch.arange(_WINDOW, dtype=x.dtype, device=x.device) - _WINDOW // 2
    line = torch.exp(-(offsets**2) / (2 * _SIGMA**2))
    line = line / line.sum()
    channels = x.shape[1]
    kernel = torch.outer(line, line).expand(channels, 1, _WINDOW, _WINDOW)
    terms = torch.cat([x, y, x * x, y * y, x * y])
    means = F.conv2d(terms, kernel, groups=channels)
    mean_x, mean_y, xx, yy, xy = means.chunk(5)
    var_x, var_y, both = xx - mean_x**2, yy - mean_y**2, xy - mean_x * mean_y
    above = (2 * mean_x * mean_y + _C1) * (2 * both + _C2)
    below = (mean_x**2 + mean_y**2 + _C1) * (var_x + var_y + _C2)
    return (above / below).mean((1, 2, 3))
