"""Where the tests find an untouched checkout of MAE-DiT, and its models in small sizes."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = os.environ.get("TPUPORT_UPSTREAM_MAE_DIT", "")
PACKAGES = ("timm", "einops", "diffusers", "transformers")
needs_checkout = [
    pytest.mark.skipif(
        not CHECKOUT, reason="waits for TPUPORT_UPSTREAM_MAE_DIT, a checkout of tsb0601/projectt"
    ),
    pytest.mark.skipif(
        bool(missing := [n for n in PACKAGES if importlib.util.find_spec(n) is None]),
        reason=f"waits for {', '.join(missing)}",
    ),
    # What upstream itself is warned of.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
CONFIGS = Path(CHECKOUT) / "configs" / "imagenet256"

_VIT = {
    "model_type": "vit_mae",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "decoder_num_attention_heads": 4,
    "decoder_hidden_size": 24,
    "decoder_num_hidden_layers": 1,
    "decoder_intermediate_size": 48,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "mask_ratio": 0.0,
}
_PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "size": {"height": 32, "width": 32},
}


def write_models(folder: Path) -> None:
    """Write FOLDER/mae and FOLDER/vae, from which upstream's classes make their models."""
    from diffusers import AutoencoderKL

    (folder / "mae").mkdir(parents=True)
    (folder / "mae" / "config.json").write_text(json.dumps(_VIT))
    (folder / "mae" / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    AutoencoderKL(
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
    ).save_pretrained(folder / "vae")


def stage_1(**params: Any) -> list[str]:
    """Return what to set of stage 1."""
    return [f"arch.stage_1.params.{name}={value}" for name, value in params.items()]


def stage_2(**params: Any) -> list[str]:
    """Return what to set of stage 2, so that it is small."""
    small = {"hidden_size": 16, "depth": 2, "num_heads": 2, "num_classes": 4, "input_size": 4}
    both = {**small, "in_channels": 32, **params}
    return [f"arch.stage_2.params.{name}={value}" for name, value in both.items()]
