"""What the tests of this recipe share: a configuration in upstream's form."""

from pathlib import Path
from typing import Any

import pytest
import yaml


def optimizer() -> dict[str, Any]:
    warmup = {"epoch": 1, "multiplier": 1, "buffer_epoch": 0, "min_lr": 1e-4, "mode": "fix"}
    return {
        "type": "adamw",
        "init_lr": "1e-3",
        "weight_decay": 0.01,
        "betas": [0.5, 0.9],
        "max_gn": "None",
        "clip_grad_norm": 0.5,
        "warmup": {**warmup, "start_from_zero": False},
    }


def sections() -> dict[str, Any]:
    arch = {"in_channels": 3, "num_layers": 2, "use_actnorm": False, "ndf": 4}
    return {
        "dataset": {"type": "imagenet", "transforms": {"type": "imagenetMAE16x16"}},
        "arch": {"stage": 1, "stage_1": {"target": "builtins.dict"}, "ema": 0.9},
        "optimizer": optimizer(),
        "experiment": {"batch_size": 4, "accu_step": 1, "epochs": 3},
        "gan": {
            "disc": {"arch": arch, "optimizer": optimizer()},
            "loss": {
                "disc_loss": "hinge",
                "gen_loss": "vanilla",
                "disc_weight": 0.75,
                "perceptual_weight": 1.0,
                "disc_start": 2,
                "disc_upd_start": 1,
                "lpips_start": 0,
            },
        },
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "stage1.yaml"
    path.write_text(yaml.safe_dump(sections()))
    return path
