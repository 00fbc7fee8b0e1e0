"""The discriminator of stage 1, its losses, and the changes of images before it."""

import torch
import torch.nn.functional as F
from torch import nn

from recipes.mae_dit.config import DiscriminatorArch
from tpuport.foundation.errors import UsageError

# Numbers that `augment` needs per image.
DRAWS = 7
_SHIFT, _CUTOUT = 0.125, 0.2


class PatchGAN(nn.Module):
    """A convolutional discriminator of patches, with the names of upstream's state dict."""

    def __init__(self, channels: int = 3, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        parts: list[nn.Module] = [nn.Conv2d(channels, width, 4, 2, 1), nn.LeakyReLU(0.2)]
        before = width
        for number in range(1, layers + 1):
            after = width * min(2**number, 8)
            stride = 2 if number < layers else 1
            parts += [nn.Conv2d(before, after, 4, stride, 1), nn.InstanceNorm2d(after)]
            parts.append(nn.LeakyReLU(0.2))
            before = after
        parts.append(nn.Conv2d(before, 1, 4, 1, 1))
        self.model = nn.Sequential(*parts)
        for part in parts:
            if isinstance(part, nn.Conv2d):
                nn.init.normal_(part.weight, 0.0, 0.02)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return a logit for each patch."""
        return self.model(images)


def make_discriminator(arch: DiscriminatorArch, seed: int = 0) -> PatchGAN:
    """Return the discriminator of a configuration.

    Raises:
        UsageError: It is of a kind that this recipe does not have.
    """
    for name in ("use_dino", "use_vit", "use_actnorm", "spectral_norm"):
        if getattr(arch, name):
            raise UsageError(
                f"gan.disc.arch.{name}: this recipe has the PatchGAN with instance norms only."
                f" What to do: --set gan.disc.arch.{name}=false"
            )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PatchGAN(arch.in_channels, arch.ndf, arch.num_layers)


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
