"""Stage 1 in a size for tests, and its steps by hand in eager PyTorch."""

import copy
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from recipes.mae_dit.losses import Stage1, active_in, gan_of
from recipes.mae_dit.models import Encodings, Reconstruction
from recipes.mae_dit.schedules import make_optimizer, make_schedule


class Small(nn.Module):
    """An autoencoder with upstream's interface, and batch norm between its halves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(3, 6, 4, 4, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.decoder = nn.ConvTranspose2d(6, 3, 4, 4)

    def encode(self, inputs: Any) -> Encodings:
        return Encodings(self.norm(self.encoder(inputs.img)).tanh())

    def decode(self, encodings: Any) -> Reconstruction:
        return Reconstruction(self.decoder(encodings.zs))

    def compute_loss(self, outputs: Any, inputs: Any) -> dict[str, torch.Tensor]:
        loss = (outputs.xs_recon - inputs.img).abs().mean()
        return {"loss_total": loss, "loss_recon": loss, "loss_latent": torch.zeros(1)}

    def get_last_layer(self) -> torch.Tensor:
        return self.decoder.weight


class Features(nn.Module):
    """A perceptual distance (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.net(x).relu() - self.net(y).relu()).square().mean((1, 2, 3))


def seeded_features() -> Features:
    """The same distance in each process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Features()


@dataclass
class Eager:
    """What steps by hand came to.

    Attributes:
        modules: The modules after them.
        optimizers: That of the autoencoder, and that of the discriminator.
        averages: The averaged weights.
        losses: The loss and its terms in each step.
        gradients: Those of all weights in each step, as the optimizers got them.
    """

    modules: Stage1
    optimizers: tuple[Any, Any]
    averages: dict[str, torch.Tensor]
    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)


def eager(modules: Stage1, config: Any, epochs: list[int], batches: list[Any]) -> Eager:
    """Take the same steps by hand, as scripts have them."""
    modules, gan = copy.deepcopy(modules), gan_of(config)
    assert gan.disc.optimizer is not None
    first = make_optimizer(modules.model.parameters(), config.optimizer)
    second = make_optimizer(modules.discriminator.parameters(), gan.disc.optimizer)
    rates = [make_schedule(first, config.optimizer, 2, 3)]
    rates.append(make_schedule(second, gan.disc.optimizer, 2, 3 - gan.loss.disc_start))
    ema = {n: p.detach().clone() for n, p in modules.model.named_parameters()}
    done = Eager(modules, (first, second), ema)
    parts = config.experiment.accu_step
    for epoch, batch in zip(epochs, batches, strict=True):
        active = active_in(gan, epoch)
        pieces = [
            dict(zip(batch, cut, strict=True))
            for cut in zip(*[v.chunk(parts) for v in batch.values()], strict=True)
        ]
        modules.zero_grad()
        found = []
        for piece in pieces:
            loss, terms = modules.generator(piece, active)
            (loss / parts).backward()
            found.append([loss.item(), *(t.item() for t in terms.values())])
        nn.utils.clip_grad_norm_(modules.model.parameters(), config.optimizer.clip_grad_norm)
        gradients = _gradients(modules.model, "model.")
        first.step()
        rates[0].step()
        for name, p in modules.model.named_parameters():
            ema[name].mul_(0.9).add_(p.detach(), alpha=1 - 0.9)
        modules.zero_grad()
        if active.discriminator:
            for piece in pieces:
                (modules.discriminate(piece)[0] / parts).backward()
            gradients |= _gradients(modules.discriminator, "discriminator.")
            second.step()
            rates[1].step()
        done.losses.append(torch.tensor(found).mean(0))
        done.gradients.append(gradients)
    return done


def _gradients(module: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    found = {f"{prefix}{n}": p.grad for n, p in module.named_parameters()}
    return {name: value.clone() for name, value in found.items() if value is not None}


def momenta(state: Any) -> dict[str, torch.Tensor]:
    """Return the momenta of SGD by weight, of both optimizers of a state."""
    paths = jax.tree_util.tree_flatten_with_path(state.optimizer)[0]
    return {path[-1].key: torch.from_numpy(np.array(value)) for path, value in paths if value.ndim}


def batches_of(count: int) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        {
            "image": torch.rand(4, 3, 16, 16, generator=g),
            "draws": torch.rand(4, 3, 7, generator=g),
        }
        for _ in range(count)
    ]
