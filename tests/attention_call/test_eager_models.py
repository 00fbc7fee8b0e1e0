"""Models whose attention is written out, as their repositories have them: a kernel for each call
whose weights nobody reads, none where they are returned, equal to eager PyTorch in both cases.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpuport
from tests.attention_call.programs import KERNELS

pytestmark = pytest.mark.filterwarnings(
    "ignore::tpuport.kernels.attention.dispatch.AttentionWarning"
)

B, S = 2, 40
EAGER: dict[str, Any] = {"attn_implementation": "eager"}


def detr() -> tuple[nn.Module, dict[str, Any]]:
    """A detector whose picture is padded: 48 places, which 40 learned queries look at."""
    from transformers import DetrConfig, DetrModel, ResNetConfig

    sizes: dict[str, Any] = {"embedding_size": 4, "hidden_sizes": [8], "depths": [1]}
    sizes |= {"layer_type": "basic", "out_features": ["stage1"]}
    not_timm: dict[str, Any] = {"use_timm_backbone": False, "use_pretrained_backbone": False}
    config = DetrConfig(
        **EAGER,
        **not_timm,
        backbone_config=ResNetConfig(**sizes),
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        num_queries=S,
        dropout=0.0,
    )
    mask = torch.ones(B, 24, 32, dtype=torch.long)
    mask[1, :, 20:] = 0
    model = DetrModel(config)
    # Its gradients are no attention's, and take most of the time.
    model.backbone.requires_grad_(False)
    return model, {"pixel_values": torch.randn(B, 3, 24, 32), "pixel_mask": mask}


SMALL: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def words() -> dict[str, Any]:
    keep = torch.ones(B, S, dtype=torch.long)
    keep[1, -7:] = 0
    return {"input_ids": torch.randint(3, 31, (B, S)), "attention_mask": keep}


def bert() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**EAGER, **SMALL, vocab_size=31), add_pooling_layer=False), words()


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(
        **EAGER, vocab_size=31, n_embd=8, n_inner=8, n_layer=1, n_head=2, use_cache=False
    )
    return GPT2Model(config), words()


def t5() -> tuple[nn.Module, dict[str, Any]]:
    """Encoder and decoder: positions as a bias, causal, and across the two."""
    from transformers import T5Config, T5Model

    config = T5Config(
        **EAGER,
        vocab_size=31,
        d_model=8,
        d_ff=8,
        d_kv=4,
        num_layers=1,
        num_heads=2,
        use_cache=False,
    )
    given = words()
    return T5Model(config), given | {"decoder_input_ids": given["input_ids"].flip(1)}


def mae() -> tuple[nn.Module, dict[str, Any]]:
    """A masked autoencoder: 37 of 144 patches are seen by the encoder, all by the decoder."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    config = ViTMAEConfig(
        **EAGER,
        **SMALL,
        image_size=48,
        patch_size=4,
        decoder_num_attention_heads=2,
        decoder_hidden_size=8,
        decoder_num_hidden_layers=1,
        decoder_intermediate_size=8,
    )
    given = {"pixel_values": torch.randn(B, 3, 48, 48), "noise": torch.rand(B, 144)}
    return ViTMAEForPreTraining(config), given


class CausalBlock(nn.Module):
    """A small GPT's attention: one product for all three, a mask in a buffer, dropout by rate 0."""

    def __init__(self) -> None:
        super().__init__()
        self.all_three, self.back = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.tril(torch.ones(64, 64))[None, None])
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.all_three(x).split(width, 2)
        q, k, v = (part.view(batch, length, 2, width // 2).transpose(1, 2) for part in parts)
        scores = q @ k.transpose(-2, -1) * (width // 2) ** -0.5
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        out = self.dropout(F.softmax(scores, dim=-1)) @ v
        return x + self.back(out.transpose(1, 2).reshape(x.shape))


def gpt() -> tuple[nn.Module, dict[str, Any]]:
    return nn.Sequential(CausalBlock(), CausalBlock()), {"input": torch.randn(B, S, 8)}


class VisionBlock(nn.Module):
    """A vision model's attention where it is not fused: scaled queries, norms of both."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)
        self.q_norm, self.k_norm = nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        weights = ((self.q_norm(q) * 0.5) @ self.k_norm(k).transpose(-2, -1)).softmax(dim=-1)
        return x + self.proj((weights @ v).transpose(1, 2).reshape(batch, length, width))


def vit() -> tuple[nn.Module, dict[str, Any]]:
    return VisionBlock(), {"x": torch.randn(B, S, 8)}


def timm() -> tuple[nn.Module, dict[str, Any]]:
    """timm's own model with its switch for fused attention off."""
    layers = pytest.importorskip("timm.layers", reason="needs timm")
    models = pytest.importorskip("timm.models.vision_transformer", reason="needs timm")
    sizes: dict[str, Any] = {"embed_dim": 8, "depth": 1, "num_heads": 2, "num_classes": 3}
    fused = layers.use_fused_attn()
    layers.set_fused_attn(False)
    try:
        model = models.VisionTransformer(img_size=24, patch_size=4, **sizes, qk_norm=True)
    finally:
        layers.set_fused_attn(bool(fused))
    return model, {"x": torch.randn(B, 3, 24, 24)}


# Model, the options of attention, and how often each kernel is called.
MODELS: dict[str, tuple[Any, str, dict[str, int]]] = {
    "DETR": (detr, "splash", {"splash": 3}),
    "BERT": (bert, "splash", {"splash": 1}),
    "GPT-2": (gpt2, "splash", {"splash": 1}),
    "T5": (t5, "blockwise", {"blockwise": 3}),
    "MAE": (mae, "splash", {"splash": 2}),
    "a small GPT": (gpt, "splash", {"splash": 2}),
    "a vision block": (vit, "splash", {"splash": 1}),
    "timm": (timm, "splash", {"splash": 1}),
}


def calls_of(ported: tpuport.PortedModel) -> dict[str, int]:
    found: dict[str, int] = {}
    for call in ported.report.attention:
        found[call.kernel] = found.get(call.kernel, 0) + call.calls
    return found


# A small GPT has what GPT-2 has, and the mask in a buffer.
SLOW = {"GPT-2"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in MODELS]
)
def test_each_attention_has_a_kernel(name: str):
    torch.manual_seed(0)
    build, kernel, expected = MODELS[name]
    model, given = build()
    with tpuport.attention_options(**KERNELS[kernel]):
        ported = tpuport.convert(model.eval(), verify=False)
        # Values and the gradients of all parameters.
        ported.verify(**given)
    assert ported.report.ok, ported.report
    assert calls_of(ported) == expected, ported.report


@pytest.mark.parametrize("name", ["BERT", "DETR"])
def test_weights_that_are_returned_have_none(name: str):
    torch.manual_seed(0)
    build, _, expected = MODELS[name]
    model, given = build()
    with tpuport.attention_options(**KERNELS["splash"]):
        ported = tpuport.convert(model.eval())
        ported(**given, output_attentions=True)
    assert ported.report.ok, ported.report
    assert calls_of(ported) == {"full": sum(expected.values())}, ported.report
    assert {call.reason for call in ported.report.attention} == {"the weights are a result, too"}
