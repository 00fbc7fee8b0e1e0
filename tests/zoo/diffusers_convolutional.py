"""UNets and autoencoders of diffusers, each with blocks of every kind that it has."""

from typing import Any

import torch
from torch import randn

from tests.zoo.case import diffusers_case

_VAE = {
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
    "block_out_channels": (4, 8),
    "norm_num_groups": 2,
    "latent_channels": 3,
}


def _picture(height: int = 8, width: int = 12) -> dict[str, Any]:
    return {"sample": randn(2, 3, height, width)}


UNETS = [
    diffusers_case(
        "UNet1DModel",
        {"in_channels": 6, "out_channels": 6, "time_embedding_type": "positional"}
        | {"use_timestep_embedding": True, "freq_shift": 1.0, "flip_sin_to_cos": False}
        | {"down_block_types": ("DownResnetBlock1D", "DownResnetBlock1D")}
        | {"up_block_types": ("UpResnetBlock1D",), "mid_block_type": "MidResTemporalBlock1D"}
        | {"out_block_type": "OutConv1DBlock", "block_out_channels": (8, 16), "act_fn": "swish"},
        lambda: {"sample": randn(2, 6, 8), "timestep": torch.tensor([7, 420])},
    ),
    diffusers_case(
        "UNet2DModel",
        {"sample_size": 8, "block_out_channels": (4, 8), "norm_num_groups": 2}
        | {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "layers_per_block": 1}
        | {"up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 4}
        | {"num_class_embeds": 5},
        lambda: (
            _picture() | {"timestep": torch.tensor([7, 420]), "class_labels": torch.tensor([4, 1])}
        ),
    ),
    diffusers_case(
        "UNet2DModel",
        {"sample_size": 8, "block_out_channels": (4, 8), "norm_num_groups": 2, "in_channels": 7}
        | {"down_block_types": ("ResnetDownsampleBlock2D",) * 2, "layers_per_block": 1}
        | {"up_block_types": ("ResnetUpsampleBlock2D",) * 2, "add_attention": False}
        | {"resnet_time_scale_shift": "scale_shift", "time_embedding_type": "learned"}
        | {"num_train_timesteps": 10},
        lambda: {"sample": randn(2, 7, 8, 8), "timestep": torch.tensor([7, 2])},
        note="decoder_of_ConsistencyDecoderVAE",
    ),
    diffusers_case(
        "UNet2DConditionModel",
        {"sample_size": 8, "block_out_channels": (4, 8), "norm_num_groups": 2}
        | {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "layers_per_block": 1}
        | {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 6}
        | {
            "attention_head_dim": 2,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 4,
        }
        | {"projection_class_embeddings_input_dim": 13},
        lambda: {
            "sample": randn(2, 4, 8, 12),
            "timestep": 420,
            "encoder_hidden_states": randn(2, 5, 6),
            "encoder_attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
            "added_cond_kwargs": {"text_embeds": randn(2, 5), "time_ids": randn(2, 2)},
        },
        grads=True,
    ),
    diffusers_case(
        "UNet3DConditionModel",
        {"sample_size": 8, "block_out_channels": (4,), "norm_num_groups": 2}
        | {"down_block_types": ("CrossAttnDownBlock3D",), "layers_per_block": 1}
        | {"up_block_types": ("CrossAttnUpBlock3D",), "cross_attention_dim": 6}
        | {"attention_head_dim": 2},
        lambda: {
            "sample": randn(1, 4, 2, 4, 6),
            "timestep": torch.tensor([420]),
            "encoder_hidden_states": randn(1, 5, 6),
        },
    ),
    diffusers_case(
        "UNetMotionModel",
        {"sample_size": 8, "block_out_channels": (4,), "norm_num_groups": 2}
        | {"down_block_types": ("CrossAttnDownBlockMotion",), "layers_per_block": 1}
        | {"up_block_types": ("CrossAttnUpBlockMotion",)}
        | {"cross_attention_dim": 6, "num_attention_heads": 2, "motion_num_attention_heads": 2},
        lambda: {
            "sample": randn(1, 4, 2, 4, 6),
            "timestep": torch.tensor([420]),
            "encoder_hidden_states": randn(2, 5, 6),
        },
    ),
    diffusers_case(
        "ControlNetModel",
        {"block_out_channels": (4, 8), "norm_num_groups": 2, "layers_per_block": 1}
        | {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "cross_attention_dim": 6}
        | {"attention_head_dim": 2, "conditioning_embedding_out_channels": (4, 4)},
        lambda: {
            "sample": randn(2, 4, 4, 6),
            "timestep": torch.tensor([7, 420]),
            "encoder_hidden_states": randn(2, 5, 6),
            "controlnet_cond": randn(2, 3, 8, 12),
            "conditioning_scale": 0.5,
        },
    ),
]

AUTOENCODERS = [
    diffusers_case("AutoencoderKL", _VAE, _picture, grads=True),
    diffusers_case(
        "AsymmetricAutoencoderKL",
        {"down_block_types": _VAE["down_block_types"], "up_block_types": _VAE["up_block_types"]}
        | {"down_block_out_channels": (4, 8), "up_block_out_channels": (4, 8)}
        | {"norm_num_groups": 2, "latent_channels": 3, "layers_per_up_block": 1},
        lambda: _picture() | {"mask": torch.ones(2, 1, 8, 12).tril()},
    ),
    diffusers_case(
        "AutoencoderTiny",
        {"encoder_block_out_channels": (4, 4), "decoder_block_out_channels": (4, 4)}
        | {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)},
        _picture,
        grads=True,
    ),
    diffusers_case("VQModel", _VAE | {"num_vq_embeddings": 13, "vq_embed_dim": 3}, _picture),
    diffusers_case(
        "AutoencoderKLWan",
        {"base_dim": 4, "z_dim": 2, "dim_mult": [1, 1], "num_res_blocks": 1}
        | {"temperal_downsample": [True], "latents_mean": [0.1, 0.2], "latents_std": [1.5, 0.5]},
        lambda: {"sample": randn(1, 3, 5, 4, 4)},
    ),
    diffusers_case(
        "AutoencoderDC",
        {"in_channels": 3, "latent_channels": 4, "attention_head_dim": 4}
        | {"encoder_block_types": ("ResBlock", "EfficientViTBlock")}
        | {"decoder_block_types": ("ResBlock", "EfficientViTBlock")}
        | {"encoder_block_out_channels": (4, 8), "decoder_block_out_channels": (4, 8)}
        | {"encoder_layers_per_block": (1, 1), "decoder_layers_per_block": (1, 1)}
        | {"encoder_qkv_multiscales": ((), (5,)), "decoder_qkv_multiscales": ((), (5,))}
        | {"downsample_block_type": "Conv", "upsample_block_type": "interpolate"},
        _picture,
    ),
    diffusers_case(
        "AutoencoderOobleck",
        {"encoder_hidden_size": 4, "downsampling_ratios": [2, 3], "channel_multiples": [1, 2]}
        | {"decoder_channels": 4, "decoder_input_channels": 2, "audio_channels": 2},
        lambda: {"sample": randn(2, 2, 18)},
    ),
    diffusers_case(
        "AutoencoderKLLTXVideo",
        {"latent_channels": 4, "block_out_channels": (4, 8), "decoder_block_out_channels": (4, 8)}
        | {"down_block_types": ("LTXVideoDownBlock3D",) * 2, "layers_per_block": (1, 1, 1)}
        | {"decoder_layers_per_block": (1, 1, 1), "spatio_temporal_scaling": (True, False)}
        | {"decoder_spatio_temporal_scaling": (True, False), "patch_size": 2}
        | {"decoder_inject_noise": (False,) * 3, "downsample_type": ("conv", "conv")}
        | {"upsample_residual": (False, False), "upsample_factor": (1, 1)},
        lambda: {"sample": randn(1, 3, 3, 8, 8)},
    ),
    diffusers_case(
        "AutoencoderKLTemporalDecoder",
        {"down_block_types": _VAE["down_block_types"], "block_out_channels": (32, 32)},
        lambda: {"sample": randn(4, 3, 4, 4), "num_frames": 2},
    ),
    diffusers_case(
        "Cosmos3AVAEAudioTokenizer",
        {"sampling_rate": 16, "vocoder_input_dim": 4, "dec_dim": 4, "dec_c_mults": (1, 2)}
        | {"dec_strides": (2, 2), "hop_size": 4, "enc_dim": 4, "enc_num_blocks": 1}
        | {"enc_n_fft": 8, "enc_hop_length": 2, "enc_latent_dim": 8, "enc_c_mults": (1,)}
        | {"enc_strides": (2,), "enc_intermediate_dim": 8, "enc_num_layers": 1},
        lambda: {"sample": 0.3 * randn(2, 2, 16)},
    ),
]
