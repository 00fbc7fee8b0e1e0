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
from tpuport.errors import UsageError

# What upstream imports beside its planner, and the planner does without.
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
    """Import a module of a checkout as if written for CUDA; it can be used inside the block.

    Args:
        checkout: the folder of the repository.
        folder: in it, that the packages are in.
        needed: a folder in that, without which it is no checkout.
        module: what to import; the package that it is in is ported.
        absent: packages that need not be there.

    Raises:
        UsageError: there is no checkout.
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
    """Import the planner of a checkout; gives what `planner.make_planner` is here.

    Convert and train it inside the block: what it imports lazily is found there. Needs timm,
    omegaconf, diffusers and transformers; nuplan, hydra and the like may be missing.

    Raises:
        UsageError: there is no checkout.
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
    """A planner of upstream's module `MODULE`, see `planner.make_planner`."""
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
        # What only reinforcement sets there, and sampling chains reads. The others are not
        # reinforced here, and ddpm would cut its noise off at one of these.
        for name, value in vars(module.GRPOConfig()).items():
            if isinstance(value, float):
                setattr(planner, name, value)
    return planner


def action_input(batch: dict[str, torch.Tensor]) -> Any:
    """A batch as upstream's methods take it, beside the hidden states."""
    from transformers.feature_extraction_utils import BatchFeature

    given = {
        "his_traj": batch["history_trajectory"].flatten(1),
        "status_feature": batch["status_feature"],
    }
    if "trajectory" in batch:
        given["action"] = batch["trajectory"]
    return BatchFeature(given)


def imitation_loss(planner: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Upstream's training loss of a batch."""
    return planner(batch["last_hidden_state"], action_input(batch)).loss


@contextlib.contextmanager
def _drawing(noise: torch.Tensor | None) -> Iterator[None]:
    """Let `torch.randn_like` give these numbers (steps, ...), as upstream's samplers take none."""
    if noise is None:
        yield
        return
    original, steps = torch.randn_like, iter(range(noise.shape[0]))

    def given(like: torch.Tensor, **options: Any) -> torch.Tensor:
        del options
        return noise[next(steps)].to(like.dtype, copy=True)  # which the sampler changes in place

    torch.randn_like = given
    try:
        yield
    finally:
        torch.randn_like = original


def sampled(planner: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Upstream's trajectories (B, 8, 3); from `init` and with `step_noise`, if the batch has them.

    A planner for flow draws nothing on its way.
    """
    given = action_input(batch)
    with _drawing(batch.get("step_noise")):
        return planner.get_action(batch["last_hidden_state"], given, batch.get("init")).pred_traj
