"""Fine-tuning: losses fall, a killed run goes on as if nothing had been, LoRA changes little."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from recipes.openpi.dataset import Demonstrations, LeRobot, Samples
from recipes.openpi.finetune import FinetuneOptions, finetune, make_optimizer
from recipes.openpi.inputs import Preparation
from recipes.openpi.lora import LoraLinear, add_lora, merge_lora
from recipes.openpi.model import policy_loss
from recipes.openpi.robots import robot_of
from recipes.openpi.statistics import read_stats
from recipes.openpi.tokens import read_prompts
from recipes.openpi.weights import read_weights
from tests.recipes.openpi.small import observations, small_policy
from tpuport.foundation.errors import UsageError

OPTIONS = FinetuneOptions(
    steps=16,
    batch_size=4,
    lr=1e-2,
    min_lr=1e-3,
    warmup_steps=2,
    ema_decay=None,
    augment=False,
    save_every=8,
    log_every=1,
    progress=False,
)


def error_of(made: Path, folder: Path) -> float:
    """The loss over all demonstrations with the same noise."""
    policy = read_weights(folder)
    config, generator = policy.config, torch.Generator().manual_seed(0)
    found = Demonstrations(LeRobot(made / "data"), robot_of("libero"), config.action_horizon)
    prompts = read_prompts(folder, config)
    samples = Samples(found, Preparation(config, found.robot, read_stats(made / "pi0"), prompts))
    batch = default_collate([samples[index] for index in range(len(samples))])
    batch["noise"] = torch.randn(batch["actions"].shape, generator=generator)
    batch["time"] = torch.rand(len(samples), generator=generator)
    with torch.no_grad():
        return float(policy_loss(policy, batch))


def test_a_run_that_was_ended_goes_on_to_the_same_weights(made: Path, tmp_path: Path, monkeypatch):
    import recipes.openpi.finetune as stage

    one = finetune(made / "data", made / "pi0", tmp_path / "one", OPTIONS)
    lines = (tmp_path / "one" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "loss" in line] == list(range(1, 17))
    assert error_of(made, one) < 0.9 * error_of(made, made / "pi0")
    original: Any = stage.fit

    def ended(*args: Any, steps: int, **kwargs: Any) -> Any:
        original(*args, steps=steps // 2, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, "fit", ended)
    with pytest.raises(KeyboardInterrupt):
        finetune(made / "data", made / "pi0", tmp_path / "two", OPTIONS)
    monkeypatch.setattr(stage, "fit", original)
    with pytest.raises(UsageError, match=r"lr was 0\.01, is 0\.5"):
        finetune(made / "data", made / "pi0", tmp_path / "two", replace(OPTIONS, lr=0.5))
    two = finetune(made / "data", made / "pi0", tmp_path / "two", OPTIONS)
    first, second = (read_weights(folder).state_dict() for folder in (one, two))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_with_lora_only_what_openpi_trains_changes(made: Path, tmp_path: Path):
    options = replace(OPTIONS, steps=2, lora=True, augment=True, precision="bf16")
    before = read_weights(made / "pi05").state_dict()
    folder = finetune(made / "data", made / "pi05", tmp_path / "run", options)
    after = read_weights(folder).state_dict()
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert not any("embed_tokens" in name or "layernorm.dense" in name for name in changed)
    assert any("vision_tower" in name for name in changed)
    assert any("gemma_expert.model.layers.0.mlp.up_proj" in name for name in changed)
    assert any("language_model.layers.0.self_attn.v_proj" in name for name in changed)
    assert "action_out_proj.weight" in changed
    name = "paligemma_with_expert.gemma_expert.model.layers.1.mlp.down_proj.weight"
    change = after[name].float() - before[name].float()
    assert torch.linalg.matrix_rank(change) <= 32
    assert sorted(path.name for path in folder.iterdir()) == [
        "assets",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_merged_changes_compute_the_same():
    policy, batch = add_lora(small_policy()), observations()
    for module in policy.modules():
        if isinstance(module, LoraLinear):
            torch.nn.init.normal_(module.lora_up, std=0.1)
    with torch.no_grad():
        expected = policy.sample_actions(batch, batch["noise"], 3)
        plain = small_policy().sample_actions(batch, batch["noise"], 3)
        merged = merge_lora(policy)
        found = merged.sample_actions(batch, batch["noise"], 3)
    assert not any(isinstance(module, LoraLinear) for module in merged.modules())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, plain, atol=1e-3)
    assert set(merged.state_dict()) == set(small_policy().state_dict())


def test_the_optimizer_is_openpis():
    params = {"w": torch.ones(1).numpy()}
    optimizer = make_optimizer(replace(FinetuneOptions(), lr=1.0, steps=100, warmup_steps=10))
    state = optimizer.init(params)
    rates = []
    for _ in range(100):
        updates, state = optimizer.update({"w": torch.ones(1).numpy()}, state, params)
        rates.append(-float(updates["w"][0]))
    assert rates[0] == pytest.approx(1 / 11, rel=1e-3)
    assert rates[10] == pytest.approx(1, rel=1e-3)
    assert rates[99] < 0.01
