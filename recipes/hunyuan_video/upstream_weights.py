"""diffusers' weights in the layout of upstream's classes.

The classes are AutoencoderKLConv3D and HunyuanVideo_1_5_DiffusionTransformer.

The weights are the same except for two: the text refiner has its three projections in one, and the
last layer's shift and scale are swapped. Source: the attributes of the classes.
"""

import re
from collections.abc import Mapping

import torch

# From diffusers' names to upstream's. All are applied in turn.
_VAE = [
    (r"mid_block\.resnets\.0\.", "mid.block_1."),
    (r"mid_block\.resnets\.1\.", "mid.block_2."),
    (r"mid_block\.attentions\.0\.(?:to_)?", "mid.attn_1."),
    (r"(down|up)_blocks\.(\d+)\.resnets\.", r"\1.\2.block."),
    (r"(down|up)_blocks\.(\d+)\.(down|up)samplers\.0\.", r"\1.\2.\3sample."),
    (r"\.conv_shortcut\.", ".nin_shortcut."),
]
_TRANSFORMER = [
    (r"^x_embedder\.", "img_in."),
    (r"^cond_type_embed\.", "cond_type_embedding."),
    (r"^image_embedder\.norm_in\.", "vision_in.proj.0."),
    (r"^image_embedder\.linear_1\.", "vision_in.proj.1."),
    (r"^image_embedder\.linear_2\.", "vision_in.proj.3."),
    (r"^image_embedder\.norm_out\.", "vision_in.proj.4."),
    (r"^context_embedder_2\.norm\.", "byt5_in.layernorm."),
    (r"^context_embedder_2\.linear_(\d)\.", r"byt5_in.fc\1."),
    (r"^time_embed\.timestep_embedder\.linear_1\.", "time_in.mlp.0."),
    (r"^time_embed\.timestep_embedder\.linear_2\.", "time_in.mlp.2."),
    (r"^time_embed\.timestep_embedder_r\.linear_1\.", "time_r_in.mlp.0."),
    (r"^time_embed\.timestep_embedder_r\.linear_2\.", "time_r_in.mlp.2."),
    (r"^context_embedder\.proj_in\.", "txt_in.input_embedder."),
    (r"^context_embedder\.time_text_embed\.text_embedder\.", "txt_in.c_embedder."),
    (r"^context_embedder\.time_text_embed\.timestep_embedder\.", "txt_in.t_embedder."),
    (r"^txt_in\.t_embedder\.linear_1\.", "txt_in.t_embedder.mlp.0."),
    (r"^txt_in\.t_embedder\.linear_2\.", "txt_in.t_embedder.mlp.2."),
    (r"^context_embedder\.token_refiner\.", "txt_in.individual_token_"),
    (r"individual_token_refiner_blocks\.", "individual_token_refiner.blocks."),
    (r"(refiner\.blocks\.\d+)\.attn\.to_out\.0\.", r"\1.self_attn_proj."),
    (r"(refiner\.blocks\.\d+)\.norm_out\.linear\.", r"\1.adaLN_modulation.1."),
    (r"(refiner\.blocks\.\d+)\.ff\.net\.0\.proj\.", r"\1.mlp.fc1."),
    (r"(refiner\.blocks\.\d+)\.ff\.net\.2\.", r"\1.mlp.fc2."),
    (r"^transformer_blocks\.", "double_blocks."),
    (r"(double_blocks\.\d+)\.norm1\.", r"\1.img_mod."),
    (r"(double_blocks\.\d+)\.norm1_context\.", r"\1.txt_mod."),
    (r"(double_blocks\.\d+)\.attn\.norm_added_([qk])\.", r"\1.txt_attn_\2_norm."),
    (r"(double_blocks\.\d+)\.attn\.norm_([qk])\.", r"\1.img_attn_\2_norm."),
    (r"(double_blocks\.\d+)\.attn\.to_([qkv])\.", r"\1.img_attn_\2."),
    (r"(double_blocks\.\d+)\.attn\.add_([qkv])_proj\.", r"\1.txt_attn_\2."),
    (r"(double_blocks\.\d+)\.attn\.to_out\.0\.", r"\1.img_attn_proj."),
    (r"(double_blocks\.\d+)\.attn\.to_add_out\.", r"\1.txt_attn_proj."),
    (r"(double_blocks\.\d+)\.ff\.net\.0\.proj\.", r"\1.img_mlp.fc1."),
    (r"(double_blocks\.\d+)\.ff\.net\.2\.", r"\1.img_mlp.fc2."),
    (r"(double_blocks\.\d+)\.ff_context\.net\.0\.proj\.", r"\1.txt_mlp.fc1."),
    (r"(double_blocks\.\d+)\.ff_context\.net\.2\.", r"\1.txt_mlp.fc2."),
    (r"^norm_out\.linear\.", "final_layer.adaLN_modulation.1."),
    (r"^proj_out\.", "final_layer.linear."),
]  # fmt: skip
_REFINER = re.compile(r"(refiner\.blocks\.\d+)\.attn\.to_([qkv])\.")


def upstream_vae(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename the weights of diffusers' VAE for upstream's class."""
    return {_renamed(name, _VAE): weight for name, weight in weights.items()}


def upstream_transformer(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename and join the weights of diffusers' transformer for upstream's class."""
    found: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for given, weight in weights.items():
        name = _renamed(given, _TRANSFORMER)
        if _REFINER.search(name):
            whole = _REFINER.sub(r"\1.self_attn_qkv.", name)
            parts.setdefault(whole, {})[_REFINER.findall(name)[0][1]] = weight
        elif name.startswith("final_layer.adaLN_modulation."):
            found[name] = torch.cat(weight.chunk(2)[::-1])
        else:
            found[name] = weight
    return found | {n: torch.cat([part[p] for p in "qkv"]) for n, part in parts.items()}


def _renamed(name: str, table: list[tuple[str, str]]) -> str:
    for pattern, other in table:
        name = re.sub(pattern, other, name)
    return name
