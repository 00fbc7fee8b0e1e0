"""Replacements in the VAE's own classes while they are traced."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tpuport.foundation.errors import UsageError

# The attention classes of diffusers and of upstream, with the names of their projections.
PROJECTIONS = {
    "HunyuanVideo15AttnBlock": ("to_q", "to_k", "to_v"),
    "AttnBlock": ("q", "k", "v"),
}
# Their convolutions over space and time, which repeat the edges of what they get.
CONVOLUTIONS = ("HunyuanVideo15CausalConv3d", "CausalConv3d")


@dataclass(frozen=True)
class _Part:
    """The part of a tile that has data.

    Attributes:
        extents: (B, 2) integers: heights and widths of the part, from the first row and column.
        size: Height and width of the whole tile.
    """

    extents: torch.Tensor
    size: tuple[int, ...]

    def inside(self, index: int, size: int) -> torch.Tensor:
        """Return the part's height (0) or width (1) in activations of another size, as (B,)."""
        return self.extents[:, index] * size // self.size[index]


_part: ContextVar[_Part | None] = ContextVar("part", default=None)


@contextlib.contextmanager
def only_part(extents: torch.Tensor | None, size: tuple[int, ...]) -> Iterator[None]:
    """Compute the part of a tile as if it were alone, inside `patched_vae`.

    A smaller tile at the edge of an image, filled up to the size of the others, then needs no
    program of its own: convolutions repeat the part's last row and column, and attention sees
    tokens of the part. Results outside of the part are without meaning.

    Args:
        extents: (B, 2) integers, the heights and widths of the parts. None for whole tiles.
        size: Height and width of the tile to which the extents refer.
    """
    token = _part.set(None if extents is None else _Part(extents, size))
    try:
        yield
    finally:
        _part.reset(token)


@contextlib.contextmanager
def patched_vae(model: torch.nn.Module) -> Iterator[None]:
    """Compute the masks of a VAE's mid blocks, and let convolutions end at the part of a tile.

    By the mask a frame sees itself and those before it. The classes fill a mask of (tokens, tokens)
    row by row in Python, 7,936 rows for a tile of 31 latent frames. One comparison of frames is the
    same mask. One attention for all frames has twice the products of one for each, which are a
    thousandth of a tile's, and compiles in the time of one. All models of these classes are
    affected; the classes are restored afterwards.

    Args:
        model: A VAE that has such blocks, diffusers' or upstream's.

    Raises:
        UsageError: It has none. Or, inside, for a part of a tile: its convolutions do not repeat
            edges.
    """
    found = {type(m) for m in model.modules() if type(m).__name__ in PROJECTIONS}
    if not found:
        raise UsageError(
            f"model={type(model).__name__}: expected a VAE of HunyuanVideo-1.5, which has an"
            f" attention block {' or '.join(PROJECTIONS)}, and found none. What to do: give"
            " diffusers' AutoencoderKLHunyuanVideo15 or upstream's AutoencoderKLConv3D"
        )
    convolutions = {type(m) for m in model.modules() if type(m).__name__ in CONVOLUTIONS}
    before = {cls: cls.forward for cls in found | convolutions}
    try:
        for block in found:
            block.forward = _attend
        for convolution in convolutions:
            convolution.forward = _at_the_parts_edge(convolution.forward)
        yield
    finally:
        for cls, forward in before.items():
            cls.forward = forward


def _at_the_parts_edge(forward: Any) -> Any:
    """Return a convolution's forward which repeats the last row and column of the part."""

    def convolve(self: Any, x: torch.Tensor) -> torch.Tensor:
        part = _part.get()
        if part is None:
            return forward(self, x)
        if self.pad_mode != "replicate":
            raise UsageError(
                f"pad_mode={self.pad_mode!r}: expected convolutions of the VAE that repeat edges"
                " ('replicate') where tiles are of several shapes. What to do: choose tiles that"
                " the size of the video is a multiple of, or a video that fits in one"
            )
        left, _, top, _, _, _ = self.time_causal_padding
        for index, margin in ((0, top), (1, left)):
            dim = index - 2
            end = part.inside(index, x.shape[dim])[:, None]
            place = torch.arange(x.shape[dim], device=x.device)
            for further in range(margin):
                here = (place == end + further).unflatten(0, (-1, 1, 1))
                here = here[..., None] if index == 0 else here[..., None, :]
                # The row before it is the part's last one by now, so that nothing is gathered.
                x = torch.where(here, x.roll(1, dim), x)
        return forward(self, x)

    return convolve


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
    part = _part.get()
    if part is not None:
        rows = torch.arange(height, device=x.device) < part.inside(0, height)[:, None]
        columns = torch.arange(width, device=x.device) < part.inside(1, width)[:, None]
        seen = (rows[:, :, None] & columns[:, None]).flatten(1).repeat(1, frames)[:, None, None]
        mask = seen if mask is None else seen & mask
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    out = out.squeeze(1).transpose(1, 2)
    return x + self.proj_out(out.unflatten(2, (frames, height, width)))


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """Reshape (B, C, T, H, W) -> (B, 1, T H W, C): one head."""
    return x.flatten(2).transpose(1, 2).unsqueeze(1).contiguous()
