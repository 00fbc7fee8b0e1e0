"""`nn.TransformerEncoder` with a padding mask: in evaluation it goes through nested tensors."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core.context import current
from tpuport.tracing.patches._count import count


class TransformerEncoderPadding(Shim):
    """`nn.TransformerEncoder.forward` keeps padded tensors, and gives zeros where a nested tensor
    has no rows.
    """

    TARGET = "torch.nn.TransformerEncoder.forward"
    REASON = "nested tensors have data-dependent shapes; plain torchax cannot lower them"

    def replacements(self) -> list[Replacement]:
        eager = nn.TransformerEncoder.forward

        def forward(
            self: nn.TransformerEncoder,
            src: torch.Tensor,
            mask: torch.Tensor | None = None,
            src_key_padding_mask: torch.Tensor | None = None,
            is_causal: bool | None = None,
        ) -> torch.Tensor:
            given = (src, mask, src_key_padding_mask, is_causal)
            if current() is None or src_key_padding_mask is None or not _may_nest(self, src):
                return eager(self, *given)
            count(TransformerEncoderPadding.TARGET)
            if mask is not None or not _is_served(self, src):
                return _without_nesting(eager, self, given)
            return _nested(self, src, src_key_padding_mask, is_causal)

        return [Replacement(nn.TransformerEncoder, "forward", forward)]


def _may_nest(encoder: nn.TransformerEncoder, src: torch.Tensor) -> bool:
    """Return whether eager looks at the padding mask, as the original `forward` decides."""
    allowed = torch.backends.mha.get_fastpath_enabled() and getattr(
        encoder, "use_nested_tensor", False
    )
    return allowed and not encoder.layers[0].training and src.dim() == 3


def _is_served(encoder: nn.TransformerEncoder, src: torch.Tensor) -> bool:
    """Return whether eager then makes a nested tensor, for a mask that pads at the end."""
    if torch.is_autocast_enabled():
        return False
    layer: Any = encoder.layers[0]
    attention = [layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias]
    parts = (layer.self_attn.out_proj, layer.norm1, layer.norm2, layer.linear1, layer.linear2)
    used = [src, *attention, *(p for part in parts for p in (part.weight, part.bias))]
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in used))


def _without_nesting(eager: Any, encoder: nn.TransformerEncoder, given: tuple[Any, ...]) -> Any:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return eager(encoder, *given)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def _nested(
    encoder: nn.TransformerEncoder,
    src: torch.Tensor,
    padding: torch.Tensor,
    is_causal: bool | None,
) -> torch.Tensor:
    """Run the layers with the mask; padded rows of a mask that pads at the end become zeros."""
    added = functional._canonical_mask(
        padding, "src_key_padding_mask", None, "mask", src.dtype, check_other=False
    )
    assert added is not None
    real = added.logical_not()
    nests = (real[:, 1:] <= real[:, :-1]).all()
    if not getattr(encoder, "mask_check", True):
        # Eager then takes as many rows from the front as the mask keeps.
        real = torch.arange(src.shape[1], device=src.device) < real.sum(-1, keepdim=True)
        added = torch.zeros_like(added).masked_fill(~real, float("-inf"))
        nests = torch.ones_like(nests)
    out = src
    for layer in encoder.layers:
        out = layer(out, src_mask=None, is_causal=bool(is_causal), src_key_padding_mask=added)
    out = torch.where(nests & ~real[..., None], 0.0, out)
    return out if encoder.norm is None else encoder.norm(out)
