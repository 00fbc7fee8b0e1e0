"""Discriminators: ActNorm, spectral norms and heads on DINO, in steps and by themselves."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import spectral_norm

from recipes.mae_dit import dino
from recipes.mae_dit.config import DiscriminatorArch, load
from recipes.mae_dit.discriminator import PatchGAN, make_discriminator
from recipes.mae_dit.losses import Stage1, gan_of
from recipes.mae_dit.models import Autoencoder
from recipes.mae_dit.spectral import SpectralConv1d, SpectralConv2d
from recipes.mae_dit.stage1 import Stage1Steps
from tests.recipes.mae_dit.eager import Features, Small, batches_of, eager, momenta
from tpuport.foundation.errors import CheckpointError, UsageError
from tpuport.training import Checkpoints

SIZE = dino.Size(patch=112, width=8, heads=2, depth=3)


class EagerNorm(nn.Module):
    """An ActNorm that takes its scales in its first call in training mode."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.scale = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not self.initialized:
            with torch.no_grad():
                rows = x.transpose(0, 1).flatten(1)
                self.loc.copy_(-rows.mean(1).reshape(self.loc.shape))
                self.scale.copy_(1 / (rows.std(1).reshape(self.loc.shape) + 1e-6))
                self.initialized.fill_(1)  # type: ignore[operator]
        return self.scale * (x + self.loc)


class EagerPatches(nn.Module):
    """The PatchGAN of torch's own spectral norms and of `EagerNorm`."""

    def __init__(self, own: PatchGAN) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for part in own.model:
            if isinstance(part, SpectralConv2d):
                sizes = (part.in_channels, part.out_channels, part.kernel_size, part.stride)
                bias = part.bias is not None
                parts.append(spectral_norm(nn.Conv2d(*sizes, padding=part.padding, bias=bias)))  # type: ignore[arg-type]
            elif hasattr(part, "loc"):
                parts.append(EagerNorm(part.loc.shape[1]))  # type: ignore[union-attr, arg-type]
            else:
                parts.append(copy.deepcopy(part))
        self.model = nn.Sequential(*parts)
        self.load_state_dict(own.state_dict())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images)


CASES = {
    "actnorm and spectral norm": ["use_actnorm=true", "spectral_norm=true"],
    "dino": ["use_dino=true", "ks=3"],
}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_torch(file: Path, tmp_path: Path, case: str, monkeypatch: Any):
    """Losses, each weight's gradient, both optimizers and all buffers, over three steps."""
    monkeypatch.setitem(dino.SIZES, "S_16", SIZE)
    parts = 2 if case != "dino" else 1
    given = [f"gan.disc.arch.{one}" for one in CASES[case]]
    given += ["gan.disc.optimizer.type=sgd", "optimizer.type=sgd", "optimizer.weight_decay=0"]
    given += ["gan.disc.optimizer.weight_decay=0", f"experiment.accu_step={parts}"]
    config = load(file, given)
    gan = gan_of(config)
    torch.manual_seed(0)
    judge: Any = make_discriminator(gan.disc.arch, say=lambda _: None)
    modules = Stage1(Autoencoder(Small()), judge, Features(), gan)
    reference = copy.deepcopy(modules)
    if isinstance(judge, PatchGAN):
        reference.discriminator = EagerPatches(judge)
    epochs, batches = [2, 2, 2], batches_of(3)
    expected = eager(reference, config, epochs, batches)
    steps = Stage1Steps(modules, config, 2)
    state = steps.of(2).init()
    before: dict[str, torch.Tensor] = {}
    names = ("loss", "recon", "latent", "perceptual", "adversarial", "weight_of_it")
    for number, batch in enumerate(batches):
        if number == 2 and case != "dino":  # as a run that was begun again
            with Checkpoints(tmp_path / "states") as saved:
                saved.save(state)
            with Checkpoints(tmp_path / "states") as saved:
                restored = saved.restore(steps.of(2).init())
            assert restored is not None
            state = restored.state
        state, metrics = steps.of(2)(state, batch)
        got = torch.tensor([float(metrics[f"generator/{name}"]) for name in names])
        torch.testing.assert_close(got, expected.losses[number], rtol=1e-4, atol=1e-6)
        after = momenta(state)
        assert after.keys() == expected.gradients[number].keys()
        for name, gradient in expected.gradients[number].items():
            found = after[name] - 0.9 * before[name] if before else after[name]
            scale = max(float(gradient.abs().max()), 1e-3)
            torch.testing.assert_close(found, gradient, rtol=0, atol=1e-4 * scale, msg=name)
        before = after
    trained: Any = steps.of(2).load_state(state).to_torch()
    for name, value in expected.modules.state_dict().items():
        torch.testing.assert_close(
            trained.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name
        )
    for optimizer, module in zip(
        expected.optimizers, (expected.modules.model, expected.modules.discriminator), strict=True
    ):
        prefix = "model." if module is expected.modules.model else "discriminator."
        for name, parameter in module.named_parameters():
            if parameter in optimizer.state:
                wanted = optimizer.state[parameter]["momentum_buffer"]
                scale = max(float(wanted.abs().max()), 1e-3)
                torch.testing.assert_close(before[prefix + name], wanted, rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize("dims", [1, 2])
def test_a_spectral_norm_is_torchs(dims: int):
    """Two calls in training and one in evaluation; the gradient is of both."""
    torch.manual_seed(0)
    own = (SpectralConv1d, SpectralConv2d)[dims - 1](3, 5, 3, padding=1)
    theirs = spectral_norm((nn.Conv1d, nn.Conv2d)[dims - 1](3, 5, 3, padding=1))
    theirs.load_state_dict(own.state_dict())
    inputs = [torch.randn(2, 3, *[6] * dims) for _ in range(3)]
    found = []
    for module in (own, theirs):
        total = module(inputs[0]).square().sum() + module(inputs[1]).sin().sum()
        total.backward()
        value = module.eval()(inputs[2])
        found.append([total, value, module.weight_orig.grad, *module.state_dict().values()])
    assert own.state_dict().keys() == theirs.state_dict().keys()
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


# test_steps_are_those_of_torch takes the scales, and goes on with a state that has them.
@pytest.mark.slow
def test_scales_are_taken_once(file: Path):
    """A state that has them keeps them, and steps that train no discriminator take none."""
    config = load(file, ["gan.disc.arch.use_actnorm=true"])
    torch.manual_seed(0)
    judge = make_discriminator(gan_of(config).disc.arch)
    steps = Stage1Steps(Stage1(Autoencoder(Small()), judge, Features(), gan_of(config)), config, 2)
    flag, name = "discriminator.model.3.initialized", "discriminator.model.3.loc"
    one, two = batches_of(2)
    state, _ = steps.of(0)(steps.of(0).init(), one)
    assert not int(state.buffers[flag])
    assert not np.array(state.params[name]).any()
    state, _ = steps.of(1)(state, one)
    assert int(state.buffers[flag]) == 1
    scales = steps.of(1).steps["discriminator"]._scales
    assert scales._cache_size() == 1
    state, _ = steps.of(1)(replace(state), two)
    first = np.array(state.params[name])
    other = {n: v + 1 for n, v in state.params.items()}
    state, _ = steps.of(1)(replace(state, params=other), two)
    assert np.abs(np.array(state.params[name]) - first - 1).max() < 0.1


def test_norms_of_heads_take_eight_images_at_a_time():
    norm = dino._GroupedBatchNorm(3)
    x = torch.randn(16, 3, 5)
    parts = [F.batch_norm(part, None, None, training=True, eps=1e-6) for part in x.split(8)]
    torch.testing.assert_close(norm(x), torch.cat(parts), rtol=1e-5, atol=1e-6)
    with pytest.raises(UsageError, match=r"9 images do not divide into 2 groups.*norm_type=gn"):
        norm(x[:9])


def test_weights_of_dino_are_read(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setitem(dino.SIZES, "S_16", replace(SIZE, width=32))
    path = tmp_path / "dino.pth"

    def made(**arch: Any) -> Any:
        said: list[str] = []
        return make_discriminator(DiscriminatorArch(use_dino=True, **arch), say=said.append), said

    other, said = made(norm_type="gn")
    assert "random weights" in said[0]
    weights = {n: v + 1 for n, v in other.dino.state_dict().items()}
    torch.save(weights, path)
    found, said = made(dino_ckpt_path=str(path), norm_type="gn")
    assert not said
    for name, value in found.dino.state_dict().items():
        wanted = weights[name].clone()
        if name.endswith("qkv.bias"):
            wanted[32:64] = 0
        assert torch.equal(value, wanted)
    assert not any(p.requires_grad for p in found.dino.parameters())
    with pytest.raises(UsageError, match=r"dino_ckpt_path: .*none.pth is not there.*=null"):
        made(dino_ckpt_path=str(tmp_path / "none.pth"))
    torch.save({"cls_token": weights["cls_token"]}, path)
    with pytest.raises(CheckpointError, match=r"dino.pth does not fit"):
        made(dino_ckpt_path=str(path))
    path.write_bytes(b"broken")
    with pytest.raises(CheckpointError, match=r"dino.pth"):
        made(dino_ckpt_path=str(path))
    with pytest.raises(UsageError, match=r"recipe='L_7': expected one of S_16"):
        made(recipe="L_7")
    with pytest.raises(UsageError, match=r"norm_type='ln': expected bn or gn"):
        made(norm_type="ln")
