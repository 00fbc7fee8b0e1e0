"""A tiny model with random weights in the published folder's layout, complete enough for a run."""

import importlib
import json
from pathlib import Path
from typing import Any

import torch

from recipes.hunyuan_video.prompts import system_message
from recipes.hunyuan_video.upsampler_weights import tiny_upsampler
from recipes.hunyuan_video.upstream import GLYPH_PREFIX, GLYPHS
from recipes.hunyuan_video.upstream_weights import upstream_transformer, upstream_vae
from recipes.quiet import quietly
from recipes.small_tokenizer import SPECIAL, train_tokenizer
from tpuport.foundation.errors import UsageError
from tpuport.foundation.files import replacing_folder

# Qwen 2.5's template, without tools and without a system message of its own.
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LATENT, _TEXT, _GLYPH, _IMAGE = 8, 32, 24, 40
_HEADS, _HEAD, _BLOCKS, _ROPE = 8, 16, 3, (4, 6, 6)  # as many heads as a small slice has chips
_LEVELS = (8, 8, 16, 16, 16)
LAYOUTS = ("diffusers", "upstream")
_WEIGHTS = "diffusion_pytorch_model.safetensors"
# Widths that upstream's classes and its pipeline hard-code, of a token of glyphs and of a picture.
_UPSTREAM_GLYPH, _UPSTREAM_IMAGE = 1472, 1152
_UPSTREAM_VERSIONS = {"720p_t2v": "t2v", "720p_i2v": "i2v"}
# What a prompt for byT5 may name: each has a token of its own after those of byT5.
_COLOURS, _FONTS = {"white": 0, "black": 1}, {"en-Sans": 0}
_UPSTREAM_TRANSFORMER = {
    "_class_name": "HunyuanVideo_1_5_DiffusionTransformer",
    "patch_size": [1, 1, 1],
    "in_channels": _LATENT,
    "concat_condition": True,
    "out_channels": _LATENT,
    "hidden_size": _HEADS * _HEAD,
    "heads_num": _HEADS,
    "mm_double_blocks_depth": _BLOCKS,
    "mm_single_blocks_depth": 0,
    "rope_dim_list": list(_ROPE),
    "text_states_dim": _TEXT,
    "glyph_byT5_v2": True,
    "vision_projection": "linear",
    "vision_states_dim": _UPSTREAM_IMAGE,
    "use_cond_type_embedding": True,
    "is_reshape_temporal_channels": False,
    "ideal_resolution": "720p",
}
_UPSTREAM_SCHEDULER = {"_class_name": "FlowMatchDiscreteScheduler", "shift": 9.0}
_UPSTREAM_VAE = {
    "_class_name": "AutoencoderKLConv3D",
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": _LATENT,
    "block_out_channels": list(_LEVELS),
    "layers_per_block": 1,
    "ffactor_spatial": 16,
    "ffactor_temporal": 4,
    "sample_size": 256,
    "sample_tsize": 64,
    "scaling_factor": 1.03682,
}


def make_weights(
    folder: str | Path, seed: int = 0, layout: str = "diffusers", *, upstream_widths: bool = False
) -> Path:
    """Write a tiny HunyuanVideo-1.5 in a published layout, the same for the same seed.

    It has all components of the image-to-video pipeline, tokenizers and image processor included,
    so that both tasks run from it. Its videos are noise.

    Args:
        folder: Folder to write to. Its contents are replaced.
        seed: Random seed of the weights.
        layout: "diffusers", one folder per component, or "upstream", see
            `recipes.hunyuan_video.upstream`, which runs with upstream's classes.
        upstream_widths: Give glyphs and pictures the widths that upstream's code hard-codes, as its
            layout has, in diffusers' layout, too.

    Returns:
        The folder.

    Raises:
        UsageError: There is no such layout.
        CheckpointError: It cannot be written. The previous contents are kept.
    """
    if layout not in LAYOUTS:
        raise UsageError(f"layout={layout!r}: expected one of {', '.join(LAYOUTS)}")
    diffusers: Any = importlib.import_module("diffusers")  # its lazy names have no types
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    wide = upstream_widths or layout == "upstream"
    glyph, image = (_UPSTREAM_GLYPH, _UPSTREAM_IMAGE) if wide else (_GLYPH, _IMAGE)
    with quietly(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = diffusers.HunyuanVideo15ImageToVideoPipeline(
            **_models(len(tokenizer), glyph, image),
            **_image_processor(),
            tokenizer=tokenizer,
            tokenizer_2=_glyph_tokenizer(),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=9.0),
            guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
        )
        with replacing_folder(folder, keep=lambda name: False) as temporary:
            if layout == "upstream":
                _write_upstream(temporary, pipeline)
            else:
                pipeline.save_pretrained(temporary)
    return folder


def _write_upstream(folder: Path, pipeline: Any) -> None:
    """Write the components of a diffusers pipeline under upstream's names."""
    from safetensors.torch import save_file

    weights = upstream_transformer(pipeline.transformer.state_dict())
    for version, task in _UPSTREAM_VERSIONS.items():
        _write(folder / "transformer" / version, {**_UPSTREAM_TRANSFORMER, "ideal_task": task})
        save_file(weights, folder / "transformer" / version / _WEIGHTS)
    _write_super_resolution(folder)
    _write(folder / "vae", _UPSTREAM_VAE)
    save_file(upstream_vae(pipeline.vae.state_dict()), folder / "vae" / _WEIGHTS)
    pipeline.text_encoder.save_pretrained(folder / "text_encoder" / "llm")
    pipeline.tokenizer.save_pretrained(folder / "text_encoder" / "llm")
    _write(folder / "scheduler", _UPSTREAM_SCHEDULER, "scheduler_config.json")
    _write_glyphs(folder, pipeline.text_encoder_2)
    pipeline.tokenizer_2.save_pretrained(folder / "text_encoder" / "byt5-small")
    siglip = folder / "vision_encoder" / "siglip"
    pipeline.image_encoder.save_pretrained(siglip / "image_encoder")
    pipeline.feature_extractor.save_pretrained(siglip / "feature_extractor")


def _write_glyphs(folder: Path, encoder: Any) -> None:
    """Write byT5 as published, which upstream enlarges, and the encoder that it then loads."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config.from_dict({**encoder.config.to_dict(), "is_encoder_decoder": True})
    T5ForConditionalGeneration(config).save_pretrained(folder / "text_encoder" / "byt5-small")
    weights = dict(encoder.encoder.state_dict())
    known = weights["embed_tokens.weight"]
    added = known.new_zeros(len(_COLOURS) + len(_FONTS), known.shape[1])
    weights["embed_tokens.weight"] = torch.cat([known, added])
    glyphs = folder / GLYPHS
    glyphs.parent.mkdir(parents=True)
    torch.save({"state_dict": {GLYPH_PREFIX + n: w for n, w in weights.items()}}, glyphs)
    assets = glyphs.parent.parent / "assets"
    _write(assets, _COLOURS, "color_idx.json")
    _write(assets, _FONTS, "multilingual_10-lang_idx.json")


def _write_super_resolution(folder: Path) -> None:
    """Write transformers and upsamplers that make videos larger.

    The transformers have a channel of noise, two of conditions and two of masks in place of one of
    noise, one of conditions and one mask. One of them takes the next timestep, too.
    """
    from safetensors.torch import save_file

    channels = 3 * _LATENT + 2
    for resolution, meanflow in (("720p", False), ("1080p", True)):
        version = f"{resolution}_sr_distilled"
        config = {
            **_UPSTREAM_TRANSFORMER,
            "in_channels": channels,
            "concat_condition": False,
            "ideal_resolution": resolution,
            "use_meanflow": meanflow,
        }
        _write(folder / "transformer" / version, config)
        model = tiny_transformer(
            *(_UPSTREAM_GLYPH, _UPSTREAM_IMAGE), in_channels=channels, use_meanflow=meanflow
        )
        weights = upstream_transformer(model.state_dict())
        save_file(weights, folder / "transformer" / version / _WEIGHTS)
        config, weights = tiny_upsampler(resolution, _LATENT)
        _write(folder / "upsampler" / version, config)
        save_file(weights, folder / "upsampler" / version / _WEIGHTS)


def _write(folder: Path, config: dict[str, Any], name: str = "config.json") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _models(vocab_size: int, glyph_width: int, image_width: int) -> dict[str, torch.nn.Module]:
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
        d_model=glyph_width,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=3,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
    )
    image = SiglipVisionConfig(
        hidden_size=image_width,
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
        "transformer": tiny_transformer(glyph_width, image_width),
        "vae": diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=_LATENT, block_out_channels=_LEVELS, layers_per_block=1
        ).eval(),
    }


def tiny_transformer(
    glyph_width: int = _GLYPH, image_width: int = _IMAGE, **sizes: Any
) -> torch.nn.Module:
    """Return the transformer of a tiny model, its weights drawn from torch's generator."""
    diffusers: Any = importlib.import_module("diffusers")
    tiny = {
        "in_channels": 2 * _LATENT + 1,
        "out_channels": _LATENT,
        "num_attention_heads": _HEADS,
        "attention_head_dim": _HEAD,
        "num_layers": _BLOCKS,
        "text_embed_dim": _TEXT,
        "text_embed_2_dim": glyph_width,
        "image_embed_dim": image_width,
        "rope_axes_dim": _ROPE,
    }
    return diffusers.HunyuanVideo15Transformer3DModel(**{**tiny, **sizes}).eval()


def _tokenizer() -> Any:
    """Return a tokenizer of Qwen 2.5's kind, trained on the system message."""
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
