"""The results of `encode` as the rows that a denoising step takes."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.foundation.errors import UsageError

Arrays = dict[str, jax.Array]
TEXTS = ("text", "text_mask", "glyph", "glyph_mask")


def rows_of(
    given: Mapping[str, jax.Array], shape: tuple[int, ...], *, guidance: float, picture_width: int
) -> Arrays:
    """Return the conditions of HunyuanVideo-1.5's classes, by name.

    Args:
        given: Result of `encode.encode`.
        shape: Shape of the latents, (P, C, T, h, w).
        guidance: Above 1 the rows of the negative prompt come first, then those of the prompts.
        picture_width: Width of a picture's tokens.

    Returns:
        Rows B = 2P with guidance, else P: "text" (B, L, D), "text_mask" (B, L), "glyph" (B, G, E),
        "glyph_mask" (B, G); "condition" (B, C + 1, T, h, w), the latents of the first frame and a
        mask of their positions; "picture" (B, N, F), with N = 0 for text to video. If there is a
        video to make larger, "low" (B, C + 1, T, h, w), its latents and a channel of ones.

    Raises:
        UsageError: The first frame does not have the latents' size.
    """
    rows = partial(_rows, shape=shape, guidance=guidance, picture_width=picture_width)
    # As one program: each of some twenty operations would else be compiled.
    return jax.jit(rows)(dict(given))


def _rows(given: Arrays, *, shape: tuple[int, ...], guidance: float, picture_width: int) -> Arrays:
    count = shape[0]
    if guidance > 1:
        negative = {n: jnp.repeat(given[f"negative_{n}"], count, axis=0) for n in TEXTS}
        found = {n: jnp.concatenate([negative[n], given[n]]) for n in TEXTS}
    else:
        found = {n: given[n] for n in TEXTS}
    rows, dtype = found["text"].shape[0], found["text"].dtype
    condition = _condition(given.get("first_frame"), shape, dtype)
    # No picture gives no tokens: the same result as the network's for zeros, at less attention.
    picture = given.get("picture", jnp.zeros((1, 0, picture_width)))
    if (low := given.get("low")) is not None:
        low = jnp.concatenate([low, jnp.ones_like(low[:, :1])], axis=1)
        found["low"] = jnp.tile(low.astype(dtype), (rows // count, 1, 1, 1, 1))
    return {
        **found,
        "condition": jnp.tile(condition, (rows // count, 1, 1, 1, 1)),
        "picture": jnp.repeat(picture.astype(dtype), rows, axis=0),
    }


def _condition(first_frame: jax.Array | None, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return the latents of the first frame, with a channel of ones at their frame, else zeros."""
    count, channels, *sizes = shape
    found = jnp.zeros((count, channels + 1, *sizes), dtype)
    if first_frame is None:
        return found
    if first_frame.shape[1:] != (channels, 1, *sizes[1:]):
        raise UsageError(
            f"first_frame: expected latents {(1, channels, 1, *sizes[1:])} for a video of this"
            f" size, got {first_frame.shape}. What to do: encode again with this size"
        )
    found = found.at[:, :channels, 0].set(first_frame[:, :, 0].astype(dtype))
    return found.at[:, channels, 0].set(1)
