"""Random changes of training images: crop, rotation, brightness, contrast and saturation.

The amounts are openpi's. Each image draws its own numbers, as in openpi's JAX code; its PyTorch
code draws one for a batch.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

CROP = 0.95  # share of the side that is kept
DEGREES = 5.0
BRIGHTNESS, CONTRAST, SATURATION = 0.3, 0.4, 0.5
# Wrist cameras move with the arm, so only the first camera is cropped and rotated.
TURNED = 1


def augmented(pixels: Tensor) -> Tensor:
    """Return images (B, cameras, height, width, 3) in [-1, 1] that are changed at random."""
    x = pixels / 2 + 0.5
    x = torch.cat([_turned(x[:, :TURNED]), x[:, TURNED:]], dim=1)
    shape = (*x.shape[:2], 1, 1, 1)

    def factor(most: float) -> Tensor:
        return 1 + most * (2 * torch.rand(shape, device=x.device) - 1)

    x = x * factor(BRIGHTNESS)
    mean = x.mean((2, 3, 4), keepdim=True)
    x = (x - mean) * factor(CONTRAST) + mean
    grey = x.mean(-1, keepdim=True)
    x = grey + (x - grey) * factor(SATURATION)
    return x.clamp(0, 1) * 2 - 1


def _turned(x: Tensor) -> Tensor:
    """Crop images at random places, resize them and rotate them, by one bilinear lookup."""
    flat = x.flatten(0, 1)
    count, height, width, _ = flat.shape
    angle = (2 * torch.rand(count, 1, 1, device=x.device) - 1) * math.radians(DEGREES)
    offset = (2 * torch.rand(count, 2, 1, 1, device=x.device) - 1) * (1 - CROP)
    down = torch.linspace(-1, 1, height, device=x.device)[None, :, None]
    across = torch.linspace(-1, 1, width, device=x.device)[None, None, :]
    grid = torch.stack(
        [
            CROP * (across * angle.cos() - down * angle.sin()) + offset[:, 0],
            CROP * (across * angle.sin() + down * angle.cos()) + offset[:, 1],
        ],
        dim=-1,
    )
    turned = F.grid_sample(flat.permute(0, 3, 1, 2), grid, align_corners=False)
    return turned.permute(0, 2, 3, 1).unflatten(0, x.shape[:2])
