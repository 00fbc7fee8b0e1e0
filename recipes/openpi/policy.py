"""A policy that answers observations, with a program for each batch size and prompt length."""

import bisect
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import tpuport
from recipes.openpi.config import CAMERAS, Config
from recipes.openpi.dataset import Demonstrations, LeRobot
from recipes.openpi.inputs import Preparation, Prepared, stacked
from recipes.openpi.model import Pi0, to_bfloat16
from recipes.openpi.quantize import (
    Quantized,
    calibration_of,
    name_of,
    quantize_policy,
    read_quantized,
    write_quantized,
)
from recipes.openpi.robots import robot_of
from recipes.openpi.statistics import read_stats, write_stats
from recipes.openpi.tokens import NAME as TOKENIZER
from recipes.openpi.tokens import read_prompts
from recipes.openpi.weights import read_weights
from tpuport.foundation.errors import UsageError
from tpuport.model.ported_model import PortedModel

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """The settings of a policy that answers.

    Attributes:
        robot: Whose observations it gets.
        prompt: Prompt of observations that have none.
        num_steps: Steps of the flow.
        batch_sizes: Sizes of batches that have programs; the largest is the most at a time.
        prompt_lengths: Lengths of prompts that have programs; the longest prompt is always one.
        bf16: Whether to compute both transformers in bfloat16, as openpi serves.
        seed: Random seed of the noise.
        scheme: How both transformers are quantized, a name of `quantize.SCHEMES`; None for floats.
        data: Dataset that quantization is calibrated on.
    """

    robot: str = "libero"
    prompt: str | None = None
    num_steps: int = 10
    batch_sizes: tuple[int, ...] = (1, 4)
    prompt_lengths: tuple[int, ...] = ()
    bf16: bool = False
    seed: int = 0
    scheme: str | None = None
    data: Path | None = None

    def __post_init__(self) -> None:
        for name in ("batch_sizes", "prompt_lengths"):
            sizes = getattr(self, name)
            if any(size < 1 for size in sizes) or (name == "batch_sizes" and not sizes):
                raise UsageError(f"{name}={sizes}: expected numbers of 1 and more")
        if self.scheme is not None and self.data is None:
            raise UsageError(f"scheme={self.scheme!r}: give the dataset to calibrate on by --data")
        if self.scheme is not None and self.bf16:
            raise UsageError(
                f"scheme={self.scheme!r} and bf16: a quantized policy computes the rest in float32;"
                " leave one of them out"
            )
        if self.num_steps < 1:
            raise UsageError(f"num_steps={self.num_steps}: expected 1 or more")


class Policy:
    """A ported policy with what turns observations into its batches.

    Attributes:
        ported: The model, whose `sample_actions` is called.
        preparation: What turns observations into batches.
        options: The settings.
        scheme: How it is quantized, empty if it is not.
        batch_sizes: Sizes of batches, ascending.
        lengths: Lengths of prompts, ascending.
    """

    def __init__(
        self,
        ported: PortedModel,
        preparation: Preparation,
        options: PolicyOptions,
        scheme: str = "",
    ) -> None:
        self.ported, self.preparation, self.options = ported, preparation, options
        self.scheme = scheme
        self.batch_sizes = sorted({*options.batch_sizes})
        longest = preparation.config.max_token_len
        self.lengths = sorted({longest, *(n for n in options.prompt_lengths if n < longest)})
        self._steps = torch.tensor(options.num_steps, dtype=torch.int32)
        self._random, self._lock = np.random.default_rng(options.seed), threading.Lock()

    @property
    def config(self) -> Config:
        """Return the sizes of the policy."""
        return self.preparation.config

    @property
    def metadata(self) -> dict[str, Any]:
        """Return what a client is told first."""
        robot = self.preparation.robot
        return {
            "robot": robot.name,
            "action_horizon": self.config.action_horizon,
            "action_dim": robot.action_dim,
            "num_steps": self.options.num_steps,
            "max_batch": self.batch_sizes[-1],
            "prompt_lengths": self.lengths,
            "scheme": self.scheme,
        }

    def compile(self) -> list[Any]:
        """Compile all programs, and return the outcome of `tpuport.warmup` for each.

        Each is called once, as a first call takes longer than the others.
        """
        given = [self._arguments(n, m) for n in self.batch_sizes for m in self.lengths]
        method = {"method": "sample_actions"}
        warmed = tpuport.warmup((self.ported, one, method) for one in given)
        for batch, noise, steps in given:
            zeros = {name: torch.zeros_like(one, device="cpu") for name, one in batch.items()}
            noise = torch.zeros_like(noise, device="cpu")
            tpuport.to_numpy(self.ported.sample_actions(zeros, noise, steps))
        return warmed

    def _arguments(self, size: int, length: int) -> tuple[Any, ...]:
        side, dim = self.config.vision.image_size, self.config.action_dim

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(size, *shape, dtype=dtype, device="meta")

        batch = {
            "images": empty(len(CAMERAS), side, side, 3, dtype=torch.uint8),
            "image_masks": empty(len(CAMERAS), dtype=torch.bool),
            "tokens": empty(length, dtype=torch.int32),
            "token_mask": empty(length, dtype=torch.bool),
            "state": empty(dim),
        }
        return batch, empty(self.config.action_horizon, dim), self._steps

    def prepare(self, observation: Mapping[str, Any]) -> Prepared:
        """Prepare an observation.

        Raises:
            UsageError: A part is missing, or is not what the policy takes.
        """
        return self.preparation.observation(observation, self.options.prompt)

    def act(self, prepared: Sequence[Prepared], noise: Floats | None = None) -> list[Floats]:
        """Return a chunk of the robot's actions (horizon, action dim) for each observation.

        Args:
            prepared: At most as many as the largest batch.
            noise: Where the flows begin (n, horizon, action dim); by default drawn.
        """
        count = len(prepared)
        size = self.batch_sizes[bisect.bisect_left(self.batch_sizes, count)]
        longest = max(len(one.tokens) for one in prepared)
        length = self.lengths[bisect.bisect_left(self.lengths, longest)]
        rows = [*prepared, *[prepared[0]] * (size - count)]
        shape = (size, self.config.action_horizon, self.config.action_dim)
        with self._lock:
            drawn = self._random.standard_normal(shape, np.float32)
        if noise is not None:
            drawn[:count] = noise
        found = self.ported.sample_actions(
            stacked(rows, length), torch.from_numpy(drawn), self._steps
        )
        actions = tpuport.to_numpy(found)[:count]
        return [
            self.preparation.actions_out(chunk, one.raw_state)
            for chunk, one in zip(actions, prepared, strict=True)
        ]


def load_policy(folder: Path, options: PolicyOptions) -> Policy:
    """Read a policy that `finetune` or `quantize` wrote, or one of openpi with a config.json.

    Raises:
        UsageError: A file is missing, the robot has more numbers than the policy takes, or the
            policy is quantized and the options have a scheme or bfloat16.
        CheckpointError: The weights are damaged.
    """
    frozen = read_quantized(folder)
    if frozen is not None and (options.scheme is not None or options.bf16):
        raise UsageError(
            f"{folder} has a policy that is quantized already: leave the scheme and bfloat16 out,"
            " or give the folder of the float policy that it was made from"
        )
    model = read_weights(folder) if frozen is None else frozen.policy
    preparation = preparation_of(folder, model.config, options)
    scheme = options.scheme or ""
    if frozen is not None:
        scheme = name_of(frozen.report.scheme)
    elif options.scheme is not None:
        model = quantized(model.float(), preparation, options).policy
    else:
        model = to_bfloat16(model.float()) if options.bf16 else model.float()
    ported = tpuport.convert(model.requires_grad_(False), methods=("sample_actions",), verify=False)
    return Policy(ported, preparation, options, scheme)


def preparation_of(folder: Path, config: Config, options: PolicyOptions) -> Preparation:
    """Read norm stats and tokenizer of a policy's folder."""
    prompts = read_prompts(folder, config)
    return Preparation(config, robot_of(options.robot), read_stats(folder), prompts)


def quantized(
    model: Pi0, preparation: Preparation, options: PolicyOptions, *, batches: int = 8
) -> Quantized:
    """Quantize a policy as the options say, calibrated on frames of their dataset."""
    assert options.scheme is not None
    assert options.data is not None
    found = Demonstrations(LeRobot(options.data), preparation.robot, model.config.action_horizon)
    calibration = calibration_of(found, preparation, batches=batches, batch_size=2)
    return quantize_policy(model, options.scheme, calibration)


def freeze_policy(
    folder: Path, options: PolicyOptions, out: Path | None = None, *, batches: int = 8
) -> Any:
    """Quantize a policy, write it with all that serving reads, and return the report.

    Args:
        folder: Folder of the float policy.
        options: The scheme, the robot and the dataset to calibrate on.
        out: Folder to write to; None for none.
        batches: Pairs of frames to calibrate on.

    Raises:
        UsageError: `out` is the folder of the float policy, or a file is missing.
        CheckpointError: The weights are damaged, or `out` cannot be written.
    """
    if out is not None and out.resolve() == folder.resolve():
        raise UsageError(f"{out} is the folder of the float policy; give another one")
    model = read_weights(folder).float()
    preparation = preparation_of(folder, model.config, options)
    found = quantized(model, preparation, options, batches=batches)
    if out is not None:
        write_quantized(out, found, model.config)
        write_stats(out / "assets" / options.robot, preparation.stats)
        shutil.copyfile(folder / TOKENIZER, out / TOKENIZER)
    return found.report
