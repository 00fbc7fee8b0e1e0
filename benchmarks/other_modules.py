"""Modules that others wrote, judged by machine: `python -m benchmarks.other_modules FOLDER`.

Each file below the folder that defines modules is imported in a process of its own: its code runs.
Each class of modules, and each function that returns one, is called with arguments guessed from the
names of its parameters, and the module is given the first input out of many that eager PyTorch
takes. Three calls by `convert` (the second with other values, the third with another batch) and a
training step under `porting()` are compared with eager PyTorch, whose own distance from float64
says what rounding explains.
"""

import argparse
import contextlib
import copy
import importlib
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import tpuport
from tpuport.foundation import pytree
from tpuport.foundation.errors import ParityError, TpuportError

# What may become of a module, worst first. Of "not judged" eager PyTorch took no input.
KINDS = ("differs", "raises", "refused", "over time", "passes", "not judged")
# How much farther from float64 than eager a port may be, and what is no distance at all: decisions
# and sums of a deep network turn a rounding of 1e-7 into as much.
FACTOR, NOISE = 8.0, 1e-4
_MOST_WEIGHTS = 30_000_000
_WIDTH = 16
# Values by a part of the name of a parameter; the first that fits counts, `_WIDTH` if none does.
_VALUES: dict[str, Any] = {
    "class": 10, "kernel": 3, "ksize": 3, "head": 4, "stride": 1, "pad": 1, "dilation": 1,
    "groups": 1, "group": 4, "drop": 0.0, "reduc": 4, "ratio": 4, "scale": 2, "window": 4,
    "img_size": 32, "image_size": 32, "resolution": 16, "input_size": 16, "seq_len": 32,
    "pred_len": 8, "length": 32, "patch": 4, "depth": 2, "layers": 2, "num_blocks": 2,
    "vocab": 50, "num_embeddings": 50, "bias": True, "norm_layer": nn.LayerNorm, "norm": None,
    "act": nn.ReLU, "eps": 1e-5, "alpha": 0.5, "beta": 0.5, "gamma": 1.0, "growth": 8, "expan": 2,
    "mult": 2, "temperature": 1.0, "field_dims": [10, 10, 10],
}  # fmt: skip
_SHAPES = [
    (2, _WIDTH, 16, 16), (2, 3, 32, 32), (2, 3, 64, 64), (2, 32, _WIDTH), (2, _WIDTH),
    (2, _WIDTH, 32), (2, 1, 64, 64), (2, 3, 224, 224), (2, _WIDTH, 4, 16, 16), (2, 1, 1024),
    (2, 64, 16, 16), (2, 512, 16, 16), (2, 512, 7, 7), (2, 49, 512), (2, 64, _WIDTH), (2, 50, 512),
]  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """What became of one module.

    Attributes:
        file: The file that defines it, below the folder.
        name: The class, or the function that returns it.
        kind: One of `KINDS`.
        reason: What differs, what was raised, or why nothing was compared.
        seconds: How long it took.
    """

    file: str
    name: str
    kind: str
    reason: str = ""
    seconds: float = 0.0


class OverTime(BaseException):
    """Signal that the time for a module is over; no `except Exception` of its code stops that."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OverTime` in the block after so many seconds."""

    def over(*_: Any) -> None:
        raise OverTime

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- modules and inputs ----------------------------------------------------------------------------


def guessed(parameter: inspect.Parameter) -> Any:
    """Return a value for a parameter without a default, by its name."""
    name = parameter.name.lower()
    return next((value for part, value in _VALUES.items() if part in name), _WIDTH)


def built(make: Callable[..., Any]) -> nn.Module | None:
    """Call a class or function with guessed arguments; return what it gives if it is a module."""
    given = {
        name: guessed(parameter)
        for name, parameter in inspect.signature(make).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    module = make(**given)
    if not isinstance(module, nn.Module):
        return None
    for one in module.modules():
        if isinstance(one, nn.modules.dropout._DropoutNd):
            one.p = 0.0
    return module


def inputs(count: int) -> Iterator[list[Any]]:
    """Yield lists of so many inputs that a module may take."""
    draws = torch.Generator().manual_seed(3)
    for shape in _SHAPES:
        yield [torch.randn(shape, generator=draws) for _ in range(count)]
    for shape in ((2, 16), (2, 3)):
        yield [torch.randint(0, 10, shape, generator=draws) for _ in range(count)]
    for shape in _SHAPES[:6] if count == 2 else ():
        first = torch.randn(shape, generator=draws)
        others = (torch.randn(shape[0], _WIDTH), torch.tensor([3, 5]), _WIDTH)
        yield from ([first, other] for other in others)


def first_input(module: nn.Module) -> tuple[list[Any] | None, str]:
    """Return the first input that a module takes, or None and what the last one raised."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    asked = [p for p in parameters if p.default is p.empty and p.kind in kinds]
    why = f"forward asks for {len(asked)} arguments"
    for given in inputs(len(asked)) if 0 < len(asked) < 5 else ():
        try:
            with torch.no_grad():
                out = copy.deepcopy(module)(*copy.deepcopy(given))
        except Exception as error:  # code of others may raise anything
            why = f"{type(error).__name__}: {error}"
            continue
        if _tensors(out):
            return given, ""
        why = "no tensor among the results"
    return None, why


# -- comparison ------------------------------------------------------------------------------------


def _tensors(result: Any) -> list[torch.Tensor]:
    found = (tpuport.to_torch(leaf) for leaf in pytree.flatten(result)[0] if _is_tensor(leaf))
    return [one.detach().cpu() for one in found]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) or hasattr(leaf, "__jax_array__")


def difference(
    want: list[torch.Tensor], exact: list[torch.Tensor], have: list[torch.Tensor]
) -> str:
    """Say what differs beyond rounding, or return an empty string.

    Args:
        want: What eager PyTorch gives in float32.
        exact: What it gives in float64.
        have: What the port gives.
    """
    if len(want) != len(have):
        return f"{len(have)} tensors instead of {len(want)}"
    for number, (a, truth, b) in enumerate(zip(want, exact, have, strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"tensor {number} is {b.dtype} {tuple(b.shape)}, not {a.dtype} {tuple(a.shape)}"
        if not a.numel():
            continue
        if not a.is_floating_point():
            # Those that float64 changes depend on rounding in eager PyTorch, too.
            if not torch.equal(a, b) and torch.equal(a, truth.to(a.dtype)):
                return f"tensor {number}, of {a.dtype}, differs"
            continue
        missed, ours = (float((one.double() - truth).abs().nan_to_num().max()) for one in (a, b))
        scale = float(truth.abs().nan_to_num().max())
        if ours > FACTOR * missed + NOISE * scale or not torch.equal(a.isnan(), b.isnan()):
            return f"tensor {number}: {ours:.1e} from float64, eager {missed:.1e}, of {scale:.1e}"
    return ""


def _at(device: str, dtype: torch.dtype, given: list[Any]) -> list[Any]:
    cast = [a.to(dtype) if _is_float(a) else a for a in copy.deepcopy(given)]
    return [a.to(device) if isinstance(a, torch.Tensor) else a for a in cast]


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def later(given: list[Any], number: int) -> list[Any]:
    """Return the arguments of a call by its number: the same, other values, another batch."""
    made = [a * (1 - 0.3 * number) if _is_float(a) else a for a in given]
    if number < 2:
        return made
    return [
        torch.cat([a, a[:1]]) if isinstance(a, torch.Tensor) and len(a) == 2 else a for a in made
    ]


def compare_calls(module: nn.Module, given: list[Any]) -> str:
    """Compare three calls of a port in evaluation with eager PyTorch; say what differs."""
    eager, exact = copy.deepcopy(module).eval(), copy.deepcopy(module).double().eval()
    ported = tpuport.convert(copy.deepcopy(module).eval())
    for number in range(3):
        args = later(given, number)
        try:
            with torch.no_grad():
                want = eager(*copy.deepcopy(args))
        except Exception:
            if number < 2:
                raise
            return ""  # this module takes one size of batch
        with torch.no_grad():
            truth = exact(*_at("cpu", torch.float64, args))
        found = difference(*map(_tensors, (want, truth, ported(*args))))
        if found:
            return f"call {number + 1}: {found}"
    return ""


def trained(module: nn.Module, given: list[Any], device: str, dtype: torch.dtype) -> list[Any]:
    """Return the loss of a step, the gradients of parameters and inputs, and the buffers."""
    module = copy.deepcopy(module).to(device, dtype).train()
    # A module may write to its argument, which must be no leaf then.
    leaves = [a.requires_grad_() if _is_float(a) else a for a in _at(device, dtype, given)]
    out = module(*(a * 1 if _is_float(a) else a for a in leaves))
    results = [o for o in pytree.flatten(out)[0] if _is_float(o) and o.requires_grad]
    draws = torch.Generator().manual_seed(0)
    weighted = [(o * torch.randn(o.shape, generator=draws).to(o)).sum() for o in results]
    if not weighted:
        return []
    loss: Any = sum(weighted)
    loss.backward()
    gradients = [p.grad for p in module.parameters()]
    gradients += [a.grad for a in leaves if _is_float(a)]
    held = [torch.zeros(0) if one is None else one for one in gradients]
    return [one.detach().cpu() for one in (loss, *held, *module.buffers())]


def compare_training(module: nn.Module, given: list[Any]) -> str:
    """Compare a training step under `porting()` with eager PyTorch; say what differs."""
    want = trained(module, given, "cpu", torch.float32)
    exact = trained(module, given, "cpu", torch.float64)
    with tpuport.porting():
        have = trained(module, given, "cuda", torch.float32)
    found = difference(want, exact, have)
    return f"training: {found}" if found else ""


def judged(file: str, name: str, make: Callable[..., Any], seconds: float) -> Finding | None:
    """Build a module and compare it; return None for a function that returns no module."""
    begun = time.monotonic()

    def made(kind: str, reason: str = "") -> Finding:
        short = " ".join(reason.split())[:600]
        return Finding(file, name, kind, short, round(time.monotonic() - begun, 1))

    try:
        with time_limit(seconds):
            module = built(make)
            if module is None:
                return None
            if sum(p.numel() for p in module.parameters()) > _MOST_WEIGHTS:
                return made("not judged", "too many weights")
            given, why = first_input(module.eval())
            if given is None:
                return made("not judged", why)
            trained(module, given, "cpu", torch.float64)
    except (Exception, OverTime) as error:  # code of others may raise anything
        is_class = isinstance(make, type)
        return made("not judged", f"{type(error).__name__}: {error}") if is_class else None
    try:
        with time_limit(seconds):
            found = compare_calls(module, given) or compare_training(module, given)
    except ParityError as error:
        return made("differs", str(error))
    except TpuportError as error:
        return made("refused", str(error))
    except OverTime:
        return made("over time")
    except Exception as error:
        return made("raises", f"{type(error).__name__}: {error}")
    return made("differs" if found else "passes", found)


# -- files -----------------------------------------------------------------------------------------


def import_file(folder: Path, file: str) -> Any:
    """Import a file below a folder, by its dotted name or, if that fails, by its own."""
    sys.path[:0] = [str(folder), str((folder / file).parent)]
    try:
        return importlib.import_module(file.removesuffix(".py").replace("/", "."))
    except Exception as error:
        try:
            return importlib.import_module(Path(file).stem)
        except Exception:
            raise error from None


def judge_file(folder: Path, file: str, seconds: float) -> Iterator[Finding]:
    """Judge what a file defines, each within so many seconds."""
    try:
        with time_limit(seconds):
            module = import_file(folder, file)
    except (Exception, OverTime) as error:
        yield Finding(file, "", "not judged", f"{type(error).__name__}: {error}"[:600])
        return
    for name, value in sorted(vars(module).items()):
        is_module = isinstance(value, type) and issubclass(value, nn.Module)
        if not (is_module or inspect.isfunction(value)) or name.startswith("_"):
            continue
        if value.__module__ == module.__name__:
            found = judged(file, name, value, seconds)
            if found is not None:
                yield found


def files_of(folder: Path) -> list[str]:
    """Return the files below a folder that define modules, but for tests and set-up."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        file = path.relative_to(folder).as_posix()
        text = path.read_text(encoding="utf-8", errors="replace")
        if "Module" in text and "test" not in file and path.name != "setup.py":
            found.append(file)
    return found


def main() -> None:
    """Judge all files of a folder, each in a process, and print what is not right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of the repository")
    parser.add_argument(
        "--log", type=Path, default=Path("other_modules.jsonl"), help="all findings"
    )
    parser.add_argument("--seconds", type=float, default=120, help="for a module")
    parser.add_argument("--file", help="judge this file only, in this process")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.file:
        with options.log.open("a") as log:
            for found in judge_file(folder, options.file, options.seconds):
                log.write(json.dumps(asdict(found)) + "\n")
                log.flush()
        return
    options.log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.other_modules", str(folder)]
    command += ["--seconds", str(options.seconds), "--log", str(options.log.resolve())]
    for file in files_of(folder):
        ended = subprocess.run(
            [*command, "--file", file],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
            check=False,
        )
        print(f"{file}: its process ended with {ended.returncode}" if ended.returncode else file)
    lines = options.log.read_text().splitlines() if options.log.exists() else []
    findings = [Finding(**json.loads(line)) for line in lines]
    for kind in KINDS[:4]:
        for one in (one for one in findings if one.kind == kind):
            print(f"{kind}: {one.file}: {one.name}: {one.reason}")
    counts = Counter(one.kind for one in findings)
    print(", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind]) or "no modules")


if __name__ == "__main__":
    main()
