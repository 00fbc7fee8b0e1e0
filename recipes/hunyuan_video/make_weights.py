"""A tiny model in the published folder's layout, with random weights: all that a run needs."""

import importlib
import json
from pathlib import Path
from typing import Any

import torch

from recipes.hunyuan_video.prompts import system_message
from recipes.quiet import quietly
from recipes.small_tokenizer import SPECIAL, train_tokenizer
from tpuport.checkpoints.atomic import replacing_folder

# As Qwen 2.5's, without tools and without a system message of its own.
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LATENT, _TEXT, _GLYPH, _IMAGE = 8, 32, 24, 40


def make_weights(folder: str | Path, seed: int = 0) -> Path:
    """Write a tiny HunyuanVideo-1.5, the same for the same seed, as diffusers publishes the large.

    All components of the image-to-video pipeline are there, so both tasks run from it: tokenizers
    and image processor, too. Its videos are noise.

    Args:
        folder: where to; what is there is replaced.
        seed: of the weights.

    Returns:
        The folder.

    Raises:
        CheckpointError: it cannot be written; what was there still is.
    """
    diffusers: Any = importlib.import_module("diffusers")  # its lazy names have no types
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    with quietly(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = diffusers.HunyuanVideo15ImageToVideoPipeline(
            **_models(len(tokenizer)),
            **_image_processor(),
            tokenizer=tokenizer,
            tokenizer_2=_glyph_tokenizer(),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=9.0),
            guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
        )
        with replacing_folder(folder, keep=lambda name: False) as temporary:
            pipeline.save_pretrained(temporary)
    return folder


def _models(vocab_size: int) -> dict[str, torch.nn.Module]:
    from transformers import SiglipVisionConfig, SiglipVisionModel, T5Config, T5EncoderModel
    from transformers.models.qwen2_5_vl import Qwen2_5_VLTextModel
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig

    diffusers: Any = importlib.import_module("diffusers")
    text = Qwen2_5_VLTextConfig(
        vocab_size=vocab_size,
        hidden_size=_TEXT,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    glyph = T5Config(
        vocab_size=384,
        d_model=_GLYPH,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=3,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
    )
    image = SiglipVisionConfig(
        hidden_size=_IMAGE,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=42,
        patch_size=14,
    )
    return {
        "text_encoder": Qwen2_5_VLTextModel(text).eval(),
        "text_encoder_2": T5EncoderModel(glyph).eval(),
        "image_encoder": SiglipVisionModel(image).eval(),
        "transformer": diffusers.HunyuanVideo15Transformer3DModel(
            in_channels=2 * _LATENT + 1,
            out_channels=_LATENT,
            num_attention_heads=8,  # as many as a small slice has chips
            attention_head_dim=16,
            num_layers=3,
            text_embed_dim=_TEXT,
            text_embed_2_dim=_GLYPH,
            image_embed_dim=_IMAGE,
            rope_axes_dim=(4, 6, 6),
        ).eval(),
        "vae": diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=_LATENT, block_out_channels=(8, 8, 16, 16, 16), layers_per_block=1
        ).eval(),
    }


def _tokenizer() -> Any:
    """Qwen 2.5's kind, trained on the system message."""
    from transformers import Qwen2Tokenizer

    trained = json.loads(train_tokenizer([system_message()], vocab_size=800).to_str())["model"]
    merges: Any = [tuple(pair) for pair in trained["merges"]]
    tokenizer = Qwen2Tokenizer(vocab=trained["vocab"], merges=merges)
    tokenizer.add_tokens(list(SPECIAL), special_tokens=True)
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _glyph_tokenizer() -> Any:
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


def _image_processor() -> dict[str, Any]:
    from transformers import SiglipImageProcessorPil

    return {"feature_extractor": SiglipImageProcessorPil(size={"height": 42, "width": 42})}
