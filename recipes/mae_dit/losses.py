"""The losses of stage 1: reconstruction, perception, and a discriminator of its own optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recipes.mae_dit.config import Config, Gan
from recipes.mae_dit.discriminator import DRAWS, LOSSES, augment, generator_loss
from tpuport.foundation.errors import UsageError

_LARGEST_WEIGHT = 1e4
Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Active:
    """Which losses an epoch has.

    Attributes:
        perceptual: Whether the perceptual distance counts.
        adversarial: Whether the discriminator's opinion counts.
        discriminator: Whether the discriminator is trained.
    """

    perceptual: bool
    adversarial: bool
    discriminator: bool


def gan_of(config: Config) -> Gan:
    """Return the section of the discriminator.

    Raises:
        UsageError: There is none, or a loss is unknown.
    """
    if config.gan is None or config.gan.disc.optimizer is None:
        raise UsageError("gan: stage 1 needs this section with disc.arch, disc.optimizer and loss")
    loss = config.gan.loss
    if loss.disc_loss not in LOSSES or loss.gen_loss != "vanilla":
        raise UsageError(
            f"gan.loss: disc_loss={loss.disc_loss!r}, gen_loss={loss.gen_loss!r}: expected"
            f" {' or '.join(LOSSES)}, and vanilla"
        )
    return config.gan


def active_in(gan: Gan, epoch: int) -> Active:
    """Return the losses of an epoch, counted from 0."""
    loss = gan.loss
    trained = loss.disc_start if loss.disc_upd_start is None else loss.disc_upd_start
    if trained > loss.disc_start:
        raise UsageError(
            f"gan.loss.disc_upd_start={trained}: the discriminator cannot count (disc_start="
            f"{loss.disc_start}) before it is trained"
        )
    perceptual = loss.perceptual_weight > 0 and epoch >= loss.lpips_start
    return Active(perceptual, epoch >= loss.disc_start, epoch >= trained)


class Stage1(nn.Module):
    """All modules of a step.

    Args:
        model: An `Autoencoder`.
        discriminator: Gives a logit for each patch of images in [-1, 1].
        perceptual: Gives distances (B,) of images. As in upstream, they are in [0, 1].
        gan: The weights of the losses.
    """

    def __init__(
        self, model: nn.Module, discriminator: nn.Module, perceptual: nn.Module, gan: Gan
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.discriminator: Any = discriminator
        self.perceptual: Any = perceptual.requires_grad_(False).eval()
        self._gan = gan
        self.between_steps()

    def between_steps(self) -> None:
        """Set the modes that modules have before and after a step."""
        self.model.train()
        self.discriminator.train()
        self.perceptual.eval()

    def generator(self, batch: Batch, active: Active) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the loss of the autoencoder, and its terms."""
        try:
            return self._generator(batch["image"], batch.get("draws"), active)
        finally:
            self.between_steps()

    def _generator(
        self, images: torch.Tensor, draws: torch.Tensor | None, active: Active
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        loss, zero = self._gan.loss, torch.zeros(())
        self.discriminator.eval()
        made, own = self.model(images)
        seen = self.perceptual(images, made).mean() if active.perceptual else zero
        fooled, weight = zero, zero
        if active.adversarial:
            fake = augment(made * 2 - 1, _draws(draws, images, 0))
            fooled = generator_loss(self.discriminator(fake))
            likelihood = own["loss_recon"] + loss.perceptual_weight * seen
            weight = adaptive_weight(likelihood, fooled, self.model.get_last_layer())
        total = own["loss_total"] + loss.perceptual_weight * seen
        total = (total + weight * loss.disc_weight * fooled).reshape(())
        metrics = {
            "recon": own["loss_recon"],
            "latent": own["loss_latent"],
            "perceptual": seen,
            "adversarial": fooled,
            "weight_of_it": weight,
        }
        return total, {name: value.detach().reshape(()) for name, value in metrics.items()}

    def discriminate(self, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the loss of the discriminator, and how well it tells images apart."""
        try:
            return self._discriminate(batch["image"], batch.get("draws"))
        finally:
            self.between_steps()

    def _discriminate(
        self, images: torch.Tensor, draws: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        loss = self._gan.loss
        made = self._fake(images, draws)
        true = augment(images * 2 - 1, _draws(draws, images, 1))
        fake = self.discriminator(made)
        real = self.discriminator(true)
        told = (real > fake).float().mean()
        metrics = {"real": real.detach().mean(), "fake": fake.detach().mean(), "accuracy": told}
        return LOSSES[loss.disc_loss](real, fake) * loss.disc_weight, metrics

    def _fake(self, images: torch.Tensor, draws: torch.Tensor | None) -> torch.Tensor:
        """Return what the discriminator sees first: reconstructions as picture files have them."""
        self.model.eval()
        with torch.no_grad():
            made = (self.model(images)[0] * 2 - 1).clamp(-1, 1)
            made = torch.round((made + 1) / 2 * 255) / 255 * 2 - 1
        return augment(made, _draws(draws, images, 2))

    def reconstructed(self, images: torch.Tensor) -> torch.Tensor:
        """Return images, encoded and decoded, in [0, 1]."""
        self.model.eval()
        try:
            with torch.no_grad():
                return self.model.decode(self.model.encode(images)).clamp(0, 1)
        finally:
            self.between_steps()

    def first_scales(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return what reconstructions make of the discriminator's `ActNorm`s, by full names."""
        try:
            made = self._fake(batch["image"], batch.get("draws"))
            found = self.discriminator.first_scales(made)
        finally:
            self.between_steps()
        return {f"discriminator.{name}": value for name, value in found.items()}


def adaptive_weight(
    likelihood: torch.Tensor, adversarial: torch.Tensor, last_layer: torch.Tensor
) -> torch.Tensor:
    """Return the weight with which two losses change the last layer as much."""
    sizes = [
        torch.autograd.grad(loss, last_layer, retain_graph=True)[0].norm()
        for loss in (likelihood, adversarial)
    ]
    return (sizes[0] / (sizes[1] + 1e-6)).clamp(0.0, _LARGEST_WEIGHT).detach()


def _draws(given: torch.Tensor | None, images: torch.Tensor, number: int) -> torch.Tensor:
    """Return the numbers of one call of `augment`: drawn, or of the batch (B, 3, 7)."""
    return torch.rand(len(images), DRAWS) if given is None else given[:, number]
