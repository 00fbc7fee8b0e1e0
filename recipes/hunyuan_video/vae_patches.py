"""Replacements in the VAE's own classes while they are traced."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from tpuport.foundation.errors import UsageError

# The attention classes of diffusers and of upstream, with the names of their projections.
PROJECTIONS = {
    "HunyuanVideo15AttnBlock": ("to_q", "to_k", "to_v"),
    "AttnBlock": ("q", "k", "v"),
}


@contextlib.contextmanager
def causal_by_frames(model: torch.nn.Module) -> Iterator[None]:
    """Compute the mask of a VAE's mid blocks, by which a frame sees itself and those before it.

    The classes fill a mask of (tokens, tokens) row by row in Python, 7,936 rows for a tile of 31
    latent frames. One comparison of frames is the same mask. One attention for all frames has
    twice the products of one for each, which are a thousandth of a tile's, and compiles in the
    time of one. All models of these classes are affected; the classes are restored afterwards.

    Args:
        model: A VAE that has such blocks, diffusers' or upstream's.

    Raises:
        UsageError: It has none.
    """
    found = {type(m) for m in model.modules() if type(m).__name__ in PROJECTIONS}
    if not found:
        raise UsageError(
            f"model={type(model).__name__}: expected a VAE of HunyuanVideo-1.5, which has an"
            f" attention block {' or '.join(PROJECTIONS)}, and found none. What to do: give"
            " diffusers' AutoencoderKLHunyuanVideo15 or upstream's AutoencoderKLConv3D"
        )
    before = {block: block.forward for block in found}
    try:
        for block in found:
            block.forward = _attend
        yield
    finally:
        for block, forward in before.items():
            block.forward = forward


def _attend(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute an attention block with a computed mask, from (B, C, T, H, W) to the same shape."""
    names = PROJECTIONS[type(self).__name__]
    normed = self.norm(x)
    query, key, value = (_tokens(getattr(self, name)(normed)) for name in names)
    _, _, frames, height, width = x.shape
    mask = None
    if frames > 1:
        frame = torch.arange(frames, device=x.device).repeat_interleave(height * width)
        mask = frame[:, None] >= frame
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    out = out.squeeze(1).transpose(1, 2)
    return x + self.proj_out(out.unflatten(2, (frames, height, width)))


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """Reshape (B, C, T, H, W) -> (B, 1, T H W, C): one head."""
    return x.flatten(2).transpose(1, 2).unsqueeze(1).contiguous()
