"""A planner of the recipe that is small enough for a test, and scenes for it."""

import torch

from recipes.recogdrive.diffusion import Sampler
from recipes.recogdrive.planner import Planner, PlannerConfig, make_planner

CONFIG = PlannerConfig(heads=2, head_dim=8, layers=1, output_dim=24, state_width=12, hidden=32)


def small_planner(
    sampler: Sampler = "ddim", seed: int = 0, config: PlannerConfig = CONFIG
) -> Planner:
    """Random weights throughout: the modulation starts at zero, which would hide everything."""
    planner = make_planner(config, sampler, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in planner.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return planner


def scenes(batch: int = 4, seed: int = 0, *, noise: bool = False, sampler: str = "ddim"):
    """A batch as `collate` gives it; with the noise and times of the loss if asked for."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(size, generator=generator)  # noqa: E731
    made = {
        "last_hidden_state": draw(batch, 5, 12),
        "history_trajectory": draw(batch, 4, 3),
        "high_command_one_hot": torch.eye(4)[torch.arange(batch) % 4],
        "status_feature": draw(batch, 8),
        "trajectory": draw(batch, 8, 3) * 3 + torch.tensor([20.0, 0, 0]),
    }
    if noise:
        made["noise"] = draw(batch, 8, 3)
        made["times"] = (
            torch.rand(batch, generator=generator)
            if sampler == "flow"
            else torch.randint(0, 100, (batch,), generator=generator)
        )
    return made
