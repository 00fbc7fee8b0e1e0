"""The calls of the transformers that denoise: the differences between their classes."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tpuport.foundation.errors import UsageError

Tensors = dict[str, torch.Tensor]
# Takes a transformer, noisy latents (B, C, ...), timesteps (B,) of this step and of the next, and
# conditions of as many rows.
Call = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, Tensors], torch.Tensor]


def _by_name(
    transformer: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    following: torch.Tensor,
    conditions: Tensors,
) -> torch.Tensor:
    """Call a transformer with every condition by its name, as most of diffusers' classes are."""
    del following
    return transformer(hidden_states=latents, timestep=timestep, **conditions, return_dict=False)[0]


def _of_meanflow(transformer: Any, following: torch.Tensor) -> torch.Tensor | None:
    """Return the next timestep for step-distilled models, and None for others, which ignore it."""
    return following if transformer.config.use_meanflow else None


# Share of noise in the video that super-resolution makes larger (upstream,
# hyvideo/pipelines/hunyuan_video_sr_pipeline.py, noise_scale).
LOW_NOISE = 0.7


def _with_conditions(
    latents: torch.Tensor, timestep: torch.Tensor, conditions: Tensors
) -> torch.Tensor:
    """Concatenate latents with the first frame, and for super-resolution with the small video.

    Once the latents have less noise than the small video, zeros take its place.
    """
    parts = [latents, conditions["condition"]]
    if "low" in conditions:
        low = conditions["low"]
        noisy = (timestep >= 1000 * LOW_NOISE).reshape(-1, 1, 1, 1, 1)
        parts.append(torch.where(noisy, low, torch.zeros_like(low)))
    return torch.cat(parts, dim=1)


def _hunyuan(
    transformer: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    following: torch.Tensor,
    conditions: Tensors,
) -> torch.Tensor:
    """Call diffusers' HunyuanVideo class with the conditions of `encode.encode`."""
    return transformer(
        hidden_states=_with_conditions(latents, timestep, conditions),
        timestep=timestep.to(latents.dtype),
        timestep_r=_of_meanflow(transformer, following.to(latents.dtype)),
        encoder_hidden_states=conditions["text"],
        encoder_attention_mask=conditions["text_mask"],
        encoder_hidden_states_2=conditions["glyph"],
        encoder_attention_mask_2=conditions["glyph_mask"],
        image_embeds=conditions["picture"],
        return_dict=False,
    )[0]


def _upstream(
    transformer: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    following: torch.Tensor,
    conditions: Tensors,
) -> torch.Tensor:
    """Call upstream's own class with the same conditions (hyvideo, hunyuan_video_pipeline.py)."""
    picture: torch.Tensor | None = conditions["picture"]
    if picture is None or not picture.shape[1]:
        picture = None
    # Autocast as upstream's pipeline has it: the refiner computes text in float32.
    with torch.autocast("cuda", latents.dtype, enabled=latents.dtype != torch.float32):
        return transformer(
            _with_conditions(latents, timestep, conditions),
            timestep,
            conditions["text"],
            None,
            conditions["text_mask"],
            timestep_r=_of_meanflow(transformer, following),
            vision_states=picture,
            mask_type="t2v" if picture is None else "i2v",
            extra_kwargs={
                "byt5_text_states": conditions["glyph"],
                "byt5_text_mask": conditions["glyph_mask"],
            },
            return_dict=False,
        )[0]


def _cogvideo(
    transformer: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    following: torch.Tensor,
    conditions: Tensors,
) -> torch.Tensor:
    """Call CogVideoX's class, whose larger models take rotary embeddings as a pair."""
    given = dict(conditions)
    pair = [given.pop(name) for name in _ROTARY if name in given]
    if pair:
        given["image_rotary_emb"] = tuple(pair)  # pyright: ignore[reportArgumentType]
    return _by_name(transformer, latents, timestep, following, given)


_ROTARY = ("rotary_cos", "rotary_sin")
Sigmas = Callable[[int], np.ndarray[Any, Any]]


def even_sigmas(steps: int) -> np.ndarray[Any, Any]:
    """Return sigmas from 1 to 1/steps."""
    return np.linspace(1.0, 1 / steps, steps)


def _of_mochi(steps: int) -> np.ndarray[Any, Any]:
    """Return the sigmas of Mochi's pipeline: small even steps first, then growing ones."""
    if steps < 2:
        raise UsageError(
            f"steps={steps}: expected at least 2 for Mochi, whose schedule has two parts"
        )
    module = importlib.import_module("diffusers.pipelines.mochi.pipeline_mochi")
    return np.array(module.linear_quadratic_schedule(steps, _MOCHI_THRESHOLD))


# As in diffusers' MochiPipeline.
_MOCHI_THRESHOLD = 0.025


@dataclass(frozen=True)
class Network:
    """The facts about a class of transformers that denoising needs.

    Attributes:
        blocks: The attribute with its list of blocks; None if there is more than one list.
        streams: The arguments of a block that it returns updated, in the order of its results.
        call: Function that calls the transformer.
        time_scale: Factor for timesteps of 0 to 1000.
        shared: Conditions that all rows share, which keep their dtype: coordinates.
        sigmas: Function that returns the sigmas which its pipeline passes for a number of steps, to
            be shifted; None for the scheduler's own.
        predicts: "flow", or "velocity": what `v_prediction` is called in diffusers.
    """

    blocks: str | None
    streams: tuple[str, ...] = ("hidden_states",)
    call: Call = _by_name
    time_scale: float = 1.0
    shared: frozenset[str] = frozenset()
    sigmas: Sigmas | None = None
    predicts: str = "flow"


NETWORKS: dict[str, Network] = {
    "HunyuanVideo15Transformer3DModel": Network(
        "transformer_blocks", ("hidden_states", "encoder_hidden_states"), _hunyuan
    ),
    "HunyuanVideo_1_5_DiffusionTransformer": Network("double_blocks", ("img", "txt"), _upstream),
    "WanTransformer3DModel": Network("blocks"),
    # Tokens and coordinates come from the caller, prepared as in `FluxPipeline`.
    "FluxTransformer2DModel": Network(
        None, time_scale=1e-3, shared=frozenset({"txt_ids", "img_ids"}), sigmas=even_sigmas
    ),
    # Packed tokens, and their coordinates in frames and pixels for all rows: (1, 3, tokens).
    "LTXVideoTransformer3DModel": Network(
        "transformer_blocks", shared=frozenset({"video_coords"}), sigmas=even_sigmas
    ),
    "MochiTransformer3DModel": Network(
        "transformer_blocks", ("hidden_states", "encoder_hidden_states"), sigmas=_of_mochi
    ),
    "CogVideoXTransformer3DModel": Network(
        "transformer_blocks",
        ("hidden_states", "encoder_hidden_states"),
        _cogvideo,
        shared=frozenset(_ROTARY),
        predicts="velocity",
    ),
}


def network_of(transformer: Any) -> Network:
    """Return the entry of `NETWORKS` for a transformer's class.

    Raises:
        UsageError: There is none.
    """
    for kind in type(transformer).__mro__:
        if kind.__name__ in NETWORKS:
            return NETWORKS[kind.__name__]
    raise UsageError(
        f"{type(transformer).__name__}: expected one of {', '.join(NETWORKS)}. What to do: add a"
        " line to recipes/hunyuan_video/networks.py that says how it is called"
    )


def flow_of(
    transformer: Any,
    latents: torch.Tensor,
    timesteps: torch.Tensor,
    conditions: Mapping[str, torch.Tensor],
    calls: int = 1,
) -> torch.Tensor:
    """Predict the flow for rows of latents, in the shape of `latents`.

    Args:
        transformer: Of a class in `NETWORKS`.
        latents: (B, C, ...).
        timesteps: (2,), from 1000 to 0: of this step and of the next.
        conditions: Conditions by name, of B rows each, except for those that the class shares.
        calls: Number of calls of the network, each with a part of the rows.
    """
    network, rows = network_of(transformer), latents.shape[0]
    parts, size = [], max(1, rows // calls)
    for start in range(0, rows, size):
        at = slice(start, start + size)
        given = {n: v if n in network.shared else v[at] for n, v in conditions.items()}
        times = (timesteps * network.time_scale).unsqueeze(1).expand(2, latents[at].shape[0])
        parts.append(network.call(transformer, latents[at], times[0], times[1], given))
    return torch.cat(parts)
