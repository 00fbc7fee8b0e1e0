"""Stage 1: prompts, quoted text and the first image in the form that the denoiser takes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tpuport
from recipes.hunyuan_video.components import Components, release
from recipes.hunyuan_video.options import Options
from recipes.hunyuan_video.prompts import LAYER, tokenize, tokenize_glyphs
from tpuport.foundation.errors import UsageError
from tpuport.model.ported_model import PortedModel

Arrays = dict[str, jax.Array]


def chat_states(encoder: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the hidden states (B, L, D) that enter the text model's last two layers."""
    found = encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
    return found.hidden_states[LAYER]


def glyph_states(encoder: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return byT5's last hidden states (B, L, D)."""
    return encoder(input_ids=ids, attention_mask=mask.float())[0]


def picture_states(encoder: Any, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return SigLIP's last hidden states (B, N, D) of pixels (B, 3, H, W)."""
    return encoder(pixel_values=pixel_values).last_hidden_state


def encode(components: Components, options: Options, mesh: Mesh | None = None) -> Arrays:
    """Compute every input of a denoising step except the latents.

    Args:
        components: The model folder.
        options: Options of the run.
        mesh: Shards the text model's weights along its axis fsdp; None for one device.

    Returns:
        "text" (P, 1000, D) with "text_mask", "glyph" (P, 256, D) with "glyph_mask". With guidance
        also the same of the negative prompt, named "negative_...", of one row. For i2v also
        "picture" (1, N, D) and "first_frame" (1, C, 1, h, w), scaled latents.

    Raises:
        UsageError: A prompt is too long, or a component or the image is missing.
        CheckpointError: Weights are damaged.
    """
    prompts = list(options.prompts)
    # One batch for all prompts: one program, and one pass over the weights.
    texts = [*prompts, options.negative_prompt] if options.has_guidance else prompts
    quoting = texts
    if options.has_guidance and not components.quotes_of_negatives:
        quoting = [*prompts, ""]
    found = {**_chats(components, texts, mesh), **_glyphs(components, quoting)}
    named = {name: rows[: len(prompts)] for name, rows in found.items()}
    if options.has_guidance:
        named |= {f"negative_{name}": rows[len(prompts) :] for name, rows in found.items()}
    if options.task == "i2v":
        named |= _picture(components, options)
    return named


def _chats(components: Components, texts: Sequence[str], mesh: Mesh | None) -> Arrays:
    tokens = tokenize(components.tokenizer("tokenizer"), texts)

    def shard(ported: PortedModel) -> None:
        if mesh is not None:
            tpuport.shard(ported, mesh, "fsdp")

    encoder = components.ported("text_encoder", (chat_states,), shard)
    states = _run(encoder, chat_states, tokens.ids, tokens.mask)
    release(encoder)
    mask = jnp.asarray(tokens.mask[:, tokens.opening :])
    return {"text": states[:, tokens.opening :], "text_mask": mask}


def _glyphs(components: Components, texts: Sequence[str]) -> Arrays:
    """Encode the quoted text.

    Rows without any are zeros, and byT5 is loaded only if a row has some.
    """
    tokens = tokenize_glyphs(components.tokenizer("tokenizer_2"), texts)
    rows = tokens.mask.any(axis=1)
    width = components.config("text_encoder_2")["d_model"]
    states = jnp.zeros((*tokens.ids.shape, width), components.dtype)
    if rows.any():
        encoder = components.ported("text_encoder_2", (glyph_states,))
        quoted = _run(encoder, glyph_states, tokens.ids[rows], tokens.mask[rows])
        release(encoder)
        states = states.at[np.flatnonzero(rows)].set(quoted)
    return {"glyph": states, "glyph_mask": jnp.asarray(tokens.mask)}


def _picture(components: Components, options: Options) -> Arrays:

    size = components.size_of(options)
    image = components.fitted(read_image(options), size)
    return encode_picture(components, image, image)


def encode_picture(components: Components, seen: Any, first_frame: Any) -> Arrays:
    """Compute "picture" and "first_frame" of `encode`.

    Args:
        components: The model folder.
        seen: The picture for SigLIP, as PIL's image of any size.
        first_frame: The picture in the size of the video.
    """
    from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

    from recipes.hunyuan_video.decode import encode_image, load_vae

    pixels = components.image_processor().preprocess(
        images=seen, do_resize=True, return_tensors="pt", do_convert_rgb=True
    )["pixel_values"]
    encoder = components.ported("image_encoder", (picture_states,))
    vae = load_vae(components, "encoder")
    frame = HunyuanVideo15ImageProcessor(do_resize=False).preprocess(first_frame)
    given = jnp.asarray(pixels.numpy(), components.dtype)
    found = {
        "picture": _run(encoder, picture_states, given),
        "first_frame": encode_image(vae, jnp.asarray(frame)),
    }
    for ported in (encoder, vae.ported):
        release(ported)
    return found


def read_image(options: Options) -> Any:
    """Return the image of a run as PIL's in RGB.

    Raises:
        UsageError: The file is no picture.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(str(options.image)) as image:
            return image.convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise UsageError(f"image={options.image!r} is no picture: {error}") from error


def _run(ported: Any, method: Any, *args: Any) -> jax.Array:
    def call(params: Any, buffers: Any, *args: Any) -> jax.Array:
        return ported.apply(params, buffers, None, *args, method=method.__name__)[0]

    given = [jnp.asarray(arg) for arg in args]
    if ported.mesh is None:
        return jax.jit(call)(ported.params, ported.buffers, *given)
    given = jax.device_put(given, NamedSharding(ported.mesh, P()))
    found = jax.jit(call)(ported.params, ported.buffers, *given)
    # The next stages may use another mesh or none.
    return jax.device_put(jax.device_get(found), jax.devices()[0])
