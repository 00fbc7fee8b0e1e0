"""The measured models: modules that plain torchax can run and that return a tensor."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.dit_stack import DiTStack, hand_written


@dataclass(frozen=True)
class Case:
    """A model and the tensors to call it with.

    Attributes:
        name: Name for tables and plots.
        module: Module in eval mode, on the CPU, with random weights, that returns one tensor.
        args: Positional arguments.
        hand: Returns the same function in hand-written JAX: its parameters and `f(params, *args)`.
    """

    name: str
    module: torch.nn.Module
    args: tuple[torch.Tensor, ...]
    hand: Callable[[], tuple[Any, Any]] | None = None


class FirstOutput(torch.nn.Module):
    """A wrapper that returns a model's first output, the same for all contestants."""

    def __init__(self, model: torch.nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        """Return the first output for these inputs, in the order of `names`."""
        return self.model(**dict(zip(self.names, args, strict=True)), return_dict=False)[0]


def make_cases(*, quick: bool = False) -> list[Case]:
    """Return the models whose step and staging are measured, or two tiny ones if `quick`."""
    torch.manual_seed(0)
    if quick:
        return [dit_stack(2, width=32, tokens=16), _bert(layers=1, width=32, tokens=16)]
    return [
        dit_stack(8),
        _bert(layers=4, width=256, tokens=128),
        _llama(),
        _diffusers_dit(),
        _diffusers_unet(),
    ]


def dit_stack(layers: int, width: int = 256, tokens: int = 128, heads: int = 4) -> Case:
    """Return the stack of DiT blocks, the one case with a hand-written counterpart."""
    module = DiTStack(layers, width, heads).eval()
    args = (torch.randn(2, tokens, width), torch.randn(2, width))
    return Case(f"DiT stack, {layers} layers", module, args, lambda: hand_written(module))


def _bert(layers: int, width: int, tokens: int) -> Case:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=1000,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
    )
    mask = (torch.arange(tokens)[None] < torch.tensor([[tokens], [tokens // 2]])).long()
    args = (torch.randint(0, 1000, (2, tokens)), mask)
    module = FirstOutput(BertModel(config, add_pooling_layer=False), "input_ids", "attention_mask")
    return Case("transformers BERT", module.eval(), args)


def _llama() -> Case:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=704,
        use_cache=False,
    )
    module = FirstOutput(LlamaModel(config), "input_ids")
    return Case("transformers Llama", module.eval(), (torch.randint(0, 1000, (2, 128)),))


def _diffusers_dit() -> Case:
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=64,
        in_channels=4,
        out_channels=8,
        num_layers=4,
        sample_size=16,
        num_embeds_ada_norm=1000,
    )
    args = (torch.randn(2, 4, 16, 16), torch.tensor([10, 500]), torch.tensor([3, 7]))
    module = FirstOutput(model, "hidden_states", "timestep", "class_labels")
    return Case("diffusers DiT", module.eval(), args)


def _diffusers_unet() -> Case:
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=8,
    )
    args = (torch.randn(2, 4, 16, 16), torch.tensor([10, 500]), torch.randn(2, 12, 64))
    module = FirstOutput(model, "sample", "timestep", "encoder_hidden_states")
    return Case("diffusers UNet", module.eval(), args)
