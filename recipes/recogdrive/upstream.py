"""Upstream's own planner from an untouched checkout (xiaomi-research/recogdrive)."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tpuport
from recipes.recogdrive.diffusion import Sampler
from recipes.recogdrive.planner import SIZES, PlannerConfig
from tpuport.foundation.errors import UsageError

# Packages that upstream imports and the planner does not need.
ABSENT = (
    *("nuplan", "decord", "torchvision", "pytorch_lightning", "pyquaternion", "pandas"),
    *("shapely", "matplotlib", "hydra"),
)
MODULE = "navsim.agents.recogdrive.recogdrive_diffusion_planner"

MakePlanner = Callable[..., torch.nn.Module]


@contextlib.contextmanager
def checkout_module(
    checkout: str | Path, folder: str, needed: str, module: str, *, absent: tuple[str, ...]
) -> Iterator[Any]:
    """Import a module of a checkout as if written for CUDA, for use inside the block.

    Args:
        checkout: Folder of the repository.
        folder: Folder in it that has the packages.
        needed: Folder in that, which every checkout has.
        module: Module to import. The package that it is in is ported.
        absent: Packages that may be missing.

    Raises:
        UsageError: There is no checkout.
    """
    root = Path(checkout).resolve() / folder
    if not (root / needed).is_dir():
        raise UsageError(
            f"{checkout} is no checkout of recogdrive: it has no {Path(folder) / needed}. What to"
            " do: git clone https://github.com/xiaomi-research/recogdrive, and give that folder"
        )
    sys.path.insert(0, str(root))
    try:
        with tpuport.porting(module.partition(".")[0], absent=absent, port_modules=False):
            yield importlib.import_module(module)
    finally:
        sys.path.remove(str(root))


@contextlib.contextmanager
def upstream_planner(checkout: str | Path) -> Iterator[MakePlanner]:
    """Import the planner of a checkout, and yield its counterpart of `planner.make_planner`.

    Convert and train it inside the block, where its lazy imports are found. It needs timm,
    omegaconf, diffusers and transformers; nuplan, hydra and the like may be missing.

    Raises:
        UsageError: There is no checkout.
    """
    needed = "navsim/agents/recogdrive"
    with checkout_module(checkout, ".", needed, MODULE, absent=ABSENT) as module:
        yield lambda *args, **kwargs: build_planner(module, *args, **kwargs)


def build_planner(
    module: Any,
    size: str | PlannerConfig = "small",
    sampler: Sampler = "ddim",
    *,
    state_width: int | None = None,
    seed: int = 0,
) -> torch.nn.Module:
    """Return a planner of upstream's module `MODULE`, see `planner.make_planner`."""
    config = SIZES[size] if isinstance(size, str) else size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        planner = module.ReCogDriveDiffusionPlanner(
            module.ReCogDriveDiffusionPlannerConfig(
                diffusion_model_cfg={
                    "num_heads": config.heads,
                    "head_dim": config.head_dim,
                    "num_layers": config.layers,
                    "output_dim": config.output_dim,
                    "dropout": 0.0,
                    "attention_bias": True,
                    "norm_eps": 1e-5,
                    "interleave_attention": True,
                },
                input_embedding_dim=config.width,
                hidden_size=config.hidden,
                vlm_size="large" if config.state_width == 3584 else "small",
                sampling_method=sampler,
            )
        )
        width = config.state_width if state_width is None else state_width
        if planner.feature_encoder.in_features != width:
            # Upstream knows two widths of hidden states; small sets have others.
            planner.feature_encoder = torch.nn.Linear(width, config.width)
    if sampler == "ddim":
        # These are set by reinforcement only, and sampling of chains reads them. The other samplers
        # are not reinforced here, and ddpm would clamp its noise at one of them.
        for name, value in vars(module.GRPOConfig()).items():
            if isinstance(value, float):
                setattr(planner, name, value)
    return planner


def action_input(batch: dict[str, torch.Tensor]) -> Any:
    """Return a batch in the form of upstream's methods, without the hidden states."""
    from transformers.feature_extraction_utils import BatchFeature

    given = {
        "his_traj": batch["history_trajectory"].flatten(1),
        "status_feature": batch["status_feature"],
    }
    if "trajectory" in batch:
        given["action"] = batch["trajectory"]
    return BatchFeature(given)


def imitation_loss(planner: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return upstream's training loss of a batch."""
    return planner(batch["last_hidden_state"], action_input(batch)).loss


@contextlib.contextmanager
def _drawing(noise: torch.Tensor | None) -> Iterator[None]:
    """Make `torch.randn_like` return these numbers (steps, ...), as samplers take no noise."""
    if noise is None:
        yield
        return
    original, steps = torch.randn_like, iter(range(noise.shape[0]))

    def given(like: torch.Tensor, **options: Any) -> torch.Tensor:
        del options
        return noise[next(steps)].to(like.dtype, copy=True)  # the sampler changes it in place

    torch.randn_like = given
    try:
        yield
    finally:
        torch.randn_like = original


def sampled(planner: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sample upstream's trajectories (B, 8, 3), from `init` and with `step_noise` if present.

    A planner for flow draws no numbers between its steps.
    """
    given = action_input(batch)
    with _drawing(batch.get("step_noise")):
        return planner.get_action(batch["last_hidden_state"], given, batch.get("init")).pred_traj
