"""The smallest program of this recipe, for `tpuport doctor --measure`."""

from typing import Any

import torch

from recipes.openpi.config import Config, Transformer, Vision
from recipes.openpi.model import make_policy

SIZES = Config(
    action_dim=6,
    action_horizon=4,
    max_token_len=7,
    vocab_size=40,
    language=Transformer(16, 3, 24, heads=2, head_dim=8),
    expert=Transformer(12, 3, 20, heads=2, head_dim=8),
    vision=Vision(12, 1, 20, heads=2, image_size=28),
)


def program() -> dict[str, Any]:
    """Return a policy of three narrow layers, and a batch for its loss."""
    policy = make_policy(SIZES).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, 2, 28, 28, 3), generator=generator, dtype=torch.uint8)
    batch = {
        "images": images,
        "image_masks": torch.ones(2, 2, dtype=torch.bool),
        "tokens": torch.randint(0, 40, (2, 7), generator=generator, dtype=torch.int32),
        "token_mask": torch.ones(2, 7, dtype=torch.bool),
        "state": torch.randn(2, 6, generator=generator),
        "actions": torch.randn(2, 4, 6, generator=generator),
        "noise": torch.randn(2, 4, 6, generator=generator),
        "time": torch.rand(2, generator=generator),
    }
    return {"model": policy, "inputs": (batch,)}
