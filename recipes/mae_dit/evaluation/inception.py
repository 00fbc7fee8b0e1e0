"""The Inception network that FID is defined by: the graph of 2015, as pytorch-fid's file has it.

Its blocks differ from Inception v3 in their pooling: means leave the padding out, and the last
block takes a maximum. Szegedy et al. 2015 (arXiv:1512.00567), Heusel et al. 2017
(arXiv:1706.08500).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from recipes.mae_dit.evaluation.published import (
    load_exactly,
    randomise,
    read_published,
    say_random,
)

Preparation = Literal["pytorch", "tensorflow"]

FEATURES, CLASSES = 2048, 1008
SPATIAL_CHANNELS = 7
_SIZE = 299
_FILE = "pt_inception-2015-12-05-6726825d.pth of pytorch-fid"

# A convolution: its name, its channels, its kernel, its stride. Several in a place of a chain are
# put together.
_Conv = tuple[str, int, int | tuple[int, int], int]
_Chain = Sequence[_Conv | Sequence[_Conv]]


class Activations(NamedTuple):
    """What the network computes for images.

    Attributes:
        pool: (B, 2048), for FID and precision and recall.
        spatial: (B, 2023), 7 channels of each of 17 x 17 places, for sFID.
        logits: (B, 1008), for the Inception Score.
    """

    pool: torch.Tensor
    spatial: torch.Tensor
    logits: torch.Tensor


class FIDInception(nn.Module):
    """The network, with the names of weights of pytorch-fid's file.

    It has random weights until a state dict is loaded, is in evaluation mode, and is frozen.

    Args:
        seed: Seed of the random weights.
        preparation: How images are resized and scaled: as in pytorch-fid, or as in the graph
            itself, which ADM's evaluator runs. Statistics of the one are not for the other.
    """

    def __init__(self, seed: int = 0, preparation: Preparation = "pytorch") -> None:
        super().__init__()
        self.preparation: Preparation = preparation
        self.Conv2d_1a_3x3 = _ConvNorm(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = _ConvNorm(32, 32, 3)
        self.Conv2d_2b_3x3 = _ConvNorm(32, 64, 3, padding=1)
        self.Conv2d_3b_1x1 = _ConvNorm(64, 80, 1)
        self.Conv2d_4a_3x3 = _ConvNorm(80, 192, 3)
        self.Mixed_5b = _Mixed(192, _block_a(32))
        self.Mixed_5c = _Mixed(256, _block_a(64))
        self.Mixed_5d = _Mixed(288, _block_a(64))
        self.Mixed_6a = _Mixed(288, _BLOCK_B, "halve")
        self.Mixed_6b = _Mixed(768, _block_c(128))
        self.Mixed_6c = _Mixed(768, _block_c(160))
        self.Mixed_6d = _Mixed(768, _block_c(160))
        self.Mixed_6e = _Mixed(768, _block_c(192))
        self.Mixed_7a = _Mixed(768, _BLOCK_D, "halve")
        self.Mixed_7b = _Mixed(1280, _BLOCK_E)
        self.Mixed_7c = _Mixed(2048, _BLOCK_E, "max")
        self.fc = nn.Linear(FEATURES, CLASSES)
        randomise(self, seed)
        self.requires_grad_(False).eval()

    def forward(self, images: torch.Tensor) -> Activations:
        """Return what images (B, 3, H, W) with values in [0, 1] activate.

        Images are rounded to 8 bits first, as those that are read from files are.
        """
        x = _prepared((images.clamp(0, 1) * 255).round(), self.preparation)
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = F.max_pool2d(x, 3, stride=2)
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x))
        x = F.max_pool2d(x, 3, stride=2)
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x)))
        x = self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))
        # The graph calls it mixed_6/conv. Its places come before channels.
        places = (
            self.Mixed_6d.get_submodule("branch1x1")(x)[:, :SPATIAL_CHANNELS]
            .permute(0, 2, 3, 1)
            .flatten(1)
        )
        x = self.Mixed_6e(self.Mixed_6d(x))
        pool = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x))).mean((2, 3))
        return Activations(pool, places, self.fc(pool))


def load_inception(
    path: str | Path | None,
    *,
    say: Callable[[str], None],
    seed: int = 0,
    preparation: Preparation = "pytorch",
) -> FIDInception:
    """Return the network with pytorch-fid's weights, or with random ones, which is said.

    Args:
        path: pytorch-fid's file; None for random weights.
        say: Prints a line.
        seed: Seed of the random weights.
        preparation: As in `FIDInception`.

    Raises:
        UsageError: The file is not there.
        CheckpointError: It is damaged or holds something else.
    """
    model = FIDInception(seed, preparation)
    if path is None:
        say_random("The Inception network", say)
        return model
    weights = read_published(path, _FILE)
    for name, value in model.state_dict().items():  # the file is older than this counter
        if name.endswith("num_batches_tracked"):
            weights.setdefault(name, value)
    load_exactly(model, weights, str(path), _FILE)
    return model


def _prepared(pixels: torch.Tensor, preparation: Preparation) -> torch.Tensor:
    """Resize pixels of 0 to 255, and scale them to about [-1, 1]."""
    if preparation == "pytorch":
        size = (_SIZE, _SIZE)
        return 2 * F.interpolate(pixels / 255, size, mode="bilinear", align_corners=False) - 1
    rows, columns = (_left_aligned(n).to(pixels) for n in pixels.shape[-2:])
    return (rows @ pixels @ columns.T - 128) / 128


def _left_aligned(size: int) -> torch.Tensor:
    """Return the (299, size) matrix of TensorFlow's first bilinear resize.

    It takes a target's place times the ratio of sizes as the place in the source, and no half a
    pixel is added.
    """
    places = torch.arange(_SIZE) * (size / _SIZE)
    lower = places.floor().long()
    share = places - lower
    matrix = torch.zeros(_SIZE, size)
    rows = torch.arange(_SIZE)
    matrix[rows, lower] += 1 - share
    matrix[rows, (lower + 1).clamp(max=size - 1)] += share
    return matrix


class _ConvNorm(nn.Module):
    """A convolution without a bias, a batch norm, and a rectifier."""

    def __init__(
        self,
        width: int,
        channels: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, channels, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(channels, eps=0.001)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.bn(self.conv(x)))


class _Mixed(nn.Module):
    """Chains of convolutions side by side, and one behind a pooling.

    Args:
        width: Channels of the input.
        chains: The chains.
        pooling: "halve" gives half the size, by a maximum.
    """

    def __init__(
        self,
        width: int,
        chains: Sequence[_Chain],
        pooling: Literal["mean", "max", "halve"] = "mean",
    ) -> None:
        super().__init__()
        self.pooling = pooling
        self.names: list[list[list[str]]] = []
        for chain in chains:
            before, names = width, []
            for step in chain:
                together: Sequence[_Conv] = [step] if isinstance(step[0], str) else step  # pyright: ignore[reportAssignmentType]
                for name, channels, kernel, stride in together:
                    padding = 0 if stride == 2 else _half(kernel)
                    self.add_module(name, _ConvNorm(before, channels, kernel, stride, padding))
                names.append([conv[0] for conv in together])
                before = together[0][1]
            self.names.append(names)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for chain in self.names:
            h = self._pooled(x) if chain == [["branch_pool"]] else x
            for together in chain:
                results = [self.get_submodule(name)(h) for name in together]
                h = results[0] if len(results) == 1 else torch.cat(results, 1)
            found.append(h)
        return torch.cat([*found, self._pooled(x)] if self.pooling == "halve" else found, 1)

    def _pooled(self, x: torch.Tensor) -> torch.Tensor:
        if self.pooling == "mean":
            return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
        if self.pooling == "max":
            return F.max_pool2d(x, 3, stride=1, padding=1)
        return F.max_pool2d(x, 3, stride=2)


def _half(kernel: int | tuple[int, int]) -> int | tuple[int, int]:
    return kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)


def _block_a(pooled: int) -> Sequence[_Chain]:
    return (
        (("branch1x1", 64, 1, 1),),
        (("branch5x5_1", 48, 1, 1), ("branch5x5_2", 64, 5, 1)),
        (("branch3x3dbl_1", 64, 1, 1), ("branch3x3dbl_2", 96, 3, 1), ("branch3x3dbl_3", 96, 3, 1)),
        (("branch_pool", pooled, 1, 1),),
    )


_BLOCK_B: Sequence[_Chain] = (
    (("branch3x3", 384, 3, 2),),
    (("branch3x3dbl_1", 64, 1, 1), ("branch3x3dbl_2", 96, 3, 1), ("branch3x3dbl_3", 96, 3, 2)),
)


def _block_c(width: int) -> Sequence[_Chain]:
    wide, tall = (1, 7), (7, 1)
    return (
        (("branch1x1", 192, 1, 1),),
        (
            ("branch7x7_1", width, 1, 1),
            ("branch7x7_2", width, wide, 1),
            ("branch7x7_3", 192, tall, 1),
        ),
        (
            ("branch7x7dbl_1", width, 1, 1),
            ("branch7x7dbl_2", width, tall, 1),
            ("branch7x7dbl_3", width, wide, 1),
            ("branch7x7dbl_4", width, tall, 1),
            ("branch7x7dbl_5", 192, wide, 1),
        ),
        (("branch_pool", 192, 1, 1),),
    )


_BLOCK_D: Sequence[_Chain] = (
    (("branch3x3_1", 192, 1, 1), ("branch3x3_2", 320, 3, 2)),
    (
        ("branch7x7x3_1", 192, 1, 1),
        ("branch7x7x3_2", 192, (1, 7), 1),
        ("branch7x7x3_3", 192, (7, 1), 1),
        ("branch7x7x3_4", 192, 3, 2),
    ),
)
_BLOCK_E: Sequence[_Chain] = (
    (("branch1x1", 320, 1, 1),),
    (
        ("branch3x3_1", 384, 1, 1),
        (("branch3x3_2a", 384, (1, 3), 1), ("branch3x3_2b", 384, (3, 1), 1)),
    ),
    (
        ("branch3x3dbl_1", 448, 1, 1),
        ("branch3x3dbl_2", 384, 3, 1),
        (("branch3x3dbl_3a", 384, (1, 3), 1), ("branch3x3dbl_3b", 384, (3, 1), 1)),
    ),
    (("branch_pool", 192, 1, 1),),
)
