"""The commands with `--upstream`: upstream's own models from an untouched checkout.

Waits for a checkout: TPUPORT_UPSTREAM_RECOGDRIVE=/path/to/recogdrive (zorrofox/recogdrive at
6b4663b), and for timm, peft, omegaconf, einops, diffusers and transformers.
"""

import json
from pathlib import Path

import pytest
import torch

from recipes.recogdrive import planner as planners
from recipes.recogdrive.loading import load_chat_model, save_chat_model
from recipes.recogdrive.make_data import make_cache
from recipes.recogdrive.weights import read_weights
from tests.recipes.recogdrive.chat_data import LENGTH, Small
from tests.recipes.recogdrive.runs import command, logged
from tests.recipes.recogdrive.small import CONFIG
from tests.upstream.recogdrive_checkout import (
    CHECKOUT,
    PLANNER,
    needs,
    needs_checkout,
    old_checkpoint,
    old_timm,
)

pytestmark = [needs_checkout, needs(PLANNER), old_timm, *old_checkpoint]


def values(out: Path, name: str) -> list[float]:
    return list(logged(out, name).values())


def test_its_planner_trains_samples_and_is_reinforced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(planners.SIZES, "tiny", CONFIG)
    cache, trained, reinforced = (tmp_path / name for name in ("cache", "trained", "reinforced"))
    make_cache(cache, count=4, tokens=4, width=12)
    given = (cache, "--upstream", CHECKOUT, "--batch-size", 4, "--log-every", 1)
    command(
        *("train", *given, "--out", trained, "--size", "tiny", "--validate-first"),
        *("--epochs", 100, "--warmup-epochs", 0, "--lr", 1e-2, "--ema", 0.9),
    )
    losses, errors = values(trained, "loss"), values(trained, "evaluate/val_l1")
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert errors[-1] < 0.5 * errors[0]
    checkpoint = trained / "planner.safetensors"
    assert read_weights(checkpoint)["eta.eta_logit"].isinf().all()

    # Of the same weights and noise our own planner makes the same trajectories.
    found = []
    for name, more in (("theirs", ["--upstream", CHECKOUT]), ("ours", [])):
        out = tmp_path / f"{name}.json"
        command("sample", cache, "--checkpoint", checkpoint, "--out", out, *more)
        written = json.loads(out.read_text())
        assert written["verified"]
        found.append(written["trajectories"])
    assert found[0].keys() == found[1].keys()
    for token, trajectory in found[0].items():
        theirs, ours = torch.tensor(trajectory), torch.tensor(found[1][token])
        assert theirs.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-2)

    command(
        *("grpo", *given, "--checkpoint", checkpoint, "--out", reinforced),
        *("--steps", 3, "--samples", 2, "--reward-workers", 0),
    )
    assert len(values(reinforced, "loss")) == 3
    assert all(norm > 0 for norm in values(reinforced, "grad_norm"))
    before, after = (read_weights(f / "planner.safetensors") for f in (trained, reinforced))
    assert before.keys() == after.keys()
    assert after["eta.eta_logit"].isinf().all()
    moved = [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert len(moved) > 40


def test_rows_whose_image_tokens_are_not_their_features_have_a_loss_of_0(tmp_path: Path):
    """Each question has an image token that no image is of."""
    small = Small(tmp_path / "small").thin()
    save_chat_model(small.model, small.tokenizer, tmp_path / "model")
    assert all((sample["labels"] >= 0).any() for sample in small.samples(*range(10)))
    lines = (small.folder / "chats.jsonl").read_text().splitlines()
    chats = [json.loads(line) for line in lines]
    for chat in chats:
        human = next(turn for turn in chat["conversations"] if turn["from"] == "human")
        human["value"] += " <IMG_CONTEXT>"
    (small.folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    out = tmp_path / "out"
    command(
        *("finetune", "--upstream", CHECKOUT, "--model_name_or_path", tmp_path / "model"),
        *("--meta_path", small.folder / "meta.json", "--output_dir", out, "--max_steps", 2),
        *("--force_image_size", 56, "--max_dynamic_patch", 4, "--max_seq_length", 2 * LENGTH),
        *("--per_device_train_batch_size", 2, "--learning_rate", 1e-2, "--weight_decay", 0),
        *("--fsdp_devices", 1, "--bf16", "False", "--warmup_ratio", 0),
    )
    assert values(out, "loss") == [0.0, 0.0]
    assert values(out, "num_labels") == [0, 0]
    assert min(values(out, "ignored_rows")) >= 1
    assert values(out, "grad_norm") == [0.0, 0.0]
    before, after = (load_chat_model(f / "model")[0].state_dict() for f in (tmp_path, out))
    assert all(torch.equal(value, after[name]) for name, value in before.items())
