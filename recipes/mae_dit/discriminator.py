"""The discriminator of stage 1, its losses, and the changes of images before it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from recipes.mae_dit import dino
from recipes.mae_dit.config import DiscriminatorArch
from recipes.mae_dit.evaluation.published import say_random
from recipes.mae_dit.spectral import SpectralConv2d
from tpuport.foundation.errors import UsageError

# Numbers that `augment` needs per image.
DRAWS = 7
_SHIFT, _CUTOUT = 0.125, 0.2


class ActNorm(nn.Module):
    """A shift and a scale of each channel (Kingma & Dhariwal 2018, arXiv:1807.03039).

    The first images of training give them channels of mean 0 and variance 1: see
    `PatchGAN.first_scales`. Until then it changes nothing.
    """

    initialized: torch.Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.scale = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return images (B, C, H, W), shifted and scaled."""
        return self.scale * (x + self.loc)


class PatchGAN(nn.Module):
    """A convolutional discriminator of patches, with the names of upstream's state dict.

    Args:
        channels: Channels of images.
        width: Channels of the first convolution.
        layers: Convolutions with a norm.
        actnorm: Whether norms are `ActNorm`, else instance norms.
        spectral: Whether convolutions have spectral norms.
    """

    def __init__(
        self,
        channels: int = 3,
        width: int = 64,
        layers: int = 3,
        *,
        actnorm: bool = False,
        spectral: bool = False,
    ) -> None:
        super().__init__()
        conv = SpectralConv2d if spectral else nn.Conv2d
        parts: list[nn.Module] = [conv(channels, width, 4, 2, 1), nn.LeakyReLU(0.2)]
        before = width
        for number in range(1, layers + 1):
            after = width * min(2**number, 8)
            stride = 2 if number < layers else 1
            parts.append(conv(before, after, 4, stride, 1, bias=not actnorm))
            parts.append(ActNorm(after) if actnorm else nn.InstanceNorm2d(after))
            parts.append(nn.LeakyReLU(0.2))
            before = after
        parts.append(conv(before, 1, 4, 1, 1))
        self.model = nn.Sequential(*parts)
        for name, weight in self.named_parameters():
            if name.endswith(("weight", "weight_orig")):
                nn.init.normal_(weight, 0.0, 0.02)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return a logit for each patch."""
        return self.model(images)

    def first_scales(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what images make of each `ActNorm`, by the names of its parameters.

        Each one sees what the ones before it give with these parameters.
        """
        found: dict[str, torch.Tensor] = {}
        for number, part in enumerate(self.model):
            if isinstance(part, ActNorm):
                std, mean = torch.std_mean(images, (0, 2, 3), keepdim=True)
                shift, scale = -mean, 1 / (std + 1e-6)
                found |= {f"model.{number}.loc": shift, f"model.{number}.scale": scale}
                images = scale * (images + shift)
            else:
                images = part(images)
        return found


def make_discriminator(
    arch: DiscriminatorArch, seed: int = 0, say: Callable[[str], Any] = print
) -> nn.Module:
    """Return the discriminator of a configuration.

    Args:
        arch: Its section of the configuration.
        seed: Seed of the random weights.
        say: Prints a line, if a network that is published has random weights.

    Raises:
        UsageError: It is of a kind that this recipe does not have, or a file is not there.
        CheckpointError: A file of weights is damaged or of another network.
    """
    if arch.use_vit:
        raise UsageError(
            "gan.disc.arch.use_vit: this recipe has the PatchGAN and the heads on DINO only, and"
            " no trainer of upstream reads this key. What to do: --set gan.disc.arch.use_vit=false"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if arch.use_dino:
            return _with_dino(arch, seed, say)
        return PatchGAN(
            arch.in_channels,
            arch.ndf,
            arch.num_layers,
            actnorm=arch.use_actnorm,
            spectral=arch.spectral_norm,
        )


def _with_dino(arch: DiscriminatorArch, seed: int, say: Callable[[str], Any]) -> nn.Module:
    if arch.recipe not in dino.SIZES:
        raise UsageError(
            f"gan.disc.arch.recipe={arch.recipe!r}: expected one of {', '.join(dino.SIZES)}"
        )
    made = dino.DinoDiscriminator(dino.SIZES[arch.recipe], arch.ks, arch.norm_type, seed)
    if arch.dino_ckpt_path is None:
        say_random("The DINO of the discriminator", say)
    else:
        dino.load_dino(made.dino, arch.dino_ckpt_path)
    return made


def generator_loss(fake: torch.Tensor) -> torch.Tensor:
    """Return the loss of the generator: what it makes shall look real."""
    return -fake.mean()


def hinge_loss(real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """Return the hinge loss of the discriminator."""
    return 0.5 * (F.relu(1 - real).mean() + F.relu(1 + fake).mean())


def vanilla_loss(real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """Return the logistic loss of the discriminator."""
    return 0.5 * (F.softplus(-real).mean() + F.softplus(fake).mean())


LOSSES = {"hinge": hinge_loss, "vanilla": vanilla_loss}


def augment(images: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Shift, recolour and cut images (B, C, H, W) as DiffAug does.

    Args:
        images: Images in [-1, 1].
        draws: Uniform numbers (B, 7): shifts, brightness, saturation, contrast, places of cuts.
    """
    height, width = images.shape[-2:]
    rows, columns, *colour, up, left = (one[:, None] for one in draws.unbind(1))
    images = _shifted(images, rows, columns)
    brightness, saturation, contrast = (one[..., None, None] for one in colour)
    images = images + (brightness - 0.5)
    mean = images.mean(1, keepdim=True)
    images = (images - mean) * (saturation * 2) + mean
    mean = images.mean((1, 2, 3), keepdim=True)
    images = (images - mean) * (contrast + 0.5) + mean
    cut_rows, cut_columns = _cut(up, height), _cut(left, width)
    kept = ~(cut_rows[:, :, None] & cut_columns[:, None, :])
    return images * kept[:, None].to(images.dtype)


def _shifted(images: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Shift each image by up to an eighth of its size, with zeros beyond its edges."""
    padded = F.pad(images, (1, 1, 1, 1))
    from_rows = _places(rows, images.shape[2])[:, None, :, None]
    from_columns = _places(columns, images.shape[3])[:, None, None, :]
    batch, channels, height, width = padded.shape
    taken = padded.gather(2, from_rows.expand(batch, channels, height - 2, width))
    return taken.gather(3, from_columns.expand(batch, channels, height - 2, width - 2))


def _places(draws: torch.Tensor, size: int) -> torch.Tensor:
    """Return which padded row each row comes from, (B, size)."""
    most = round(size * _SHIFT)
    shift = (draws * (2 * most + 1)).floor().long() - most
    return (torch.arange(size) + shift + 1).clamp(0, size + 1)


def _cut(draws: torch.Tensor, size: int) -> torch.Tensor:
    """Return which rows are cut, (B, size)."""
    length = round(size * _CUTOUT)
    first = (draws * (size + (1 - length % 2))).floor().long() - length // 2
    # Places beyond an edge cut the row at that edge, as upstream's do.
    first, last = first, first + length - 1
    place = torch.arange(size)
    return (place >= first.clamp(max=size - 1)) & (place <= last.clamp(min=0)) & (length > 0)
