"""The smallest program of this recipe, for `tpuport doctor --measure`."""

from typing import Any

import torch

from recipes.mae_dit.stage2.transformer import Transformer


def program() -> dict[str, Any]:
    """Return a small diffusion transformer with drawn weights, and the arguments of one call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer(8, 2, 4, 4, 64, 2, 4, 10).eval().requires_grad_(False)
        for parameter in model.parameters():
            # At first each block is the identity, and the output is zero.
            torch.nn.init.normal_(parameter, std=0.1)
        inputs = (torch.randn(2, 4, 8, 8), torch.tensor([10.0, 700.0]), torch.tensor([3, 7]))
    return {"model": model, "inputs": inputs}
