"""Tiny models of the kinds that people spread, with a loss, for the tests of sharding."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

BATCH = 8


@dataclass(frozen=True)
class Tiny:
    """A model, the arguments of one call, and the loss of what the call gives."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Any]


def decoder() -> Tiny:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=32,
    )
    ids = torch.randint(0, 1024, (BATCH, 16))
    return Tiny(LlamaForCausalLM(config), (ids,), {"labels": ids}, lambda out: out.loss)


def video() -> Tiny:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_layers=2,
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=128,
        rope_max_seq_len=32,
    )
    video = torch.randn(BATCH, 4, 2, 8, 8)
    args = (video, torch.rand(BATCH) * 1000, torch.randn(BATCH, 8, 32))
    return Tiny(model, args, {"return_dict": False}, lambda out: (out[0] ** 2).mean())


def vit() -> Tiny:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=16,
        patch_size=4,
        num_labels=4,
    )
    pixels = torch.randn(BATCH, 3, 16, 16)
    return Tiny(ViTForImageClassification(config), (pixels,), {}, lambda o: (o.logits**2).mean())


class Block(torch.nn.Module):
    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(ins, outs, 3, padding=1, bias=False)
        self.norm1 = torch.nn.BatchNorm2d(outs)
        self.conv2 = torch.nn.Conv2d(outs, outs, 3, padding=1)
        self.norm2 = torch.nn.BatchNorm2d(outs)
        self.shortcut = torch.nn.Conv2d(ins, outs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ConvNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = torch.nn.ModuleList([Block(16, 32), Block(32, 32)])
        self.head = torch.nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def convolutions() -> Tiny:
    return Tiny(ConvNet(), (torch.randn(BATCH, 3, 8, 8),), {}, lambda out: (out**2).mean())


def mixture() -> Tiny:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=32,
    )
    ids = torch.randint(0, 128, (BATCH, 8))
    return Tiny(MixtralForCausalLM(config), (ids,), {"labels": ids}, lambda out: out.loss)


MODELS = {
    "decoder": decoder,
    "video": video,
    "vit": vit,
    "convolutions": convolutions,
}
