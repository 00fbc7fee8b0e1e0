"""The smallest program of this recipe, for `tpuport doctor --measure`."""

from typing import Any

import torch

from recipes.openpilot.generations import GENERATIONS, example_inputs
from recipes.openpilot.small_model import build


def program() -> dict[str, Any]:
    """Return a small driving model of 0.9.7, and the arguments of one call."""
    kind = GENERATIONS["0.9.7"][0]
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(
        torch.rand(example.shape, generator=generator) for example in example_inputs(kind).values()
    )
    return {"model": build(kind).requires_grad_(False), "inputs": inputs}
