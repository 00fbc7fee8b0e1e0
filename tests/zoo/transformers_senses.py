"""Models of transformers that see or hear: uneven images, padded sound, pictures inside prompts."""

from typing import Any

import torch
from torch import randn

from tests.zoo.case import keep, transformers_case
from tests.zoo.transformers_text import DECODER, ENCODER, SPECIAL, sentences, tokens

_VIT = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 12,
    "patch_size": 4,
}
_SOUND = SPECIAL | {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "conv_dim": (8, 8),
    "conv_stride": (3, 2),
    "conv_kernel": (5, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
_TOWERS = {"text_config": ENCODER, "vision_config": _VIT, "projection_dim": 10}
_IMAGE_TOKEN = 30


def _images(height: int = 12, width: int = 12) -> dict[str, Any]:
    return {"pixel_values": randn(2, 3, height, width)}


def _captions() -> dict[str, Any]:
    return sentences() | _images()


def _sounds() -> dict[str, Any]:
    return {"input_values": randn(2, 61), "attention_mask": keep(40, 61, size=61)}


def _pictures_in_prompts(places: int) -> dict[str, Any]:
    """Two prompts with a picture of this many tokens each; the second is padded on the left."""
    ids = tokens(2, places + 5)
    ids[0, 1 : 1 + places] = _IMAGE_TOKEN
    ids[1, 3 : 3 + places] = _IMAGE_TOKEN
    mask = keep(places + 5, places + 3, size=places + 5, left=True)
    return {"input_ids": ids, "attention_mask": mask}


def _qwen_inputs() -> dict[str, Any]:
    prompts = _pictures_in_prompts(4)
    kinds = (prompts["input_ids"] == _IMAGE_TOKEN).int()
    grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
    return prompts | {
        "pixel_values": randn(32, 24),
        "image_grid_thw": grid,
        "mm_token_type_ids": kinds,
    }


IMAGES = [
    transformers_case("ViTModel", _VIT, _images, grads=True),
    transformers_case("Dinov2Model", _VIT | {"mlp_ratio": 2}, lambda: _images(12, 20)),
    transformers_case(
        "SwinModel",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2]}
        | {"window_size": 3, "mlp_ratio": 2.0},
        lambda: _images(16, 16),
        grads=True,
    ),
    transformers_case(
        "Swinv2Model",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2], "num_heads": [2]}
        | {"window_size": 3, "mlp_ratio": 2.0},
        lambda: _images(16, 16),
    ),
    transformers_case(
        "ConvNextModel",
        {"num_stages": 2, "hidden_sizes": [8, 12], "depths": [1, 1], "patch_size": 2},
        lambda: _images(12, 20),
    ),
    transformers_case(
        "SegformerForSemanticSegmentation",
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]}
        | {"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2]}
        | {"mlp_ratios": [2, 2], "decoder_hidden_size": 8},
        lambda: _images(12, 20),
    ),
    transformers_case(
        "DetrForObjectDetection",
        {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
        | {
            "backbone_config": {"model_type": "resnet", "embedding_size": 8, "depths": [1, 1]}
            | {"hidden_sizes": [8, 12], "out_features": ["stage2"], "layer_type": "basic"}
        }
        | {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 20}
        | {"decoder_ffn_dim": 20, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
        | {"num_queries": 5},
        lambda: (
            _images(24, 32)
            | {"pixel_mask": torch.stack([torch.ones(24, 32), torch.ones(24, 32).tril()]).long()}
        ),
    ),
    transformers_case(
        "DPTForDepthEstimation",
        _VIT
        | {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "is_hybrid": False}
        | {"neck_hidden_sizes": [4, 4, 8, 8], "fusion_hidden_size": 8, "head_in_index": -1}
        | {"readout_type": "project", "reassemble_factors": [2, 1, 1, 0.5]},
        _images,
    ),
    transformers_case(
        "VideoMAEModel",
        _VIT | {"num_frames": 4, "tubelet_size": 2},
        lambda: {"pixel_values": randn(2, 4, 3, 12, 12)},
    ),
    transformers_case(
        "SamModel",
        {
            "vision_config": {"hidden_size": 16, "output_channels": 8, "num_hidden_layers": 2}
            | {"num_attention_heads": 2, "image_size": 24, "patch_size": 4, "window_size": 4}
            | {"global_attn_indexes": [1], "mlp_dim": 20, "num_pos_feats": 4}
        }
        | {
            "prompt_encoder_config": {"hidden_size": 8, "image_size": 24, "patch_size": 4}
            | {"mask_input_channels": 4, "image_embedding_size": 6}
        }
        | {
            "mask_decoder_config": {"hidden_size": 8, "mlp_dim": 12, "num_hidden_layers": 1}
            | {"num_attention_heads": 2, "iou_head_hidden_dim": 8, "attention_downsample_rate": 1}
        },
        lambda: (
            _images(24, 24)
            | {"input_points": 24 * torch.rand(2, 1, 3, 2)}
            | {"input_labels": torch.tensor([[[1, 0, -10]], [[1, 1, 0]]])}
        ),
    ),
]

SOUNDS = [
    transformers_case("Wav2Vec2Model", _SOUND, _sounds, grads=True),
    transformers_case(
        "HubertModel",
        _SOUND | {"feat_extract_norm": "layer", "do_stable_layer_norm": True},
        _sounds,
    ),
    transformers_case(
        "WhisperModel",
        SPECIAL
        | {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 20}
        | {"decoder_ffn_dim": 20, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
        | {"num_mel_bins": 6, "max_source_positions": 9, "max_target_positions": 8}
        | {"decoder_start_token_id": 1},
        lambda: {
            "input_features": randn(2, 6, 18),
            "decoder_input_ids": tokens(2, 5),
            "decoder_attention_mask": keep(3, 5, size=5),
        },
    ),
]

SEQUENCES = [
    transformers_case(
        "PatchTSTModel",
        {"num_input_channels": 2, "context_length": 14, "patch_length": 4, "patch_stride": 2}
        | {"d_model": 16, "num_attention_heads": 2, "ffn_dim": 20, "num_hidden_layers": 1},
        lambda: {
            "past_values": randn(2, 14, 2),
            "past_observed_mask": keep(9, 14, size=14).bool()[:, :, None].repeat(1, 1, 2),
        },
    ),
    transformers_case(
        "TimeSeriesTransformerModel",
        {"prediction_length": 3, "context_length": 6, "lags_sequence": [1, 2]}
        | {"num_time_features": 2, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
        | {"encoder_ffn_dim": 20, "decoder_ffn_dim": 20},
        lambda: {
            "past_values": randn(2, 8),
            "past_time_features": randn(2, 8, 2),
            "past_observed_mask": keep(5, 8, size=8, left=True).float(),
            "future_values": randn(2, 3),
            "future_time_features": randn(2, 3, 2),
        },
    ),
]

TOGETHER = [
    transformers_case("CLIPModel", _TOWERS, _captions, grads=True),
    transformers_case("SiglipModel", _TOWERS, _captions),
    transformers_case(
        "LayoutLMModel",
        ENCODER | {"max_2d_position_embeddings": 50},
        lambda: sentences() | {"bbox": torch.randint(25, (2, 7, 4)) + torch.tensor([0, 0, 25, 25])},
    ),
    transformers_case(
        "Qwen2VLModel",
        {
            "text_config": DECODER
            | {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [1, 1, 0],
                }
            }
        }
        | {
            "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2}
            | {"mlp_ratio": 2, "patch_size": 2, "temporal_patch_size": 2}
        }
        | {"image_token_id": _IMAGE_TOKEN, "video_token_id": 29, "vision_start_token_id": 28},
        _qwen_inputs,
    ),
    transformers_case(
        "LlavaModel",
        {"text_config": DECODER | {"model_type": "llama"}}
        | {"vision_config": _VIT | {"model_type": "clip_vision_model"}}
        | {"image_token_index": _IMAGE_TOKEN, "vision_feature_layer": -1},
        lambda: _pictures_in_prompts(9) | _images(),
    ),
    transformers_case(
        "InternVLModel",
        {"text_config": DECODER | {"model_type": "qwen2"}}
        | {"vision_config": _VIT | {"image_size": [16, 16], "patch_size": [4, 4]}}
        | {"image_token_id": _IMAGE_TOKEN, "downsample_ratio": 0.5},
        lambda: _pictures_in_prompts(4) | _images(16, 16),
    ),
]

SENSES = [*IMAGES, *SOUNDS, *SEQUENCES, *TOGETHER]
