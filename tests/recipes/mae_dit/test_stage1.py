"""A step of stage 1 is eager PyTorch's: losses, weights, buffers, averages, both optimizers."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from recipes.mae_dit.config import load
from recipes.mae_dit.discriminator import augment, make_discriminator
from recipes.mae_dit.losses import Stage1, active_in, gan_of
from recipes.mae_dit.models import Autoencoder, Encodings, Reconstruction, make_autoencoder
from recipes.mae_dit.schedules import make_optimizer, make_schedule
from recipes.mae_dit.stage1 import GeneratorOnly, Stage1Steps
from tpuport.foundation.errors import UsageError
from tpuport.training import Checkpoints


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


def modules_of(config: Any, *, batch_norm: bool) -> Stage1:
    torch.manual_seed(0)
    gan = gan_of(config)
    judge: nn.Module = make_discriminator(gan.disc.arch)
    if batch_norm:  # without a bias before it, whose gradient is rounding only
        judge = nn.Sequential(
            nn.Conv2d(3, 4, 4, 2, bias=False), nn.BatchNorm2d(4), nn.LeakyReLU(), nn.Conv2d(4, 1, 3)
        )
    return Stage1(Autoencoder(Small()), judge, Features(), gan)


def eager(modules: Stage1, config: Any, epochs: list[int], batches: list[Any]) -> Any:
    """The same steps by hand, as scripts have them. Returns modules, optimizers, and averages."""
    modules, gan = copy.deepcopy(modules), gan_of(config)
    assert gan.disc.optimizer is not None
    first = make_optimizer(modules.model.parameters(), config.optimizer)
    second = make_optimizer(modules.discriminator.parameters(), gan.disc.optimizer)
    rates = [make_schedule(first, config.optimizer, 2, 3)]
    rates.append(make_schedule(second, gan.disc.optimizer, 2, 3 - gan.loss.disc_start))
    ema = {n: p.detach().clone() for n, p in modules.model.named_parameters()}
    parts, losses = config.experiment.accu_step, []
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
        first.step()
        rates[0].step()
        for name, p in modules.model.named_parameters():
            ema[name].mul_(0.9).add_(p.detach(), alpha=1 - 0.9)
        modules.zero_grad()
        if active.discriminator:
            for piece in pieces:
                (modules.discriminate(piece)[0] / parts).backward()
            second.step()
            rates[1].step()
        losses.append(torch.tensor(found).mean(0))
    return modules, (first, second), ema, losses


def batches_of(count: int) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        {
            "image": torch.rand(4, 3, 16, 16, generator=g),
            "draws": torch.rand(4, 3, 7, generator=g),
        }
        for _ in range(count)
    ]


NAMES = ("loss", "recon", "latent", "perceptual", "adversarial", "weight_of_it")


@pytest.mark.parametrize(
    ("parts", "batch_norm", "loss"), [(1, False, "hinge"), (2, True, "vanilla")]
)
def test_steps_are_those_of_torch(file, parts, batch_norm, loss):
    """Two steps of the perceptual loss alone, one with a discriminator, two with its opinion."""
    # Adam makes rounding large in gradients that are zero, as those of biases before norms are.
    kind = "adamw" if batch_norm else "sgd"
    given = [f"gan.disc.optimizer.type={kind}", f"gan.loss.disc_loss={loss}"]
    config = load(file, [f"experiment.accu_step={parts}", *given])
    modules = modules_of(config, batch_norm=batch_norm)
    epochs, batches = [0, 0, 1, 2, 2], batches_of(5)
    expected, optimizers, ema, losses = eager(modules, config, epochs, batches)
    steps = Stage1Steps(modules, config, 2)
    state = steps.of(0).init()
    assert isinstance(steps.of(0), GeneratorOnly)
    for epoch, batch, wanted in zip(epochs, batches, losses, strict=True):
        state, metrics = steps.of(epoch)(state, batch)
        got = torch.tensor([float(metrics[f"generator/{name}"]) for name in NAMES])
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    assert all(steps.of(epoch).retraces == 0 for epoch in epochs)
    trained: Any = steps.of(2).load_state(state).to_torch()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    averaged: Any = steps.of(2).load_state(state, ema=True).to_torch()
    for name, value in ema.items():
        got = averaged.model.state_dict()[name]
        torch.testing.assert_close(got, value, rtol=1e-4, atol=1e-6)
    for name, optimizer in zip(("generator", "discriminator"), optimizers, strict=True):
        if isinstance(optimizer, torch.optim.SGD):
            continue
        moments = [s["exp_avg_sq"] for s in optimizer.state.values()]
        assert float(sum(m.sum() for m in moments)) == pytest.approx(
            _sum_of(state.optimizer[name], "nu"), rel=1e-4
        )


def _sum_of(state: Any, part: str) -> float:
    import jax

    paths = jax.tree_util.tree_flatten_with_path(state)[0]
    return float(sum(v.sum() for path, v in paths if f".{part}" in jax.tree_util.keystr(path)))


def test_a_state_of_both_is_saved_and_gone_on_with(file, tmp_path):
    config = load(file)
    steps = Stage1Steps(modules_of(config, batch_norm=True), config, 2)
    one, two, three = batches_of(3)
    state, _ = steps.of(0)(steps.of(0).init(), one)
    state, _ = steps.of(2)(state, two)
    with Checkpoints(tmp_path) as saved:
        saved.save(state)
    with Checkpoints(tmp_path) as saved:
        found = saved.restore(steps.of(2).init())
    assert found is not None
    import jax
    import numpy as np

    ends = [steps.of(2)(begun, three)[0] for begun in (state, found.state)]
    jax.tree.map(np.testing.assert_array_equal, *[replace(e, key=e.step) for e in ends])


def test_augmentation_cuts_and_shifts():
    images = torch.ones(3, 3, 16, 16)
    still = torch.full((3, 7), 0.5)
    found = augment(images, still)
    assert found.shape == images.shape
    assert int((found[0, 0] == 0).sum()) == 9  # a fifth of 16 pixels is 3
    shifted = augment(images, torch.tensor([[0.0, 0.5, 0.5, 0.5, 0.5, 0.99, 0.99]] * 3))
    assert (shifted[:, :, :2].std(dim=(2, 3)) < 1e-6).all()  # two rows from outside
    assert not torch.equal(shifted, found)


def test_what_is_not_here_is_refused(file):
    with pytest.raises(UsageError, match=r"gan\.disc\.arch\.use_dino"):
        make_discriminator(load(file, ["gan.disc.arch.use_dino=true"]).gan.disc.arch)  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="disc_upd_start"):
        active_in(gan_of(load(file, ["gan.loss.disc_upd_start=9"])), 0)
    with pytest.raises(UsageError, match="disc_loss"):
        gan_of(load(file, ["gan.loss.disc_loss=huber"]))
    for key in ("ckpt_path", "stage_1.ckpt_path"):
        with pytest.raises(UsageError, match=rf"arch\.{key}: a\.pt is not there.*{key}=null"):
            make_autoencoder(load(file, [f"arch.{key}=a.pt"]))
