"""Steps of stage 2 are eager PyTorch's: losses, weights, averages, from images and from latents."""

import copy
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from recipes.mae_dit.config import Config, load
from recipes.mae_dit.models import make_autoencoder, make_stage2
from recipes.mae_dit.schedules import make_optimizer, make_schedule
from recipes.mae_dit.stage2.training import Stage2, make_step
from recipes.mae_dit.statistics import LatentStatistics
from tests.recipes.mae_dit.tiny import sections

CASES = {
    "ddpm": ({"learn_sigma": True}, 1),
    "flow": ({"process": "flow", "learn_sigma": False}, 2),
}


def modules_of(config: Config) -> Stage2:
    model, autoencoder = make_stage2(config), make_autoencoder(config)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:  # zeros at the start would hide everything
            nn.init.normal_(parameter, std=0.1)
    mean, var = torch.randn(4, 4, 4).double().numpy(), torch.rand(4, 4, 4).double().numpy()
    return Stage2(model, autoencoder, LatentStatistics(mean, var, 8))


def batches_of(count: int, process: str) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(2)
    times = torch.rand(count, 4, generator=g)
    if process == "ddpm":
        times = (times * 1000).long()
        times[0, 0] = 0  # the likelihood of the data
    return [
        {
            "image": torch.rand(4, 3, 16, 16, generator=g),
            "label": torch.tensor([0, 3, 1, 2], dtype=torch.int32),
            "t": t,
            "noise": torch.randn(4, 4, 4, 4, generator=g),
            "uniform": torch.tensor([0.05, 0.5, 0.9, 0.01]),
        }
        for t in times
    ]


def eager(modules: Stage2, config: Config, batches: list[Any]) -> Any:
    """The same steps by hand. Returns modules, averages and losses."""
    modules = copy.deepcopy(modules)
    optimizer = make_optimizer(modules.model.parameters(), config.optimizer)
    schedule, parts = make_schedule(optimizer, config.optimizer, 2, 3), config.experiment.accu_step
    ema = {n: p.detach().clone() for n, p in modules.model.named_parameters()}
    losses = []
    for batch in batches:
        modules.zero_grad()
        cuts = zip(*[value.chunk(parts) for value in batch.values()], strict=True)
        found = []
        for cut in cuts:
            loss = modules.loss(dict(zip(batch, cut, strict=True)))[0]
            (loss / parts).backward()
            found.append(loss.item())
        nn.utils.clip_grad_norm_(modules.model.parameters(), config.optimizer.clip_grad_norm)
        optimizer.step()
        schedule.step()
        for name, p in modules.model.named_parameters():
            ema[name].mul_(0.9).add_(p.detach(), alpha=1 - 0.9)
        losses.append(sum(found) / parts)
    return modules, ema, losses


@pytest.mark.parametrize("process", CASES)
def test_steps_are_those_of_torch(tmp_path, process):
    settings, parts = CASES[process]
    path = tmp_path / "stage2.yaml"
    path.write_text(yaml.safe_dump(sections(**settings)))
    config = load(path, [f"experiment.accu_step={parts}"])
    modules, batches = modules_of(config), batches_of(3, process)
    expected, ema, losses = eager(modules, config, batches)
    step = make_step(modules, config, 2)
    state = step.init()
    for batch, wanted in zip(batches, losses, strict=True):
        state, metrics = step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(wanted, rel=1e-5)
    trained: Any = step.load_state(state).to_torch()
    for name, value in expected.model.state_dict().items():
        torch.testing.assert_close(trained.model.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    before = modules.autoencoder.state_dict()
    for name, value in trained.autoencoder.state_dict().items():
        assert torch.equal(value, before[name])  # it is frozen
    averaged: Any = step.load_state(state, ema=True).to_torch()
    for name, value in ema.items():
        got = averaged.model.state_dict()[name]
        torch.testing.assert_close(got, value, rtol=1e-4, atol=1e-6)


def test_the_published_names_are_those_of_dit(tmp_path):
    path = tmp_path / "stage2.yaml"
    path.write_text(yaml.safe_dump(sections()))
    names = set(make_stage2(load(path)).get_submodule("conditional.denoiser").state_dict())
    per_block = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "adaLN_modulation.1")
    layers = ["x_embedder.proj", "t_embedder.mlp.0", "t_embedder.mlp.2", "final_layer.linear"]
    layers += ["final_layer.adaLN_modulation.1", *(f"blocks.0.{name}" for name in per_block)]
    wanted = {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
    assert names == wanted | {"pos_embed", "y_embedder.embedding_table.weight"}


def test_diffusers_dit_drops_labels_once(tmp_path):
    """Losses and gradients of diffusers' class; its own dropout differs between blocks."""
    config = {"num_attention_heads": 2, "attention_head_dim": 4, "in_channels": 4}
    config |= {"num_layers": 1, "sample_size": 4, "norm_num_groups": 2}
    path = tmp_path / "stage2.yaml"
    given = sections()
    given["arch"]["stage_2"] = {
        "target": "recipes.mae_dit.stage2.models.DiffusersDiT",
        "params": {"config": config, "num_classes": 4},
    }
    path.write_text(yaml.safe_dump(given))
    loaded = load(path)
    modules, batch = modules_of(loaded), batches_of(1, "ddpm")[0]
    expected, _, losses = eager(modules, loaded, [batch])
    step = make_step(modules, loaded, 2)
    state, metrics = step(step.init(), batch)
    assert float(metrics["loss"]) == pytest.approx(losses[0], rel=1e-5)
    trained: Any = step.load_state(state).to_torch()
    for name, value in expected.model.state_dict().items():
        torch.testing.assert_close(trained.model.state_dict()[name], value, rtol=1e-4, atol=1e-6)
