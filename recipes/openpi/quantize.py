"""Quantization of both transformers of a policy."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import tpuport
from recipes.openpi.config import Config, read_config
from recipes.openpi.dataset import Demonstrations
from recipes.openpi.inputs import Preparation, stacked
from recipes.openpi.model import Batch, Pi0
from recipes.openpi.weights import SIZES, WEIGHTS
from tpuport.foundation.errors import UsageError
from tpuport.quantization import QuantizationScheme
from tpuport.quantization.files import KEY
from tpuport.quantization.quantize import QuantizedModel
from tpuport.quantization.scheme import as_scheme

# DuQuant as the openpi fork has it: permutations and rotations by blocks of 16, w4a8.
SCHEMES: dict[str, str | QuantizationScheme] = {
    **{name: name for name in ("w8a8", "w8a16", "w4a8", "w4a16")},
    "duquant-w4a8": QuantizationScheme(weight_bits=4, activation_bits=8, method="duquant"),
}
# What stays in float: the image encoder, the time's scales of norms, and projections of actions.
_KEEP = ("**.vision_tower.**", "**.multi_modal_projector.**", "policy.action_*")
_KEEP_OF = {False: ("policy.state_proj",), True: ("**.dense", "policy.time_mlp_*")}  # by π0.5


class Acting(torch.nn.Module):
    """A policy whose forward is the sampling of actions, which is what calibration runs."""

    def __init__(self, policy: Pi0, num_steps: int) -> None:
        super().__init__()
        self.policy, self.num_steps = policy, num_steps

    def forward(self, batch: Batch, noise: torch.Tensor) -> torch.Tensor:
        """Sample actions."""
        return self.policy.sample_actions(batch, noise, self.num_steps)


@dataclass(frozen=True)
class Quantized:
    """A policy with integer weights.

    Attributes:
        policy: The policy, to be converted.
        report: The errors and sizes, see `tpuport.quantize`.
        acting: What is saved: the ported `Acting` of the policy.
    """

    policy: Any
    report: Any
    acting: QuantizedModel


def scheme_of(name: str | QuantizationScheme) -> str | QuantizationScheme:
    """Return a scheme by name; one that is no name is itself.

    Raises:
        UsageError: There is no such scheme.
    """
    if isinstance(name, QuantizationScheme):
        return name
    if name not in SCHEMES:
        raise UsageError(f"scheme={name!r}: expected one of {', '.join(SCHEMES)}")
    return SCHEMES[name]


def name_of(scheme: Mapping[str, Any]) -> str:
    """Return the name of a report's scheme, "custom" if it has none."""
    fields = dict(scheme)
    return next((n for n, one in SCHEMES.items() if asdict(as_scheme(one)) == fields), "custom")


def quantize_policy(
    policy: Pi0,
    scheme: str | QuantizationScheme,
    calibration: Sequence[tuple[Batch, torch.Tensor]],
    *,
    num_steps: int = 4,
) -> Quantized:
    """Quantize a policy, and measure its errors on observations with noise.

    Args:
        policy: The policy in float32.
        scheme: A name of `SCHEMES`, or a scheme.
        calibration: Batches and noise.
        num_steps: Steps of the flow from which layers' inputs are taken.
    """
    return _parts(_quantized(policy, scheme, num_steps, calibration=list(calibration)))


def _parts(made: QuantizedModel) -> Quantized:
    acting: Any = made.to_torch()
    return Quantized(acting.policy, made.quantization, made)


def write_quantized(folder: Path, found: Quantized, config: Config) -> None:
    """Write integer weights, scales and transforms, with the policy's sizes beside them.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tpuport.save_checkpoint(folder / WEIGHTS, found.acting)
    config.save(folder / SIZES)


def read_quantized(folder: Path) -> Quantized | None:
    """Read a policy that `write_quantized` wrote; None if the folder has another one.

    Raises:
        UsageError: There is no config.json.
        CheckpointError: The weights are damaged, or do not fit the sizes.
    """
    config = read_config(folder / SIZES)
    opened = tpuport.open_checkpoint(folder / WEIGHTS)
    if KEY not in opened.metadata:
        return None
    with torch.device("meta"):
        acting = Acting(Pi0(config), 1)
    return _parts(tpuport.quantize(acting.eval(), checkpoint=opened, verify=False))


def _quantized(
    policy: Pi0, scheme: str | QuantizationScheme, num_steps: int = 1, **options: Any
) -> QuantizedModel:
    keep = (*_KEEP, *_KEEP_OF[policy.config.pi05])
    acting = Acting(policy, num_steps)
    return tpuport.quantize(acting, scheme_of(scheme), keep=keep, verify=False, **options)


def frozen_policy(policy: Pi0, scheme: str) -> Any:
    """Return a policy with integer weights by a scheme that needs no calibration."""
    return _parts(_quantized(policy, scheme)).policy


def calibration_of(
    found: Demonstrations, preparation: Preparation, *, batches: int, batch_size: int, seed: int = 0
) -> list[tuple[Batch, torch.Tensor]]:
    """Return batches of demonstrations, evenly spaced over a dataset, with noise."""
    config, count = preparation.config, batches * batch_size
    generator = torch.Generator().manual_seed(seed)
    prepared = [
        preparation.observation(found[index * len(found) // count]) for index in range(count)
    ]
    shape = (batch_size, config.action_horizon, config.action_dim)
    return [
        (
            stacked(prepared[start : start + batch_size], config.max_token_len),
            torch.randn(shape, generator=generator),
        )
        for start in range(0, count, batch_size)
    ]
