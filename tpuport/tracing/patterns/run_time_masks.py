"""Masks that are simpler at run time than the program can tell: causal, or without empty rows.

The program compares the mask, which costs little beside attention, and takes one of two kernels.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.tracing.attention.masks.bands import Band, K, Q
from tpuport.tracing.attention.masks.structure import Structure, rows_seen
from tpuport.tracing.attention.masks.tiles import TilePart
from tpuport.tracing.attention.masks.two_valued import NOTHING

# Whether it holds, the structure of the mask if it does, and that in words.
Simpler = tuple[jax.Array, Structure, str]


def if_causal(found: Structure) -> Simpler | None:
    """Return what holds if a mask is causal; None if it cannot be, or is known to be.

    A buffer of ones below the diagonal is state of the model: it may change.
    """
    parts = [*found.rest, *([] if found.bias is None else [found.bias])]
    num_q, num_k = found.shape[2:]
    if len(parts) != 1 or found.band != Band() or found.segments is not None or num_k < num_q:
        return None
    (node,) = parts
    fills = found.fill is not None and found.fill > NOTHING
    if fills or found.tiles.varying(node) != {Q, K}:
        return None
    away = jnp.arange(num_k)[None, :] - jnp.arange(num_q)[:, None]
    below: Any = away <= num_k - num_q
    mask = found.tiles.tile(node, [TilePart(0, n) for n in node.shape])
    if found.bias is None:
        same = mask == below
    else:
        same = jnp.where(below, mask == 0, mask <= NOTHING)
    band = Band(high=num_k - num_q)
    causal = replace(found, rest=[], bias=None, fill=None, band=band)
    return same.all(), causal, "the mask is causal"


def if_rows_see(strict: Structure | None) -> Simpler | None:
    """Return what holds if each query sees a key.

    Args:
        strict: The structure in which keys that a large finite number hides do not count at all.
    """
    seen = None if strict is None else rows_seen(strict)
    if strict is None or seen is None:
        return None
    return seen.all(), strict, "each query sees a key"
