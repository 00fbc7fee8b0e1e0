"""All commands one after another: from small data to trajectories of a reinforced planner."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import tpuport
from recipes.recogdrive import planner as planners
from recipes.recogdrive import vlm
from recipes.recogdrive.planner import PlannerConfig
from tests.recipes.recogdrive.runs import command, logged

SMALLER = PlannerConfig(heads=2, head_dim=16, layers=1, output_dim=32, state_width=64, hidden=64)
# One layer of each kind: what they are trained to does not depend on how many there are.
ONE = {"num_hidden_layers": 1}
THIN = vlm.Size(vlm.SIZES["tiny"].text | ONE, vlm.SIZES["tiny"].vision | ONE)


def values(out: Path, name: str) -> list[float]:
    return list(logged(out, name).values())


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


@pytest.fixture
def _compiled_once(tmp_path: Path) -> Iterator[None]:
    """The sampler of trajectories is the same program in three of the commands."""
    with tpuport.compile_cache(tmp_path / "programs"):
        yield


@pytest.mark.usefixtures("_compiled_once")
def test_the_commands_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The planner learns from the states of the chat model that was fine-tuned before."""
    monkeypatch.setitem(planners.SIZES, "tiny", SMALLER)
    monkeypatch.setitem(vlm.SIZES, "tiny", THIN)
    chats, cache = tmp_path / "chats", tmp_path / "cache"
    stage1, planner, reinforced = (tmp_path / f"stage{number}" for number in (1, 2, 3))
    command("make-data", tmp_path / "made", "--count", 2, "--chats", chats)
    command(
        *("finetune", "--model_name_or_path", chats / "model", "--meta_path", chats / "meta.json"),
        *("--output_dir", stage1, "--force_image_size", 56, "--max_dynamic_patch", 1),
        *("--max_seq_length", 256, "--num_train_epochs", 4, "--per_device_train_batch_size", 4),
        *("--learning_rate", 5e-3, "--fsdp_devices", 1, "--bf16", False),
    )
    losses = values(stage1, "loss")
    assert mean(losses[-3:]) < 0.8 * mean(losses[:3])
    # Upstream's layout is the one of the other tests, and takes ten times as long to read.
    command(
        *("cache", "--model_name_or_path", stage1 / "model", "--scenes", chats / "scenes.jsonl"),
        *("--cache_path", cache, "--max_length", 544, "--max_dynamic_patch", 1, "--fp32"),
        *("--layout", "safetensors"),
    )
    often = ("--batch-size", 8, "--log-every", 5)
    command(
        *("train", cache, "--out", planner, "--size", "tiny", "--validate-first", *often),
        *("--epochs", 100, "--lr", 4e-3, "--ema", 0.95),
    )
    losses, errors = values(planner, "loss"), values(planner, "evaluate/val_l1")
    assert mean(losses[-5:]) < 0.3 * mean(losses[:5])
    assert errors[-1] < 0.1 * errors[0]
    command(
        *("grpo", cache, "--checkpoint", planner / "planner.safetensors", "--out", reinforced),
        *("--batch-size", 8, "--log-every", 1, "--lr", 1e-3, "--reward-workers", 0),
    )
    losses = values(reinforced, "loss")
    assert mean(losses[-5:]) < mean(losses[:5])
    found = tmp_path / "found.json"
    command(
        *("sample", cache, "--checkpoint", reinforced / "planner.safetensors", "--out", found),
        *("--batch-size", 8),
    )
    written = json.loads(found.read_text())
    assert written["verified"]
    assert len(written["trajectories"]) == written["scenes"] == 16
    assert written["l1"] < 0.15 * errors[0]
