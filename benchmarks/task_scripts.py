"""Whole research scripts, in random variants, in eager PyTorch and under porting().

Each task of benchmarks/tasks.txt is a small training script as its field writes it: reinforcement
learning, GANs, diffusion, detection, rendering, graphs, speech, meta-learning and their like, with
data loaders, schedules, checkpoints and metrics; and what such scripts share, such as a trainer
class, samplers, process groups, profilers and evaluation. `<<a|b>>` stands for one of the two. What
a script shows by `seen(name, *values)` is compared; by `rough(...)`, as numbers of bfloat16 are.
Prints what differs: `python -m benchmarks.task_scripts --count 100`.
"""

import random
import re
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import tpuport
from benchmarks.seeds import Found, run_seeds, varied
from tpuport.foundation.errors import ParityError, PortError

_TASKS = Path(__file__).with_name("tasks.txt")
_HEAD = """import collections
import contextlib
import copy
import itertools
import math
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import nn

"""


def made(seed: int) -> str:
    """Return the script of a seed: the tasks in turn, each in a random variant."""
    tasks = re.split(r"^### ", _TASKS.read_text(), flags=re.M)[1:]
    title, _, task = tasks[seed % len(tasks)].partition("\n")
    task, picked = varied(task, random.Random(seed))
    return f"# {title}\n{_HEAD}CHOICE = {' '.join(picked)!r}\n\n{task}"


def run(source: str, device: str, path: Path) -> tuple[list[tuple[str, Any, float]], Any]:
    """Run a script, and return what it shows with its tolerance, and the exception that ends it."""
    path.write_text(source)
    shown: list[tuple[str, Any, float]] = []

    def shows(tolerance: float) -> Any:
        def show(name: str, *values: Any) -> None:
            shown.append((name, [_kept(value) for value in values], tolerance))

        return show

    script = types.ModuleType("script")
    script.__dict__.update(__file__=str(path), device=device, seen=shows(1e-3), rough=shows(5e-2))
    sys.modules["script"] = script  # where pickle and inspect look for its classes
    torch.manual_seed(0)
    random.seed(0)
    try:
        exec(compile(source, path, "exec"), script.__dict__)
    except Exception as error:
        return shown, error
    finally:
        del sys.modules["script"]
    return shown, None


def _kept(value: Any) -> Any:
    return value.detach().cpu().to_dense().clone() if torch.is_tensor(value) else value


def distance(want: Any, have: Any) -> float:
    """Return how far two values are apart, relative to the largest; inf if their kinds differ."""
    if isinstance(want, list | tuple) and isinstance(have, list | tuple):
        if len(want) != len(have):
            return float("inf")
        return max((distance(a, b) for a, b in zip(want, have, strict=True)), default=0.0)
    if isinstance(want, dict) and isinstance(have, dict):
        return distance(sorted(want.items()), sorted(have.items()))
    if type(want) is not type(have):
        return float("inf")
    if isinstance(want, str | bytes | bool | type(None)):
        return 0.0 if want == have else float("inf")
    a, b = torch.as_tensor(want), torch.as_tensor(have)
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    a, b = a.double(), b.double()
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    scale = a.abs().nan_to_num(posinf=0.0).max().clamp(min=1e-2) if a.numel() else torch.ones(())
    return float((apart / scale).nan_to_num(nan=float("inf")).max()) if a.numel() else 0.0


class Shaken(torch.overrides.TorchFunctionMode):
    """Changes the result of each product by a rounding error."""

    def __init__(self) -> None:
        super().__init__()
        self._draws = torch.Generator().manual_seed(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.exp):
            return out * (1 + 1e-7 * torch.randn(out.shape, generator=self._draws).to(out.dtype))
        return out


def verdict(source: str, folder: Path) -> tuple[str, str]:
    """Run a script twice and compare: "passes", "refused", "eager raises" or "differs".

    It is "chaotic" if rounding errors in eager PyTorch have about the same effect.
    """
    path = folder / "script.py"
    expected, raised = run(source, "cpu", path)
    if raised is not None:
        return "eager raises", f"{type(raised).__name__}: {raised}"
    with tpuport.porting():
        got, error = run(source, "cuda", path)
    for index, ((name, want, tolerance), (_, have, _)) in enumerate(
        zip(expected, got, strict=False)
    ):
        apart = distance(want, have)
        if apart > tolerance:
            with Shaken():
                shaken, _ = run(source, "cpu", path)
            effect = max(
                distance(e[1], s[1]) for e, s in zip(expected, shaken[: index + 1], strict=False)
            )
            kind = "chaotic" if 8 * effect > apart else "differs"
            return kind, f"{name}: {apart:.3g} apart ({effect:.3g} by rounding)\n{want}\n{have}"
    if error is not None:
        kind = "differs"
        if isinstance(error, PortError) and not isinstance(error, ParityError):
            kind = "refused"
        return kind, f"after {len(got)} values: {type(error).__name__}: {error}"
    return ("passes" if len(expected) == len(got) else "differs"), ""


def _judged(seed: int, folder: Path) -> Iterator[Found]:
    source = made(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield Found(*verdict(source, folder), source, source.partition("\n")[0][2:32])


if __name__ == "__main__":
    run_seeds(__doc__, _judged)
