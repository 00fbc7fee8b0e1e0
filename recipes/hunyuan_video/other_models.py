"""Other transformers that denoise with the same loop: Wan, Flux, LTX-Video, Mochi, CogVideoX.

diffusers' own pipelines encode the prompts and decode the latents. This module does the denoising
between them, which takes most of the time.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import tpuport
from recipes.hunyuan_video.caching import StepCache
from recipes.hunyuan_video.components import (
    DTYPES,
    default_dtype,
    model_folder,
    parameters_on_meta,
    read_json,
    renaming,
)
from recipes.hunyuan_video.denoise import STEPS, Denoiser, schedule_of, velocity_schedule
from recipes.hunyuan_video.networks import NETWORKS
from recipes.quiet import quietly
from tpuport.foundation.errors import UsageError
from tpuport.model.ported_model import PortedModel

_NEGATIVE = "negative_"


@dataclass(frozen=True)
class Flow:
    """The settings for denoising latents.

    Attributes:
        steps: Denoising steps.
        guidance: Guidance scale; 1 for none. Above 1, conditions of the negative prompt are needed.
        shift: Shift of the schedule; None for the scheduler's own.
        calls: Calls of the network per step. With guidance, two take less memory than one.
        precision: "bf16" or "float32".
        cache: The steps that reuse results of others.
    """

    steps: int = 50
    guidance: float = 1.0
    shift: float | None = None
    calls: int = 1
    precision: str = "bf16"
    cache: StepCache | None = None

    def __post_init__(self) -> None:
        if self.precision not in DTYPES:
            raise UsageError(f"precision={self.precision!r}: expected one of {', '.join(DTYPES)}")
        if self.steps < 1 or self.guidance < 1:
            raise UsageError(
                f"steps={self.steps}, guidance={self.guidance}: expected at least 1 of each"
            )


def denoise_latents(
    folder: str | Path,
    latents: Any,
    conditions: Mapping[str, Any],
    flow: Flow,
    *,
    kind: str | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> jax.Array:
    """Denoise latents with a diffusers transformer of a class in `networks.NETWORKS`.

    Args:
        folder: Model folder as diffusers publishes it, with `transformer` and `scheduler`.
        latents: Noise (P, C, ...), in the shape that the class takes.
        conditions: Arguments of the class's `forward` by name, of P rows each except for
            coordinates. With guidance also those of the negative prompt, named "negative_...".
        flow: Settings for denoising.
        kind: Name of the class; by default the one that the folder names.
        on_step: Called after each step with the number of steps done and the total.

    Returns:
        float32, of the shape of `latents`.

    Raises:
        UsageError: The class or a condition is not known, or the folder has no model.
        CheckpointError: Weights are damaged.
    """
    folder = model_folder(folder)
    config = read_json(folder / "transformer" / "config.json", "give the folder of a model")
    network = str(config.get("_class_name") if kind is None else kind)
    rows = _rows(network, conditions, flow)
    ported = _ported(folder / "transformer", network, config, flow.precision)
    denoiser = Denoiser(ported, rows, flow.guidance, flow.calls, cache=flow.cache)
    # A copy, since the first step donates its input.
    noise = now = jnp.array(latents, jnp.float32)
    for done, now in denoiser.run(noise, _schedule(folder, network, flow, noise.shape)):
        if on_step is not None:
            jax.block_until_ready(now)
            on_step(done, flow.steps)
    return now


def denoise_file(
    folder: str | Path, inputs: str | Path, out: str | Path, flow: Flow, **how: Any
) -> None:
    """Read latents and conditions from a safetensors file, denoise, and write another file.

    Args:
        folder: See `denoise_latents`.
        inputs: Safetensors file with "latents" and conditions by name.
        out: Safetensors file to write "latents" to.
        flow: Settings for denoising.
        **how: Further arguments of `denoise_latents`.

    Raises:
        UsageError: As in `denoise_latents`, or the file has no latents.
        CheckpointError: A file is damaged, or the disk is full.
    """
    given = tpuport.load_checkpoint(inputs)
    if "latents" not in given:
        raise UsageError(
            f"{inputs} has {', '.join(given) or 'nothing'}: expected latents, and conditions by the"
            " names of the transformer's arguments"
        )
    conditions = {name: value for name, value in given.items() if name != "latents"}
    found = denoise_latents(folder, given["latents"], conditions, flow, **how)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    tpuport.save_checkpoint(out, {"latents": found})


def _rows(network: str, conditions: Mapping[str, Any], flow: Flow) -> dict[str, jax.Array]:
    """Return the conditions as a step takes them, with the rows of the negative prompt first."""
    if network not in NETWORKS:
        raise UsageError(f"kind={network!r}: expected one of {', '.join(NETWORKS)}")
    shared = NETWORKS[network].shared
    dtype = jnp.dtype("bfloat16" if flow.precision == "bf16" else "float32")
    found = {}
    for name in [name for name in conditions if not name.startswith(_NEGATIVE)]:
        value = jnp.asarray(conditions[name])
        if flow.guidance > 1 and name not in shared:
            other = conditions.get(_NEGATIVE + name)
            if other is None:
                raise UsageError(
                    f"conditions: {_NEGATIVE}{name} is missing, which guidance={flow.guidance}"
                    " needs. What to do: encode the negative prompt, too, or give guidance=1"
                )
            value = jnp.concatenate([jnp.asarray(other), value])
        is_number = jnp.issubdtype(value.dtype, jnp.floating) and name not in shared
        found[name] = value.astype(dtype) if is_number else value
    return found


def _ported(folder: Path, network: str, config: dict[str, Any], precision: str) -> PortedModel:
    kind: Any = getattr(importlib.import_module("diffusers"), network, None)
    if kind is None:
        raise UsageError(f"kind={network!r} is no class of diffusers")
    given = set(inspect.signature(kind.__init__).parameters)
    unknown = sorted(n for n in config if not n.startswith("_") and n not in given)
    if unknown:
        raise UsageError(
            f"{folder / 'config.json'} has {', '.join(unknown)}, which {network} does not take"
        )
    with quietly(), default_dtype(DTYPES[precision]), parameters_on_meta():
        module: torch.nn.Module = kind.from_config(config).eval().requires_grad_(False)
    ported = tpuport.convert(module, methods=STEPS, verify=False)
    opened = tpuport.open_checkpoint(folder)
    ported.load(opened, rename=renaming(opened, {*ported.params, *ported.buffers}))
    return ported


def _schedule(
    folder: Path, network: str, flow: Flow, shape: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    diffusers: Any = importlib.import_module("diffusers")
    path = folder / "scheduler" / "scheduler_config.json"
    config = read_json(path, "download the complete folder")
    predicts = NETWORKS[network].predicts
    wanted = {"flow": "flow_prediction", "velocity": "v_prediction"}[predicts]
    if config.get("prediction_type", "flow_prediction") != wanted:
        said = config.get("prediction_type")
        raise UsageError(
            f"{path}: prediction_type={said!r}, expected a {predicts}. What to do: there"
            " is nothing to do, such a model takes other steps"
        )
    if predicts == "velocity":
        if flow.shift is not None:
            raise UsageError(
                f"shift={flow.shift}: expected none for {network}, whose steps are DDIM's. What to"
                " do: leave it out"
            )
        return velocity_schedule(diffusers.CogVideoXDDIMScheduler.from_config(config), flow.steps)
    if "flow_shift" in config:  # UniPC's name for it (Wan)
        config = {"shift": config["flow_shift"]}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(config)
    if flow.shift is not None:
        scheduler.set_shift(flow.shift)
    sigmas = NETWORKS[network].sigmas
    if sigmas is None:
        return schedule_of(scheduler, num_inference_steps=flow.steps)
    given: dict[str, Any] = {"sigmas": sigmas(flow.steps)}
    if scheduler.config.use_dynamic_shifting:
        names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        module = importlib.import_module("diffusers.pipelines.flux.pipeline_flux")
        given["mu"] = module.calculate_shift(shape[1], *(scheduler.config[n] for n in names))
    return schedule_of(scheduler, **given)
