"""LPIPS (Zhang et al. 2018, arXiv:1801.03924): a distance between images from features of VGG16."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from recipes.mae_dit.evaluation.published import (
    load_exactly,
    randomise,
    read_published,
    say_random,
)
from tpuport.foundation.errors import UsageError

_VGG = "vgg16-397923af.pth of torchvision"
_HEADS = "the linear heads of LPIPS v0.1 for VGG (weights/v0.1/vgg.pth of the lpips package)"

# Convolutions of each slice by their index in torchvision's `features`, and the channels.
_SLICES = ((0, 2), (5, 7), (10, 12, 14), (17, 19, 21), (24, 26, 28))
_CHANNELS = (64, 128, 256, 512, 512)
_SLICE_OF = {index: number for number, indices in enumerate(_SLICES, start=1) for index in indices}
_EPSILON = 1e-10


class LPIPS(nn.Module):
    """Distances of image pairs, with the names of weights that the published files have.

    It has random weights until a state dict is loaded, is in evaluation mode, and is frozen.

    Args:
        seed: Seed of the random weights.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.scaling_layer = _Scaling()
        self.net = _VGG16()
        for number, channels in enumerate(_CHANNELS):
            self.add_module(f"lin{number}", _Head(channels))
        randomise(self, seed)
        with torch.no_grad():
            for number in range(len(_CHANNELS)):  # published heads are not negative
                self.get_submodule(f"lin{number}").model[1].weight.abs_()
        self.requires_grad_(False).eval()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the distance of each pair, (B,).

        Args:
            x: (B, 3, H, W). The published weights were fitted to values in [-1, 1]; upstream gives
                values in [0, 1].
            y: (B, 3, H, W).
        """
        first = self.net(self.scaling_layer(x))
        second = self.net(self.scaling_layer(y))
        total = torch.zeros(len(x), dtype=x.dtype, device=x.device)
        for number, (a, b) in enumerate(zip(first, second, strict=True)):
            squares = (_unit(a) - _unit(b)) ** 2
            total = total + self.get_submodule(f"lin{number}")(squares).mean((1, 2, 3))
        return total


def load_lpips(
    vgg: str | Path | None,
    heads: str | Path | None,
    *,
    say: Callable[[str], None],
    seed: int = 0,
) -> LPIPS:
    """Return LPIPS with published weights, or with random ones, which is said.

    Args:
        vgg: torchvision's file of VGG16.
        heads: File of the linear heads, or one that has both.
        say: Prints a line.
        seed: Seed of the random weights.

    Raises:
        UsageError: A file is not there, or only one of two was given.
        CheckpointError: A file is damaged or holds something else.
    """
    model = LPIPS(seed)
    if vgg is None and heads is None:
        say_random("LPIPS", say)
        return model
    if heads is None:
        raise UsageError(f"LPIPS has its VGG16, and no heads. What to do: give {_HEADS} as well")
    weights = {**model.scaling_layer.state_dict(prefix="scaling_layer.")}
    for path, what in ((vgg, _VGG), (heads, _HEADS)):
        if path is not None:
            weights |= dict(map(_own_name, read_published(path, what).items()))
    weights = {name: value for name, value in weights.items() if name}
    load_exactly(
        model, weights, " and ".join(str(p) for p in (vgg, heads) if p), f"{_VGG}, {_HEADS}"
    )
    return model


def _own_name(item: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    """Return a published weight by the name that `LPIPS` has for it, or by "" if it has none."""
    name, value = item
    if name.startswith(("classifier.", "lins.")):  # ImageNet's classes; a second name of the heads
        return "", value
    if name.startswith("features."):
        index = int(name.split(".")[1])
        return f"net.slice{_SLICE_OF.get(index, 0)}.{name.removeprefix('features.')}", value
    return name, value


class _Scaling(nn.Module):
    """Normalise [-1, 1] to the mean and deviation of ImageNet."""

    shift: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, values in (("shift", (-0.030, -0.088, -0.188)), ("scale", (0.458, 0.448, 0.450))):
            self.register_buffer(name, torch.tensor(values)[None, :, None, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.shift) / self.scale


class _VGG16(nn.Module):
    """VGG16 to its fifth block, before each pooling but the first of a slice."""

    def __init__(self) -> None:
        super().__init__()
        width, layer = 3, 0
        for number, (indices, channels) in enumerate(zip(_SLICES, _CHANNELS, strict=True), start=1):
            layers = nn.Sequential()
            if number > 1:
                layers.add_module(str(layer), nn.MaxPool2d(2, 2))
            for index in indices:
                layers.add_module(str(index), nn.Conv2d(width, channels, 3, padding=1))
                layers.add_module(str(index + 1), nn.ReLU())
                width = channels
            layer = indices[-1] + 2
            self.add_module(f"slice{number}", layers)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for number in range(1, len(_SLICES) + 1):
            x = self.get_submodule(f"slice{number}")(x)
            found.append(x)
        return found


class _Head(nn.Module):
    """A non-negative weight for each channel. The dropout is there for the names of weights."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Dropout(), nn.Conv2d(channels, 1, 1, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Divide by the length over channels.

    The length of a pixel where no channel is active is 0, and the slope of its root infinite: eager
    LPIPS has a NaN gradient there. Here it is 0, and the value is the same.
    """
    squares = (x**2).sum(dim=1, keepdim=True)
    active = squares > 0
    length = torch.where(active, torch.where(active, squares, 1.0).sqrt(), 0.0)
    return x / (length + _EPSILON)
