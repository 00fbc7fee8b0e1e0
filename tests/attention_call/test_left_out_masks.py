"""Masks that transformers leaves out in eager PyTorch where a padding mask is all ones: modules see
in a program what they see there, whether they are causal by themselves or not.
"""

import copy
import sys
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tpuport

B, S, WIDTH = 2, 6, 4
CONFIG = LlamaConfig(
    hidden_size=WIDTH, num_attention_heads=1, num_hidden_layers=2, sliding_window=3
)
CONFIG._attn_implementation = "sdpa"
MASKS = [create_causal_mask, create_bidirectional_mask, create_sliding_window_causal_mask]


class Attention(nn.Module):
    """One head, which is causal by itself, or is not, or does not say."""

    def __init__(self, causal: bool | None) -> None:
        super().__init__()
        self.all_three = nn.Linear(WIDTH, 3 * WIDTH)
        if causal is not None:
            self.is_causal = causal

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        q, k, v = self.all_three(x)[:, None].chunk(3, -1)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(CONFIG._attn_implementation, None)
        return attend(self, q, k, v, mask, **kwargs)[0][:, :, 0]


class Attentions(nn.Module):
    """Each kind of mask, for two modules of each kind, and for one that is told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.ModuleList(Attention(c) for _ in range(2)) for c in (True, False, None)]
        self.kinds = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for make in MASKS:
            mask: Any = make(CONFIG, x, attention_mask=keep, past_key_values=None)
            for kind in self.kinds:
                y = x
                for layer in kind:
                    y = y + layer(y, mask)
                results.append(y)
            results.append(self.kinds[0][0](x, mask, is_causal=False))
            results.append(self.kinds[1][0](x, mask, is_causal=True))
        return results


def test_modules_see_what_they_see_in_eager_pytorch():
    torch.manual_seed(0)
    model = Attentions()
    eager, ported = copy.deepcopy(model), tpuport.convert(model, verify=False)
    x = torch.randn(B, S, WIDTH)
    ones = torch.ones(B, S, dtype=torch.long)
    left, right = ones.clone(), ones.clone()
    left[0, :2], right[1, -2:] = 0, 0

    def loss(params: Any, keep: Any) -> Any:
        out, _ = ported.apply(params, ported.buffers, jax.random.key(0), x, keep)
        return sum((one**2).sum() for one in out)

    results, gradients = [], jax.jit(jax.grad(loss))
    for keep in (ones, right, left, ones):
        want, got = eager(x, keep), tpuport.to_torch(ported(x, keep))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        eager.zero_grad()
        sum((one**2).sum() for one in want).backward()
        found = tpuport.to_torch(gradients(ported.params, jnp.asarray(keep.numpy())))
        for name, parameter in eager.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-4)
        results.append(want)
    # The masks that were left out do matter.
    assert any(not torch.allclose(a[1], b[1]) for a, b in zip(*results[:2], strict=True))


def test_a_trace_imports_no_models_of_transformers(monkeypatch):
    """Such an import may fail, as where torchvision does not fit torch, and take seconds."""
    assert "transformers.masking_utils" in sys.modules
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", None)
    layer, x = nn.Linear(3, 2), torch.ones(1, 3)
    torch.testing.assert_close(tpuport.to_torch(tpuport.convert(layer)(x)), layer(x).detach())
