"""Transformers of diffusers that make video or sound: padded masks, few frames, uneven sizes."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache
from torch import randn

from tests.zoo.case import diffusers_case, keep, rotary, times

_WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 10,
    "freq_dim": 8,
    "ffn_dim": 16,
    "num_layers": 1,
    "rope_max_seq_len": 16,
}


def _wan_inputs() -> dict[str, Any]:
    return {
        "hidden_states": randn(2, 4, 2, 4, 6),
        "timestep": torch.tensor([7, 420]),
        "encoder_hidden_states": randn(2, 5, 10),
    }


_HUNYUAN = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 1,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "patch_size": 1,
    "patch_size_t": 1,
    "text_embed_dim": 10,
    "rope_axes_dim": (2, 2, 4),
}
_HUNYUAN_1 = _HUNYUAN | {"num_single_layers": 1, "pooled_projection_dim": 6}
_HUNYUAN_15 = _HUNYUAN | {"text_embed_2_dim": 6, "image_embed_dim": 7, "target_size": 4}


def _hunyuan_inputs() -> dict[str, Any]:
    return {
        "hidden_states": randn(2, 4, 2, 3, 2),
        "timestep": torch.tensor([7, 420]),
        "encoder_hidden_states": randn(2, 6, 10),
        "encoder_attention_mask": keep(4, 6, size=6),
    }


def _hunyuan_15_inputs(image: torch.Tensor) -> dict[str, Any]:
    return _hunyuan_inputs() | {
        "timestep": times(7.0, 420.0),
        "encoder_hidden_states_2": randn(2, 4, 6),
        "encoder_attention_mask_2": keep(4, 1, size=4),
        "image_embeds": image,
    }


def _framepack_inputs() -> dict[str, Any]:
    return _hunyuan_inputs() | {
        "hidden_states": randn(2, 4, 2, 4, 4),
        "encoder_attention_mask": keep(4, 5, size=6),
        "pooled_projections": randn(2, 6),
        "guidance": torch.tensor([600, 100]),
        "image_embeds": randn(2, 3, 7),
        "indices_latents": torch.tensor([3, 4]),
        "latents_clean": randn(2, 4, 1, 4, 4),
        "indices_latents_clean": torch.tensor([0]),
        "latents_history_2x": randn(2, 4, 2, 4, 4),
        "indices_latents_history_2x": torch.tensor([1, 2]),
        "latents_history_4x": randn(2, 4, 4, 4, 4),
        "indices_latents_history_4x": torch.tensor([5, 6, 7, 8]),
    }


def _anyflow_inputs() -> dict[str, Any]:
    return {
        "hidden_states": randn(1, 4, 4, 8, 8),
        "timestep": times(30.0, 30.0, 800.0, 800.0)[None],
        "r_timestep": times(10.0, 10.0, 250.0, 250.0)[None],
        "encoder_hidden_states": randn(1, 5, 10),
    }


VIDEOS = [
    diffusers_case(
        "AllegroTransformer3DModel",
        {"patch_size": 2, "patch_size_t": 1, "num_attention_heads": 2, "attention_head_dim": 6}
        | {"in_channels": 4, "out_channels": 4, "num_layers": 1, "cross_attention_dim": 12}
        | {"caption_channels": 5, "sample_height": 4, "sample_width": 6, "sample_frames": 2},
        lambda: {
            "hidden_states": randn(2, 4, 2, 4, 6),
            "encoder_hidden_states": randn(2, 7, 5),
            "timestep": torch.tensor([7, 420]),
            "attention_mask": torch.ones(2, 2, 4, 6),
            "encoder_attention_mask": keep(4, 7, size=7),
        },
    ),
    diffusers_case(
        "AnyFlowTransformer3DModel",
        _WAN,
        lambda: _anyflow_inputs() | {"encoder_hidden_states": randn(1, 7, 10)},
    ),
    diffusers_case(
        "AnyFlowFARTransformer3DModel",
        _WAN | {"compressed_patch_size": (1, 4, 4), "full_chunk_limit": 2},
        lambda: _anyflow_inputs() | {"chunk_partition": [2, 2]},
    ),
    diffusers_case(
        "CogVideoXTransformer3DModel",
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4}
        | {"time_embed_dim": 4, "text_embed_dim": 6, "num_layers": 1, "sample_width": 6}
        | {"sample_height": 4, "sample_frames": 5, "max_text_seq_length": 5},
        lambda: {
            "hidden_states": randn(2, 2, 4, 4, 6),
            "encoder_hidden_states": randn(2, 5, 6),
            "timestep": torch.tensor([7, 420]),
        },
    ),
    diffusers_case(
        "CosmosTransformer3DModel",
        {"in_channels": 5, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 12}
        | {"num_layers": 1, "mlp_ratio": 2, "text_embed_dim": 10, "adaln_lora_dim": 4}
        | {
            "max_size": (4, 8, 8),
            "extra_pos_embed_type": "learnable",
            "concat_padding_mask": False,
        },
        lambda: {
            "hidden_states": randn(1, 4, 2, 4, 6),
            "timestep": torch.tensor([7]),
            "encoder_hidden_states": randn(1, 5, 10),
            "attention_mask": keep(3, size=5).bool(),
            "fps": 30,
            "condition_mask": keep(1, size=2).float()[:, None, :, None, None].repeat(1, 1, 1, 4, 6),
        },
    ),
    diffusers_case(
        "Cosmos3OmniTransformer",
        {"head_dim": 8, "hidden_size": 12, "intermediate_size": 20, "latent_channel": 2}
        | {"latent_patch_size": 1, "num_attention_heads": 2, "num_hidden_layers": 1}
        | {"num_key_value_heads": 1, "patch_latent_dim": 2, "rope_axes_dim": [2, 1, 1]}
        | {"vocab_size": 17, "hidden_act": "relu2", "qk_norm_for_text": False},
        lambda: {
            "input_ids": torch.tensor([3, 1, 16]),
            "text_indexes": torch.arange(3),
            "position_ids": torch.stack(
                [torch.arange(9), torch.arange(9) // 2, torch.arange(9) % 2]
            ),
            "und_len": 3,
            "sequence_length": 9,
            "vision_tokens": [randn(1, 2, 2, 1, 3)],
            "vision_token_shapes": [(2, 1, 3)],
            "vision_sequence_indexes": torch.arange(3, 9),
            "vision_mse_loss_indexes": torch.arange(6, 9),
            "vision_timesteps": times(400.0, 400.0, 400.0),
            "vision_noisy_frame_indexes": [torch.tensor([1])],
        },
    ),
    diffusers_case(
        "HunyuanVideoTransformer3DModel",
        _HUNYUAN_1 | {"guidance_embeds": True},
        lambda: (
            _hunyuan_inputs() | {"pooled_projections": randn(2, 6), "guidance": times(600.0, 100.0)}
        ),
    ),
    diffusers_case(
        "HunyuanVideo15Transformer3DModel",
        _HUNYUAN_15,
        lambda: _hunyuan_15_inputs(torch.zeros(2, 3, 7)),
        note="no_image",
    ),
    diffusers_case(
        "HunyuanVideo15Transformer3DModel",
        _HUNYUAN_15,
        lambda: _hunyuan_15_inputs(randn(2, 3, 7)),
        note="image",
        grads=True,
    ),
    diffusers_case(
        "HunyuanVideoFramepackTransformer3DModel",
        _HUNYUAN_1
        | {"patch_size": 2, "has_image_proj": True, "image_proj_dim": 7, "guidance_embeds": True}
        | {"has_clean_x_embedder": True},
        _framepack_inputs,
    ),
    diffusers_case(
        "LatteTransformer3DModel",
        {"num_attention_heads": 2, "attention_head_dim": 6, "in_channels": 4, "out_channels": 8}
        | {"num_layers": 1, "cross_attention_dim": 12, "caption_channels": 5, "sample_size": 6}
        | {"attention_bias": True, "patch_size": 2, "norm_type": "ada_norm_single"}
        | {
            "activation_fn": "gelu-approximate",
            "norm_elementwise_affine": False,
            "video_length": 3,
        },
        lambda: {
            "hidden_states": randn(2, 4, 3, 6, 6),
            "encoder_hidden_states": randn(2, 7, 5),
            "timestep": torch.tensor([7, 420]),
        },
    ),
    diffusers_case(
        "LTXVideoTransformer3DModel",
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8}
        | {"cross_attention_dim": 16, "num_layers": 1, "caption_channels": 5},
        lambda: {
            "hidden_states": randn(2, 12, 4),
            "encoder_hidden_states": randn(2, 7, 5),
            "timestep": torch.tensor([7, 420]),
            "encoder_attention_mask": keep(4, 7, size=7),
            "num_frames": 2,
            "height": 2,
            "width": 3,
        },
    ),
    diffusers_case(
        "MochiTransformer3DModel",
        {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "in_channels": 4}
        | {"pooled_projection_dim": 6, "text_embed_dim": 16, "time_embed_dim": 4}
        | {"max_sequence_length": 7},
        lambda: {
            "hidden_states": randn(2, 4, 2, 4, 6),
            "encoder_hidden_states": randn(2, 7, 16),
            "timestep": torch.tensor([7, 420]),
            "encoder_attention_mask": keep(4, 7, size=7).bool(),
        },
        grads=True,
    ),
    diffusers_case("SkyReelsV2Transformer3DModel", _WAN, _wan_inputs),
    diffusers_case(
        "StableAudioDiTModel",
        {"in_channels": 4, "out_channels": 4, "num_layers": 1, "attention_head_dim": 8}
        | {"num_attention_heads": 2, "num_key_value_attention_heads": 1, "sample_size": 9}
        | {"cross_attention_dim": 8, "cross_attention_input_dim": 6, "time_proj_dim": 6}
        | {"global_states_input_dim": 7},
        lambda: {
            "hidden_states": randn(2, 4, 9),
            "timestep": times(0.3, 0.8),
            "encoder_hidden_states": randn(2, 5, 6),
            "global_hidden_states": randn(2, 1, 7),
            "rotary_embedding": rotary(10, 4),
        },
    ),
    diffusers_case(
        "TransformerTemporalModel",
        {"num_attention_heads": 2, "attention_head_dim": 4, "in_channels": 6, "norm_num_groups": 2},
        lambda: {
            "hidden_states": randn(6, 6, 2, 3),
            "timestep": torch.tensor([7, 420]),
            "num_frames": 3,
        },
    ),
    diffusers_case("WanTransformer3DModel", _WAN, _wan_inputs, grads=True),
    diffusers_case(
        "WanAnimate2Transformer3DModel",
        {"text_len": 6, "in_dim": 6, "dim": 16, "ffn_dim": 20, "freq_dim": 8, "text_dim": 10}
        | {"out_dim": 2, "num_heads": 2, "num_layers": 1},
        lambda: {
            "hidden_states": [randn(2, 2, 4, 6)],
            "timestep": times(420.0),
            "encoder_hidden_states": [randn(5, 10)],
            "condition_latents": [randn(4, 2, 4, 6)],
            "encoder_hidden_states_image": randn(1, 3, 1280),
            "kv_cache": WanAnimate2KVCache(1),
            "kv_cache_mode": "extract",
            "seq_len": 12,
            "offset_grid_sizes": torch.tensor([[2, 2, 3]]),
        },
    ),
    diffusers_case(
        "WanVACETransformer3DModel",
        _WAN | {"vace_layers": [0], "vace_in_channels": 6},
        lambda: _wan_inputs() | {"control_hidden_states": randn(2, 6, 2, 4, 6)},
    ),
]
