"""LoRA as openpi fine-tunes with it: all layers of both transformers get low-rank changes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.openpi.model import Pi0

# Ranks of openpi's configurations; its alphas are equal, so the change is not scaled.
LANGUAGE_RANK, EXPERT_RANK = 16, 32
_PARTS = ("lora_down", "lora_up")


class LoraLinear(nn.Linear):
    """A linear layer with a low-rank change beside its weight, which keeps its name."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__(
            base.in_features, base.out_features, bias=base.bias is not None, device="meta"
        )
        self.weight, self.bias = base.weight, base.bias
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_down = nn.Parameter(torch.empty(rank, base.in_features, **like))
        self.lora_up = nn.Parameter(torch.zeros(base.out_features, rank, **like))
        nn.init.normal_(self.lora_down, std=0.01)

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output with its change."""
        change = F.linear(F.linear(input, self.lora_down), self.lora_up)
        return super().forward(input) + change


def add_lora(policy: Pi0, seed: int = 0) -> Pi0:
    """Freeze both transformers and add trained changes to their layers.

    The image encoder and the projections of actions, time and state are trained as they are.
    """
    ranks = {
        "paligemma_with_expert.paligemma.model.language_model": LANGUAGE_RANK,
        "paligemma_with_expert.gemma_expert.model": EXPERT_RANK,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, rank in ranks.items():
            transformer = policy.get_submodule(name)
            transformer.requires_grad_(False)
            for parent in list(transformer.modules()):
                for child, layer in list(parent.named_children()):
                    if type(layer) is nn.Linear and child != "dense":
                        setattr(parent, child, LoraLinear(layer, rank))
    return policy


def merge_lora(policy: Pi0) -> Pi0:
    """Add the changes to the weights, so that the policy is one of plain layers."""
    for parent in list(policy.modules()):
        for child, layer in list(parent.named_children()):
            if isinstance(layer, LoraLinear):
                merged = nn.Linear(
                    layer.in_features, layer.out_features, layer.bias is not None, device="meta"
                )
                change = layer.lora_up.detach() @ layer.lora_down.detach()
                merged.weight = nn.Parameter(layer.weight.detach() + change)
                merged.bias = layer.bias
                setattr(parent, child, merged)
    return policy
