"""Transformers of diffusers that make images: batches of 2, padded masks, uneven sizes."""

from typing import Any

import torch
from torch import randn

from tests.zoo.case import diffusers_case, keep, rotary, times


def _grid_ids(rows: int, columns: int) -> torch.Tensor:
    """Position (0, row, column) of each latent, as Flux numbers them: (rows * columns, 3)."""
    return torch.cartesian_prod(*(torch.arange(float(n)) for n in (1, rows, columns)))


_FLUX = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "axes_dims_rope": (2, 2, 4),
}


def _flux_inputs(text: int = 5) -> dict[str, Any]:
    return {
        "hidden_states": randn(2, 6, 4),
        "encoder_hidden_states": randn(2, text, 12),
        "timestep": times(0.3, 0.8),
        "img_ids": _grid_ids(2, 3),
        "txt_ids": torch.zeros(text, 3),
    }


IMAGES = [
    diffusers_case(
        "DiTTransformer2DModel",
        {"num_attention_heads": 2, "attention_head_dim": 6, "in_channels": 3, "num_layers": 1}
        | {"out_channels": 6, "sample_size": 6, "num_embeds_ada_norm": 11},
        lambda: {
            "hidden_states": randn(2, 3, 6, 6),
            "timestep": torch.tensor([7, 420]),
            "class_labels": torch.tensor([2, 9]),
        },
    ),
    diffusers_case(
        "PixArtTransformer2DModel",
        {"num_attention_heads": 2, "attention_head_dim": 6, "in_channels": 4, "num_layers": 1}
        | {"cross_attention_dim": 12, "caption_channels": 5, "sample_size": 6},
        lambda: {
            "hidden_states": randn(2, 4, 6, 6),
            "encoder_hidden_states": randn(2, 7, 5),
            "timestep": torch.tensor([7, 420]),
            "encoder_attention_mask": keep(4, 7, size=7),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
        grads=True,
    ),
    diffusers_case(
        "PriorTransformer",
        {"num_attention_heads": 2, "attention_head_dim": 6, "num_layers": 1}
        | {"embedding_dim": 10, "num_embeddings": 5, "additional_embeddings": 4},
        lambda: {
            "hidden_states": randn(2, 10),
            "timestep": torch.tensor([7, 420]),
            "proj_embedding": randn(2, 10),
            "encoder_hidden_states": randn(2, 5, 10),
            "attention_mask": keep(3, 5, size=5).bool(),
        },
    ),
    diffusers_case(
        "AuraFlowTransformer2DModel",
        {"sample_size": 6, "in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 1}
        | {"attention_head_dim": 6, "num_attention_heads": 2, "joint_attention_dim": 10}
        | {"caption_projection_dim": 12, "pos_embed_max_size": 16},
        lambda: {
            "hidden_states": randn(2, 4, 6, 4),
            "encoder_hidden_states": randn(2, 5, 10),
            "timestep": times(0.3, 0.8),
        },
    ),
    diffusers_case(
        "BriaFiboTransformer2DModel",
        _FLUX | {"text_encoder_dim": 6, "time_theta": 10000},
        lambda: _flux_inputs() | {"text_encoder_layers": [randn(2, 5, 6), randn(2, 5, 6)]},
    ),
    diffusers_case(
        "ChromaTransformer2DModel",
        _FLUX
        | {"approximator_num_channels": 8, "approximator_hidden_dim": 10, "approximator_layers": 1},
        lambda: _flux_inputs() | {"attention_mask": keep(9, 11, size=11).bool()},
    ),
    diffusers_case(
        "CogView4Transformer2DModel",
        {"in_channels": 4, "out_channels": 4, "num_layers": 1, "attention_head_dim": 8}
        | {"num_attention_heads": 2, "text_embed_dim": 6, "time_embed_dim": 8, "condition_dim": 4}
        | {"rope_axes_dim": (16, 16)},
        lambda: {
            "hidden_states": randn(2, 4, 6, 8),
            "encoder_hidden_states": randn(2, 5, 6),
            "timestep": torch.tensor([7, 420]),
            "original_size": torch.tensor([[60, 80], [50, 90]]),
            "target_size": torch.tensor([[48, 64], [48, 64]]),
            "crop_coords": torch.tensor([[0, 3], [0, 0]]),
        },
    ),
    diffusers_case(
        "ErnieImageTransformer2DModel",
        {"hidden_size": 16, "num_attention_heads": 2, "num_layers": 1, "ffn_hidden_size": 12}
        | {"in_channels": 4, "out_channels": 4, "patch_size": 1, "text_in_dim": 10}
        | {"rope_axes_dim": (4, 2, 2)},
        lambda: {
            "hidden_states": randn(2, 4, 3, 5),
            "timestep": times(30.0, 800.0),
            "text_bth": randn(2, 7, 10),
            "text_lens": torch.tensor([4, 7]),
        },
    ),
    diffusers_case(
        "FluxTransformer2DModel",
        _FLUX | {"pooled_projection_dim": 6, "guidance_embeds": True},
        lambda: _flux_inputs() | {"pooled_projections": randn(2, 6), "guidance": times(3.5, 1.0)},
        grads=True,
    ),
    diffusers_case(
        "Flux2Transformer2DModel",
        _FLUX
        | {"axes_dims_rope": (2, 2, 2, 2), "timestep_guidance_channels": 16, "mlp_ratio": 2.0},
        lambda: (
            _flux_inputs()
            | {
                "img_ids": torch.cat([_grid_ids(2, 3), torch.zeros(6, 1)], 1)
                .expand(2, -1, -1)
                .long(),
                "txt_ids": torch.arange(20).reshape(1, 5, 4).expand(2, -1, -1),
                "guidance": times(3.5, 1.0),
            }
        ),
    ),
    diffusers_case(
        "GlmImageTransformer2DModel",
        {"in_channels": 4, "out_channels": 4, "num_layers": 1, "attention_head_dim": 8}
        | {"num_attention_heads": 2, "text_embed_dim": 10, "time_embed_dim": 8, "condition_dim": 4}
        | {"prior_vq_quantizer_codebook_size": 13},
        lambda: {
            "hidden_states": randn(2, 4, 6, 4),
            "encoder_hidden_states": randn(2, 5, 10),
            "prior_token_id": torch.randint(13, (2, 6)),
            "prior_token_drop": keep(2, 6, size=6).bool(),
            "timestep": torch.tensor([7, 420]),
            "target_size": torch.tensor([[48.0, 32.0], [48.0, 32.0]]),
            "crop_coords": torch.tensor([[0.0, 3.0], [0.0, 0.0]]),
        },
        grads=True,
    ),
    diffusers_case(
        "HunyuanDiT2DModel",
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "sample_size": 6}
        | {
            "patch_size": 2,
            "hidden_size": 16,
            "num_layers": 2,
            "mlp_ratio": 2.0,
            "cross_attention_dim": 6,
        }
        | {
            "cross_attention_dim_t5": 8,
            "pooled_projection_dim": 4,
            "text_len": 4,
            "text_len_t5": 5,
        },
        lambda: {
            "hidden_states": randn(2, 4, 6, 6),
            "timestep": times(30.0, 800.0),
            "encoder_hidden_states": randn(2, 4, 6),
            "text_embedding_mask": keep(2, 4, size=4),
            "encoder_hidden_states_t5": randn(2, 5, 8),
            "text_embedding_mask_t5": keep(5, 3, size=5),
            "image_meta_size": torch.tensor([[48.0, 48, 48, 48, 0, 0]]).repeat(2, 1),
            "style": torch.tensor([0, 0]),
            "image_rotary_emb": list(rotary(9, 8)),
        },
    ),
    diffusers_case(
        "Krea2Transformer2DModel",
        {"in_channels": 4, "num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "intermediate_size": 16, "timestep_embed_dim": 8}
        | {"text_hidden_dim": 8, "num_text_layers": 2, "text_num_attention_heads": 2}
        | {"text_num_key_value_heads": 1, "text_intermediate_size": 12}
        | {
            "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 1,
            "axes_dims_rope": (4, 2, 2),
        },
        lambda: {
            "hidden_states": randn(2, 6, 4),
            "encoder_hidden_states": randn(2, 5, 2, 8),
            "timestep": times(0.3, 0.8),
            "position_ids": torch.cat([torch.zeros(5, 3), _grid_ids(2, 3)]),
            "encoder_attention_mask": keep(3, 5, size=5).bool(),
        },
    ),
    diffusers_case(
        "Lumina2Transformer2DModel",
        {"sample_size": 6, "in_channels": 4, "hidden_size": 24, "num_layers": 1}
        | {"num_refiner_layers": 1, "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2}
        | {"axes_dim_rope": (4, 2, 2), "axes_lens": (32, 16, 16), "cap_feat_dim": 10},
        lambda: {
            "hidden_states": randn(2, 4, 6, 4),
            "encoder_hidden_states": randn(2, 7, 10),
            "timestep": times(0.3, 0.8),
            "encoder_attention_mask": keep(4, 7, size=7).bool(),
        },
        grads=True,
    ),
    diffusers_case(
        "NucleusMoEImageTransformer2DModel",
        {"in_channels": 8, "out_channels": 2, "num_layers": 1, "attention_head_dim": 8}
        | {"num_attention_heads": 2, "num_key_value_heads": 1, "joint_attention_dim": 10}
        | {"axes_dims_rope": (2, 2, 4), "dense_moe_strategy": "all_moe", "num_experts": 4}
        | {"moe_intermediate_dim": 12, "capacity_factors": 2.0},
        lambda: {
            "hidden_states": randn(2, 6, 8),
            "img_shapes": [(1, 2, 3), (1, 2, 3)],
            "encoder_hidden_states": randn(2, 5, 10),
            "encoder_hidden_states_mask": keep(3, 5, size=5),
            "timestep": times(0.3, 0.8),
        },
        grads=True,
    ),
    diffusers_case(
        "OmniGenTransformer2DModel",
        {"in_channels": 4, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
        | {"intermediate_size": 20, "num_layers": 2, "vocab_size": 23, "pos_embed_max_size": 8}
        | {"rope_scaling": {"long_factor": [1.0, 2.0, 3.0, 4.0], "short_factor": [1.0] * 4}}
        | {"time_step_dim": 4, "pad_token_id": 0},
        lambda: {
            "hidden_states": randn(2, 4, 4, 6),
            "timestep": times(0.3, 0.8),
            "input_ids": torch.randint(23, (2, 9)),
            "input_img_latents": [randn(1, 4, 4, 4)],
            "input_image_sizes": {1: [[2, 6]]},
            "attention_mask": keep(16, 13, size=16, left=True)[:, None].repeat(1, 16, 1),
            "position_ids": torch.arange(16).repeat(2, 1),
        },
    ),
    diffusers_case(
        "PRXTransformer2DModel",
        {
            "in_channels": 4,
            "context_in_dim": 10,
            "hidden_size": 16,
            "mlp_ratio": 2.0,
            "num_heads": 2,
        }
        | {"depth": 1, "axes_dim": [4, 4]},
        lambda: {
            "hidden_states": randn(2, 4, 6, 4),
            "timestep": times(0.3, 0.8),
            "encoder_hidden_states": randn(2, 5, 10),
            "attention_mask": keep(3, 5, size=5),
        },
    ),
    diffusers_case(
        "QwenImageTransformer2DModel",
        {"in_channels": 8, "out_channels": 2, "num_layers": 1, "attention_head_dim": 8}
        | {"num_attention_heads": 2, "joint_attention_dim": 10, "axes_dims_rope": (2, 2, 4)},
        lambda: {
            "hidden_states": randn(2, 6, 8),
            "encoder_hidden_states": randn(2, 5, 10),
            "encoder_hidden_states_mask": keep(3, 5, size=5),
            "timestep": times(0.3, 0.8),
            "img_shapes": [(1, 2, 3), (1, 2, 3)],
        },
    ),
    diffusers_case(
        "SanaTransformer2DModel",
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 6}
        | {"num_layers": 1, "num_cross_attention_heads": 2, "cross_attention_head_dim": 6}
        | {"cross_attention_dim": 12, "caption_channels": 5, "sample_size": 6, "patch_size": 1},
        lambda: {
            "hidden_states": randn(2, 4, 6, 5),
            "encoder_hidden_states": randn(2, 7, 5),
            "timestep": torch.tensor([7, 420]),
            "encoder_attention_mask": keep(4, 7, size=7),
        },
    ),
    diffusers_case(
        "SD3Transformer2DModel",
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2}
        | {"attention_head_dim": 6, "num_attention_heads": 2, "joint_attention_dim": 10}
        | {"caption_projection_dim": 12, "pooled_projection_dim": 5, "pos_embed_max_size": 8}
        | {"dual_attention_layers": (0,), "qk_norm": "rms_norm"},
        lambda: {
            "hidden_states": randn(2, 4, 6, 8),
            "encoder_hidden_states": randn(2, 5, 10),
            "pooled_projections": randn(2, 5),
            "timestep": torch.tensor([7, 420]),
        },
    ),
    diffusers_case(
        "ZImageTransformer2DModel",
        {"in_channels": 4, "dim": 16, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2}
        | {"n_kv_heads": 2, "cap_feat_dim": 10, "axes_dims": [4, 2, 2], "axes_lens": [96, 16, 16]},
        lambda: {
            "x": [randn(4, 1, 6, 4), randn(4, 1, 4, 4)],
            "t": times(0.3, 0.8),
            "cap_feats": [randn(7, 10), randn(35, 10)],
        },
        grads=True,
    ),
]
