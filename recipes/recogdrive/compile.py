"""Compilation of each stage at full size from shapes alone, without a TPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import torch

import tpuport
from recipes.recogdrive.compile_vlm import BESIDE, compile_cache, compile_finetune
from recipes.recogdrive.diffusion import ACTION_DIM, HORIZON, NUM_STEPS
from recipes.recogdrive.grpo import GrpoOptions
from recipes.recogdrive.kinds import OURS
from recipes.recogdrive.planner import SIZES, make_planner
from recipes.recogdrive.train import TrainOptions, make_step, port_planner
from tpuport.aot.report import CompileReport
from tpuport.foundation.errors import UsageError
from tpuport.model.ported_model import PortedModel

STATE_TOKENS = 2800  # the length to which upstream pads a prompt
SCENES = 64  # over all chips
SAMPLES = GrpoOptions().samples
IMITATION = TrainOptions(precision="bf16")
REINFORCEMENT = replace(GrpoOptions().train, precision="bf16")
# Only the learning rate schedule depends on it.
STEPS_PER_EPOCH = 1000

Shapes = dict[str, jax.ShapeDtypeStruct]


def scene_shapes(size: str, batch: int) -> Shapes:
    """Return the shapes of a batch of a cache at full size."""
    width = SIZES[size].state_width
    shapes = {
        "last_hidden_state": (batch, STATE_TOKENS, width),
        "history_trajectory": (batch, 4, 3),
        "high_command_one_hot": (batch, 4),
        "status_feature": (batch, 8),
        "trajectory": (batch, HORIZON, ACTION_DIM),
    }
    return {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}


def chain_shapes(batch: int, samples: int = SAMPLES) -> Shapes:
    """Return the shapes of the further inputs of the reinforcement loss."""
    shapes = {
        "chains": (batch, samples, NUM_STEPS + 1, HORIZON, ACTION_DIM),
        "reference_chains": (batch, 1, NUM_STEPS + 1, HORIZON, ACTION_DIM),
        "advantages": (batch, samples),
        "discount": (batch, NUM_STEPS),
        "bc": (batch,),
    }
    return {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}


def _ported(size: str, options: TrainOptions) -> PortedModel:
    with torch.device("meta"):
        planner = make_planner(size)
    return port_planner(planner, OURS, options, also=(OURS.chains,))


def _compiled(ported: Any, topology: str, inputs: tuple[Any, ...], **named: Any) -> CompileReport:
    return tpuport.compile_for(
        ported, topology, inputs=inputs, rules="ddp", mesh={"data": -1}, **named
    )


def compile_train(
    size: str = "small", topology: str = "v6e-4", batch: int | None = None, **how: Any
) -> CompileReport:
    """Compile a step of stage 2, its samples sharded over the chips."""
    step = make_step(_ported(size, IMITATION), OURS.loss, IMITATION, STEPS_PER_EPOCH)
    return _compiled(step, topology, (scene_shapes(size, batch or SCENES),), **how)


def compile_sample(
    size: str = "small", topology: str = "v6e-4", batch: int | None = None, **how: Any
) -> CompileReport:
    """Compile the sampling of trajectories."""
    ported, method = _ported(size, IMITATION), OURS.sample.__name__
    return _compiled(ported, topology, (scene_shapes(size, batch or SCENES),), method=method, **how)


def compile_chains(
    size: str = "small", topology: str = "v6e-4", batch: int | None = None, **how: Any
) -> CompileReport:
    """Compile the sampling of eight chains per scene, the first program of stage 3."""
    ported, method = _ported(size, REINFORCEMENT), OURS.chains.__name__
    inputs = (scene_shapes(size, batch or SCENES), SAMPLES)
    return _compiled(ported, topology, inputs, method=method, **how)


def compile_grpo(
    size: str = "small", topology: str = "v6e-4", batch: int | None = None, **how: Any
) -> CompileReport:
    """Compile the step of stage 3, its second program."""
    step = make_step(_ported(size, REINFORCEMENT), OURS.reinforced, REINFORCEMENT, STEPS_PER_EPOCH)
    inputs = ({**scene_shapes(size, batch or SCENES), **chain_shapes(batch or SCENES)},)
    return _compiled(step, topology, inputs, **how)


STAGES: dict[str, Callable[..., CompileReport]] = {
    "finetune": compile_finetune,
    "cache": compile_cache,
    "train": compile_train,
    "sample": compile_sample,
    "chains": compile_chains,
    "grpo": compile_grpo,
}


def compile_stage(
    stage: str,
    size: str = "small",
    topology: str = "v6e-4",
    batch: int | None = None,
    *,
    quick: bool = True,
    kernel_times: bool = True,
) -> CompileReport:
    """Compile one program of the recipe in bfloat16, with trained weights in float32.

    Args:
        stage: "finetune", "cache", "train", "sample", "chains" or "grpo".
        size: Size of the planner: "small", "large" or "tiny". It determines that of the chat model.
        topology: TPU slice, such as "v6e-4".
        batch: Rows (finetune) or scenes over all chips; by default one row or eight scenes (cache)
            per chip, and 64 scenes for the others.
        quick: See `tpuport.compile_for`; without it libtpu takes many minutes for a step.
        kernel_times: See `tpuport.compile_for`; without it no step time is estimated.

    Raises:
        UsageError: There is no such stage or size.
        MissingExtraError: libtpu is not installed.
    """
    for name, given, known in (("stage", stage, STAGES), ("size", size, BESIDE)):
        if given not in known:
            raise UsageError(f"{name}={given!r}: expected one of {', '.join(known)}")
    return STAGES[stage](size, topology, batch, quick=quick, kernel_times=kernel_times)
