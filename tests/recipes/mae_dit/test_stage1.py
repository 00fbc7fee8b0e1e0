"""A step of stage 1 is eager PyTorch's: losses, weights, buffers, averages, both optimizers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from recipes.mae_dit.config import load
from recipes.mae_dit.discriminator import augment, make_discriminator
from recipes.mae_dit.losses import Stage1, active_in, gan_of
from recipes.mae_dit.models import Autoencoder, make_autoencoder
from recipes.mae_dit.stage1 import GeneratorOnly, Stage1Steps
from tests.recipes.mae_dit.eager import Features, Small, batches_of, eager
from tpuport.foundation.errors import UsageError
from tpuport.training import Checkpoints


def modules_of(config: Any, *, batch_norm: bool) -> Stage1:
    torch.manual_seed(0)
    gan = gan_of(config)
    judge: nn.Module = make_discriminator(gan.disc.arch)
    if batch_norm:  # without a bias before it, whose gradient is rounding only
        judge = nn.Sequential(
            nn.Conv2d(3, 4, 4, 2, bias=False), nn.BatchNorm2d(4), nn.LeakyReLU(), nn.Conv2d(4, 1, 3)
        )
    return Stage1(Autoencoder(Small()), judge, Features(), gan)


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
    expected = eager(modules, config, epochs, batches)
    steps = Stage1Steps(modules, config, 2)
    state = steps.of(0).init()
    assert isinstance(steps.of(0), GeneratorOnly)
    for epoch, batch, wanted in zip(epochs, batches, expected.losses, strict=True):
        state, metrics = steps.of(epoch)(state, batch)
        got = torch.tensor([float(metrics[f"generator/{name}"]) for name in NAMES])
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    assert all(steps.of(epoch).retraces == 0 for epoch in epochs)
    trained: Any = steps.of(2).load_state(state).to_torch()
    for name, value in expected.modules.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    averaged: Any = steps.of(2).load_state(state, ema=True).to_torch()
    for name, value in expected.averages.items():
        got = averaged.model.state_dict()[name]
        torch.testing.assert_close(got, value, rtol=1e-4, atol=1e-6)
    for name, optimizer in zip(("generator", "discriminator"), expected.optimizers, strict=True):
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
    with pytest.raises(UsageError, match=r"gan\.disc\.arch\.use_vit"):
        make_discriminator(load(file, ["gan.disc.arch.use_vit=true"]).gan.disc.arch)  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="disc_upd_start"):
        active_in(gan_of(load(file, ["gan.loss.disc_upd_start=9"])), 0)
    with pytest.raises(UsageError, match="disc_loss"):
        gan_of(load(file, ["gan.loss.disc_loss=huber"]))
    for key in ("ckpt_path", "stage_1.ckpt_path"):
        with pytest.raises(UsageError, match=rf"arch\.{key}: a\.pt is not there.*{key}=null"):
            make_autoencoder(load(file, [f"arch.{key}=a.pt"]))
