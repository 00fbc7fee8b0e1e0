"""Planners from files: this recipe's own, and upstream's checkpoints of Lightning."""

import re
from pathlib import Path

import torch

import tpuport
from recipes.recogdrive.diffusion import Sampler
from recipes.recogdrive.planner import Planner, PlannerConfig
from tpuport.foundation.errors import CheckpointError

# Prefixes of the planner in files of Lightning, of the agent and of this recipe, longest first.
_PREFIXES = ("agent.action_head.", "action_head.", "")
_FROZEN_COPY = "old_policy."
_ONE = "his_traj_encoder.fc1.weight"


def read_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """Read the planner's state dict from a file (.safetensors, .ckpt, .pt), by its own names.

    The frozen copy of the first policy, in a planner that upstream reinforced, is left out.

    Raises:
        CheckpointError: There is no planner in it, or loading it would run code.
    """
    opened = tpuport.open_checkpoint(path)
    for prefix in _PREFIXES:
        if prefix + _ONE in opened:
            names = [name for name in opened if name.startswith(prefix)]
            found = {name.removeprefix(prefix): opened.read(name) for name in names}
            return {n: v for n, v in found.items() if not n.startswith(_FROZEN_COPY)}
    some = ", ".join(list(opened)[:3])
    raise CheckpointError(
        f"{path} has no planner: expected {_ONE!r}, alone or after {_PREFIXES[0]!r}; it has {some}."
        " What to do: give what `train` wrote, or upstream's checkpoint of stage 2 or 3"
    )


def config_of(weights: dict[str, torch.Tensor]) -> tuple[PlannerConfig, Sampler]:
    """Return the sizes of a planner and its sampler, from the names and shapes of its weights."""
    head_dim = len(weights["model.transformer_blocks.0.attn.q_norm.weight"])
    width, state_width = weights["feature_encoder.weight"].shape
    blocks = {m[1] for n in weights if (m := re.match(r"model\.transformer_blocks\.(\d+)\.", n))}
    config = PlannerConfig(
        heads=width // head_dim,
        head_dim=head_dim,
        layers=len(blocks),
        output_dim=len(weights["model.final_layer.linear.weight"]),
        state_width=state_width,
        hidden=len(weights[_ONE]),
    )
    if "ddim_t" in weights:
        return config, "ddim"
    return config, "ddpm" if "ddpm_betas" in weights else "flow"


def load_planner(path: str | Path) -> Planner:
    """Load a planner, with the size and the sampler that it was trained with.

    Raises:
        CheckpointError: There is no planner in it, or a weight is missing.
    """
    weights = read_weights(path)
    try:
        planner = Planner(*config_of(weights))
        planner.load_state_dict(weights)
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path} does not hold all of a planner: {error}") from error
    return planner
