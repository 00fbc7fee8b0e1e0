"""Policies of the recipe that are small enough for a test, and observations for them."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from recipes.openpi.model import Pi0, make_policy
from recipes.openpi.smallest import SIZES as SMALL

BOTH = {"pi0": SMALL, "pi05": replace(SMALL, pi05=True)}


def small_policy(kind: str = "pi0", seed: int = 0) -> Pi0:
    """Random weights throughout: norms and gates begin at zero, which would hide everything."""
    policy = make_policy(BOTH[kind])
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return policy


def observations(batch: int = 2, seed: int = 0, length: int = 7, *, drawn: bool = True):
    """A batch whose second camera is missing in the first row, and whose prompts differ in length.

    With the noise and the time of the loss if asked for.
    """
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (batch, 2, 28, 28, 3), generator=generator, dtype=torch.uint8)
    cameras = torch.ones(batch, 2, dtype=torch.bool)
    cameras[0, 1] = False
    lengths = torch.arange(batch)[:, None] + length - 3
    made = {
        "images": images,
        "image_masks": cameras,
        "tokens": torch.randint(0, 40, (batch, length), generator=generator, dtype=torch.int32),
        "token_mask": torch.arange(length)[None] < lengths,
        "state": torch.randn(batch, 6, generator=generator),
        "actions": torch.randn(batch, 4, 6, generator=generator),
    }
    if drawn:
        made["noise"] = torch.randn(batch, 4, 6, generator=generator)
        made["time"] = torch.rand(batch, generator=generator)
    return made


# Of the same widths, for a robot with eight numbers of state and prompts of bytes.
_WIDE = replace(SMALL, action_dim=8, vocab_size=400)
SERVED = {
    "pi0": replace(_WIDE, max_token_len=48),
    "pi05": replace(_WIDE, max_token_len=128, pi05=True),
}


def observation(state: float = 0.1, prompt: str = "move to the red disk") -> dict[str, Any]:
    """What a client of a LIBERO robot sends."""
    return {
        "observation/image": np.full((40, 40, 3), 90, np.uint8),
        "observation/wrist_image": np.full((40, 40, 3), 30, np.uint8),
        "observation/state": np.full(8, state),
        "prompt": prompt,
    }
