"""The diffusers models of the zoo, in small configurations of their own.

Contents:
    DIFFUSERS   models that are exact
    REFUSED     models that the port refuses, with the line that the error must name
    RANDOM      models whose forward draws random numbers
"""

from typing import Any

import torch
from torch import randn

from tests.zoo.case import Case, diffusers_case
from tests.zoo.diffusers_convolutional import AUTOENCODERS, UNETS
from tests.zoo.diffusers_images import IMAGES
from tests.zoo.diffusers_videos import VIDEOS

DIFFUSERS = [*IMAGES, *VIDEOS, *UNETS, *AUTOENCODERS]


def _hidream_inputs() -> dict[str, Any]:
    return {
        "hidden_states": randn(2, 4, 4, 4),
        "timesteps": torch.tensor([7, 420]),
        "encoder_hidden_states_t5": randn(2, 3, 6),
        "encoder_hidden_states_llama3": randn(2, 2, 3, 6),
        "pooled_embeds": randn(2, 5),
    }


# The experts' token counts leave the program as Python integers, by which the tokens are split.
REFUSED: list[tuple[Case, str]] = [
    (
        diffusers_case(
            "HiDreamImageTransformer2DModel",
            {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1}
            | {"num_single_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2}
            | {"caption_channels": [6, 6], "text_emb_dim": 5, "num_routed_experts": 2}
            | {"num_activated_experts": 1, "axes_dims_rope": (4, 2, 2), "max_resolution": (4, 4)}
            | {"llama_layers": (0, 1), "force_inference_output": True},
            _hidream_inputs,
        ),
        "tokens_per_expert",
    ),
]

RANDOM = [
    diffusers_case(
        "ConsistencyDecoderVAE",
        {"encoder_block_out_channels": (2, 4), "encoder_norm_num_groups": 2, "latent_channels": 4}
        | {"encoder_down_block_types": ("DownEncoderBlock2D",) * 2, "encoder_out_channels": 4}
        | {"decoder_block_out_channels": (2, 4), "decoder_norm_num_groups": 2}
        | {"decoder_down_block_types": ("ResnetDownsampleBlock2D",) * 2, "decoder_in_channels": 7}
        | {"decoder_up_block_types": ("ResnetUpsampleBlock2D",) * 2, "decoder_layers_per_block": 1},
        lambda: {"sample": randn(2, 3, 8, 8)},
    ),
    diffusers_case(
        "AutoencoderKLLTXVideo",
        {"latent_channels": 4, "block_out_channels": (4, 8), "decoder_block_out_channels": (8, 8)}
        | {"down_block_types": ("LTXVideoDownBlock3D",) * 2, "layers_per_block": (1, 1, 1)}
        | {"decoder_layers_per_block": (1, 1, 1), "spatio_temporal_scaling": (True, False)}
        | {"decoder_spatio_temporal_scaling": (True, False), "patch_size": 2}
        | {"decoder_inject_noise": (True, True, False), "timestep_conditioning": True}
        | {"downsample_type": ("conv", "conv"), "upsample_residual": (False, False)}
        | {"upsample_factor": (1, 1)},
        lambda: {"sample": randn(1, 3, 3, 8, 8), "temb": torch.tensor([0.05])},
        note="noise",
    ),
]
