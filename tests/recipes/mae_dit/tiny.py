"""Stage 2 in a size for tests: a configuration, a run of stage 1, and networks of measures."""

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

import tpuport
from recipes.mae_dit.config import load
from recipes.mae_dit.evaluation.inception import Activations
from recipes.mae_dit.models import Encodings, Reconstruction, make_autoencoder
from recipes.mae_dit.weights import MODEL
from tests.recipes.mae_dit.conftest import optimizer


class Patches(nn.Module):
    """An autoencoder of linear patches, with upstream's interface: latents (B, 4, 4, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(3, 4, 4, 4)
        self.decoder = nn.ConvTranspose2d(4, 3, 4, 4)

    def encode(self, inputs: Any) -> Encodings:
        return Encodings(self.encoder(inputs.img))

    def decode(self, encodings: Any) -> Reconstruction:
        return Reconstruction(self.decoder(encodings.zs))


class Means(nn.Module):
    """Activations of three widths, linear in the images."""

    def forward(self, images: torch.Tensor) -> Activations:
        flat = images.flatten(1)
        return Activations(flat[:, ::97], flat[:, ::131], flat[:, ::251])


class Difference(nn.Module):
    """A distance (B,) of images."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x - y).abs().mean((1, 2, 3))


def sections(**stage_2: Any) -> dict[str, Any]:
    params = {"input_size": 4, "patch_size": 2, "in_channels": 4, "hidden_size": 16}
    params |= {"depth": 1, "num_heads": 2, "num_classes": 4, "inference_step": 3, **stage_2}
    return {
        "dataset": {"type": "imagenet", "transforms": {"type": "imagenetDiT16x16"}},
        "arch": {
            "stage": 2,
            "stage_1": {"target": f"{__name__}.Patches"},
            "stage_2": {"target": "recipes.mae_dit.stage2.models.DiT", "params": params},
            "ema": 0.9,
        },
        "optimizer": {**optimizer(), "type": "sgd", "clip_grad_norm": 1.0},
        "experiment": {"batch_size": 4, "accu_step": 1, "epochs": 3},
    }


def write(folder: Path, **stage_2: Any) -> Path:
    """Write the configuration and FOLDER/stage1, and return the path of the first."""
    path = folder / "stage2.yaml"
    path.write_text(yaml.safe_dump(sections(**stage_2)))
    (folder / "stage1").mkdir()
    tpuport.save_checkpoint(folder / "stage1" / MODEL, make_autoencoder(load(path)).state_dict())
    return path
