"""Compilation of a policy call and its parts at full size, from shapes alone, without a TPU."""

from collections.abc import Iterator
from typing import Any

import jax
import torch

import tpuport
from recipes.openpi.config import Config, config_of
from recipes.openpi.gemma import Keys
from recipes.openpi.model import Batch, Pi0, Prefix, to_bfloat16
from recipes.openpi.quantize import frozen_policy
from tpuport.aot.report import CompileReport
from tpuport.foundation.errors import UsageError
from tpuport.model.ported_model import PortedModel

Shape = jax.ShapeDtypeStruct
PARTS = ("vision", "prefix", "step", "call")


def image_tokens(policy: Pi0, images: torch.Tensor) -> torch.Tensor:
    """Return the tokens of images: the first part of a call."""
    return policy.encode_images(images)


def prefix_keys(policy: Pi0, batch: Batch, tokens: torch.Tensor) -> list[Keys]:
    """Return keys and values of all layers: the second part."""
    return policy.read_prefix(batch, tokens).keys


def flow_step(
    policy: Pi0, keys: list[Keys], valid: torch.Tensor, state: torch.Tensor, *noisy: torch.Tensor
) -> torch.Tensor:
    """Return the velocity of noisy actions at a time: a call has ten of these."""
    return policy.velocity(Prefix(keys, valid), state, *noisy)


METHODS = {"vision": image_tokens, "prefix": prefix_keys, "step": flow_step}


def shapes_of(config: Config, batch: int, cameras: int, length: int) -> dict[str, tuple[Any, ...]]:
    """Return the arguments of each part, as shapes."""
    side, width = config.vision.image_size, config.language.width
    tokens = cameras * config.vision.num_tokens
    sizes = config.language
    keys = Shape((batch, sizes.kv_heads, tokens + length, sizes.head_dim), "bfloat16")
    given = {
        "images": Shape((batch, cameras, side, side, 3), "uint8"),
        "image_masks": Shape((batch, cameras), "bool"),
        "tokens": Shape((batch, length), "int32"),
        "token_mask": Shape((batch, length), "bool"),
        "state": Shape((batch, config.action_dim), "float32"),
    }
    actions = Shape((batch, config.action_horizon, config.action_dim), "float32")
    valid, time = Shape((batch, tokens + length), "bool"), Shape((batch,), "float32")
    return {
        "vision": (given["images"],),
        "prefix": (given, Shape((batch, tokens, width), "bfloat16")),
        "step": ([(keys, keys)] * sizes.depth, valid, given["state"], actions, time),
        "call": (given, actions, torch.tensor(10, dtype=torch.int32)),
    }


def make_ported(config: Config, scheme: str | None = None) -> PortedModel:
    """Return a policy on the meta device as it is served: in bfloat16, or quantized."""
    with torch.device("meta"):
        policy = to_bfloat16(Pi0(config).eval().requires_grad_(False))
    if scheme is not None:
        policy = frozen_policy(policy, scheme)
    methods = (*METHODS.values(), "sample_actions")
    return tpuport.convert(policy, methods=methods, verify=False)


def compile_parts(
    size: str = "pi0",
    topology: str = "v6e-1",
    *,
    parts: tuple[str, ...] = PARTS,
    batch: int = 1,
    cameras: int = 3,
    scheme: str | None = None,
    quick: bool = True,
) -> Iterator[tuple[str, CompileReport]]:
    """Compile parts of a policy call, and yield the report of each.

    Args:
        size: Size of the policy.
        topology: TPU slice, such as "v6e-1".
        parts: Of `PARTS`; "call" is all of a call as one program, in which the steps are a loop.
        batch: Observations at a time.
        cameras: Pictures of an observation.
        scheme: A name of `quantize.SCHEMES`, None for bfloat16.
        quick: See `tpuport.compile_for`.

    Raises:
        UsageError: There is no such size, part or scheme.
        MissingExtraError: libtpu is not installed.
    """
    if unknown := [part for part in parts if part not in PARTS]:
        raise UsageError(f"part={unknown[0]!r}: expected one of {', '.join(PARTS)}")
    config = config_of(size)
    ported = make_ported(config, scheme)
    shapes = shapes_of(config, batch, cameras, config.max_token_len)
    for part in parts:
        method = METHODS[part].__name__ if part in METHODS else "sample_actions"
        yield (
            part,
            tpuport.compile_for(
                ported,
                topology,
                inputs=shapes[part],
                method=method,
                rules="ddp",
                mesh={"data": -1},
                quick=quick,
            ),
        )


def milliseconds(reports: dict[str, CompileReport], num_steps: int = 10) -> float | None:
    """Return the estimated time of a call from those of its parts; None if one is not known."""
    times = [reports[part].estimate for part in METHODS if part in reports]
    if len(times) < len(METHODS) or any(one is None for one in times):
        return None
    vision, prefix, step = (one.seconds * 1000 for one in times if one is not None)
    return vision + prefix + num_steps * step
