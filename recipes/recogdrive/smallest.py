"""The smallest program of this recipe, for `tpuport doctor --measure`."""

from typing import Any

import torch

from recipes.recogdrive.planner import make_planner


def program() -> dict[str, Any]:
    """Return the diffusion transformer of a tiny planner, and the arguments of one call."""
    planner = make_planner("tiny").eval().requires_grad_(False)
    width = planner.config.width
    generator = torch.Generator().manual_seed(0)
    poses, states, ego = (
        torch.randn(size, generator=generator)
        for size in ((2, 8, width), (2, 24, width), (2, width))
    )
    return {"model": planner.model, "inputs": (poses, states, ego, torch.tensor([10.0, 70.0]))}
