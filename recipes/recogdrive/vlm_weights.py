"""Conversion of OpenGVLab's InternVL (internvl_chat) to transformers' configuration and weights."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from recipes.recogdrive.vlm import tokens_per_tile
from tpuport.foundation.errors import UsageError

# OpenGVLab's prefixes and transformers'.
_TABLE = (
    ("vision_model.embeddings.class_embedding", "model.vision_tower.embeddings.cls_token"),
    (
        "vision_model.embeddings.patch_embedding.",
        "model.vision_tower.embeddings.patch_embeddings.projection.",
    ),
    (
        "vision_model.embeddings.position_embedding",
        "model.vision_tower.embeddings.position_embeddings",
    ),
    ("mlp1.0.", "model.multi_modal_projector.layer_norm."),
    ("mlp1.1.", "model.multi_modal_projector.linear_1."),
    ("mlp1.3.", "model.multi_modal_projector.linear_2."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model.language_model."),
)
_LAYER = re.compile(r"vision_model\.encoder\.layers\.(\d+)\.(.+)")
_IN_LAYER = (
    ("attn.proj.", "attention.projection_layer."),
    ("attn.q_norm.", "attention.q_norm."),
    ("attn.k_norm.", "attention.k_norm."),
    ("norm1.", "layernorm_before."),
    ("norm2.", "layernorm_after."),
    ("ls1", "lambda_1"),
    ("ls2", "lambda_2"),
    ("mlp.", "mlp."),
)
_QKV = ("q_proj", "k_proj", "v_proj")


def to_transformers(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename weights from OpenGVLab's names to transformers'.

    Raises:
        UsageError: A name is not of the model, such as one of InternLM 2.
    """
    made: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        in_layer = _LAYER.fullmatch(name)
        if in_layer and in_layer[2].startswith("attn.qkv."):
            folder = f"model.vision_tower.encoder.layer.{in_layer[1]}.attention"
            kind = name.rpartition(".")[2]
            parts = zip(_QKV, value.chunk(3), strict=True)
            made |= {f"{folder}.{part}.{kind}": piece for part, piece in parts}
        elif in_layer:
            rest = _replaced(in_layer[2], _IN_LAYER, name)
            made[f"model.vision_tower.encoder.layer.{in_layer[1]}.{rest}"] = value
        else:
            made[_replaced(name, _TABLE, name)] = value
    return made


def to_upstream(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename weights from transformers' names to OpenGVLab's.

    Raises:
        UsageError: A name is not of the model.
    """
    made: dict[str, torch.Tensor] = {}
    back = tuple((theirs, ours) for ours, theirs in _TABLE)
    layer = re.compile(r"model\.vision_tower\.encoder\.layer\.(\d+)\.(.+)")
    for name, value in weights.items():
        found = layer.fullmatch(name)
        if found is None:
            made[_replaced(name, back, name)] = value
            continue
        folder = f"vision_model.encoder.layers.{found[1]}"
        split = re.fullmatch(r"attention\.([qkv])_proj\.(\w+)", found[2])
        if split is None:
            pairs = tuple((theirs, ours) for ours, theirs in _IN_LAYER)
            made[f"{folder}.{_replaced(found[2], pairs, name)}"] = value
        elif split[1] == "q":
            names = [name.replace("q_proj", part) for part in _QKV]
            made[f"{folder}.attn.qkv.{split[2]}"] = torch.cat([weights[n] for n in names])
    return made


def _replaced(name: str, table: tuple[tuple[str, str], ...], whole: str) -> str:
    for ours, theirs in table:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    raise UsageError(
        f"the weight {whole!r} is not of an InternVL with a Qwen 2. What to do: give InternVL 2.5,"
        " InternVL 3 or ReCogDrive's, not a model with another language model"
    )


def config_of(path: str | Path) -> Any:
    """Return transformers' InternVLConfig for OpenGVLab's config.json.

    Raises:
        UsageError: The language model is not Qwen 2, or transformers has no such setting.
    """
    from transformers import InternVLConfig

    found = json.loads(Path(path).read_text(encoding="utf-8"))
    text, vision = dict(found["llm_config"]), found["vision_config"]
    language = text.get("architectures", ["none"])[0]
    if language != "Qwen2ForCausalLM":
        raise UsageError(f"{path}: a language model of {language}; expected Qwen2ForCausalLM")
    if found.get("select_layer", -1) != -1 or found.get("ps_version", "v2") != "v2":
        raise UsageError(f"{path}: expected select_layer -1 and ps_version 'v2'")
    size, patch = found.get("force_image_size") or vision["image_size"], vision["patch_size"]
    ratio = found.get("downsample_ratio", 0.5)
    names = (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
        *("hidden_act", "layer_norm_eps", "norm_type", "patch_size"),
    )
    return InternVLConfig(
        vision_config={
            **{name: vision[name] for name in names if name in vision},
            "model_type": "internvl_vision",
            "image_size": size,
            "attention_bias": vision.get("qkv_bias", True),
            "use_qk_norm": vision.get("qk_normalization", False),
            "use_mean_pooling": True,
        },
        text_config={**text, "model_type": "qwen2"},
        image_seq_length=tokens_per_tile(size, patch, ratio),
        downsample_ratio=ratio,
        tie_word_embeddings=text.get("tie_word_embeddings", False),
    )
