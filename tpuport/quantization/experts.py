"""Experts in two stacked weights, as transformers has them, with integer codes."""

from collections.abc import Mapping
from typing import Any

import torch

from tpuport.quantization.layer import FrozenLayer, QuantizedLinear, apply
from tpuport.quantization.rounding import round_weight
from tpuport.quantization.scheme import QuantizationScheme

_WEIGHTS = ("gate_up_proj", "down_proj")
# What transformers says of experts that are other than these two products.
_OTHERWISE = {
    "has_gate": True, "has_bias": False, "has_post_expert_norm": False, "is_transposed": False,
}  # fmt: skip


class StackedLinear(torch.nn.Module):
    """The linear layers of all experts; buffers are those of `QuantizedLinear`, stacked."""

    def __init__(self, scheme: QuantizationScheme, buffers: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.scheme = scheme
        for name, value in buffers.items():
            self.register_buffer(name, value)

    @property
    def stacked_buffers(self) -> tuple[str, ...]:
        """Return the names of all buffers: presets shard them by expert."""
        return tuple(self._buffers)

    @classmethod
    def of(cls, weight: torch.Tensor, scheme: QuantizationScheme) -> "StackedLinear":
        """Return the frozen form of `[experts, out, in]`."""
        made = [
            QuantizedLinear.of_codes(round_weight(one.float(), scheme), scheme)
            for one in weight.detach()
        ]
        names = dict(made[0].named_buffers())
        return cls(scheme, {n: torch.stack([m.get_buffer(n) for m in made]) for n in names})

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Return the output of one expert's layer."""
        held = {name: value[expert] for name, value in self.named_buffers(recurse=False)}
        return apply(x, self.scheme, held)


class QuantizedExperts(FrozenLayer):
    """Experts with a gate; each computes all tokens, and a token takes those of its routing."""

    def __init__(
        self, experts: torch.nn.Module, gate_up: StackedLinear, down: StackedLinear
    ) -> None:
        super().__init__()
        kind: Any = type(experts)
        self.act_fn = experts.act_fn
        self.gate_up_proj, self.down_proj = gate_up, down
        self._gate = kind._apply_gate
        self.scheme = gate_up.scheme

    @classmethod
    def of(cls, experts: torch.nn.Module, scheme: QuantizationScheme) -> "QuantizedExperts":
        """Return the frozen form of experts."""
        return cls(experts, *(StackedLinear.of(experts.get_parameter(n), scheme) for n in _WEIGHTS))

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts."""
        num = self.gate_up_proj.get_buffer("codes").shape[0]
        # One more expert: transformers routes tokens that are another machine's to it.
        shares = top_k_weights.new_zeros(top_k_index.shape[0], num + 1)
        shares = shares.scatter_add(1, top_k_index, top_k_weights)
        y = torch.zeros_like(hidden_states, dtype=torch.float32)
        for expert in range(num):
            inner = self._gate(self, self.gate_up_proj(hidden_states, expert))
            share = shares[:, expert, None].float()
            # What an expert makes of other experts' tokens may be infinite.
            y = y + torch.where(share == 0, 0.0, self.down_proj(inner, expert).float() * share)
        return y.to(hidden_states.dtype)


def are_experts(module: torch.nn.Module) -> bool:
    """Return whether a module's weights are two stacks by expert."""
    own = dict(module.named_parameters(recurse=False))
    return set(own) == set(_WEIGHTS) and all(one.dim() == 3 for one in own.values())


def why_no_experts(module: torch.nn.Module, scheme: QuantizationScheme) -> str | None:
    """Return why experts stay in float, or None."""
    given: Any = module
    if not hasattr(type(given), "_apply_gate") or not hasattr(given, "act_fn"):
        return "its experts are not those of transformers' `use_experts_implementation`"
    for name, value in _OTHERWISE.items():
        if getattr(given, name, value) != value:
            return f"its experts have {name}={getattr(given, name)}"
    if scheme.method != "round" or scheme.is_static:
        return "experts are quantized by method='round' with activations='token'"
    for name in _WEIGHTS:
        size = given.get_parameter(name).shape[-1]
        multiple = scheme.group or (2 if scheme.weight_bits == 4 else 1)
        if size % multiple:
            return f"the {size} input features of {name} are no multiple of group={multiple}"
    return None
