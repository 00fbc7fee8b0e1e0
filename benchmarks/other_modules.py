"""Modules that others wrote, judged by machine: `python -m benchmarks.other_modules FOLDER`.

Each file below the folder that defines modules is imported in a process of its own: its code runs.
Each class of modules, and each function that returns one, is called with arguments guessed from the
names of its parameters, and the module is given the first input out of many that eager PyTorch
takes. Three calls by `convert` (the second with other values, the third with another batch) and a
training step under `porting()` are compared with eager PyTorch, whose own distance from float64
says what rounding explains.
"""

import argparse
import ast
import contextlib
import copy
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tpuport
from benchmarks.module_inputs import first_input, modules_of
from tpuport.foundation import pytree
from tpuport.foundation.errors import ParityError, TpuportError

# What may become of a module, worst first. Of "not judged" eager PyTorch took no input.
KINDS = ("differs", "raises", "refused", "over time", "passes", "runs", "not judged")
# What is said of a module that runs: no two results of it are to be compared.
_RANDOM = "draws random numbers: values were not compared"
# How much farther from float64 than eager a port may be, and what is no distance at all: decisions
# and sums of a deep network turn a rounding of 1e-7 into as much.
FACTOR, NOISE, LEAST = 8.0, 1e-4, 1e-3


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
    sizes = [float(one.abs().nan_to_num().max()) for one in exact if one.numel() and _is_float(one)]
    # What is zero but for rounding, as the gradient of the bias of keys, is that beside the others.
    least = max(sizes, default=0.0) * LEAST
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
        scale = max(float(truth.abs().nan_to_num().max()), least)
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


def draws(run: Callable[[], list[torch.Tensor]]) -> bool:
    """Return whether a run draws random numbers: no two results are then to be compared."""
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        results.append(run())
    pairs = zip(*results, strict=True)
    return not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def _exact(
    of: Callable[[], list[torch.Tensor]], otherwise: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return what float64 gives, or what float32 gave if the code insists on that."""
    try:
        made = of()
    except Exception:  # code of others may raise anything
        return otherwise
    same = len(made) == len(otherwise)
    return made if same and all(map(_alike, made, otherwise)) else otherwise


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape


def compare_calls(module: nn.Module, given: list[Any]) -> str:
    """Compare three calls of a port in evaluation with eager PyTorch; say what differs."""
    eager, exact = copy.deepcopy(module).eval(), copy.deepcopy(module).double().eval()
    ported = tpuport.convert(copy.deepcopy(module).eval())

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            return _tensors(copy.deepcopy(module).eval()(*copy.deepcopy(given)))

    random = draws(run)
    for number in range(3):
        args = later(given, number)
        try:
            with torch.no_grad():
                want = _tensors(eager(*copy.deepcopy(args)))
        except Exception:
            if number < 2:
                raise
            return _RANDOM if random else ""  # this module takes one size of batch
        with torch.no_grad():
            truth = _exact(lambda a=args: _tensors(exact(*_at("cpu", torch.float64, a))), want)
        have = _tensors(ported(*args))
        found = "" if random else difference(want, truth, have)
        if found:
            return f"call {number + 1}: {found}"
    return _RANDOM if random else ""


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

    def run() -> list[torch.Tensor]:
        return trained(module, given, "cpu", torch.float32)

    random, want = draws(run), run()
    exact = _exact(lambda: trained(module, given, "cpu", torch.float64), want)
    with tpuport.porting():
        have = trained(module, given, "cuda", torch.float32)
    if random:
        return _RANDOM
    found = difference(want, exact, have)
    return f"training: {found}" if found else ""


def compared(module: nn.Module, given: list[Any]) -> str:
    """Compare calls and a training step; say what differs, or that values were not compared."""
    found = compare_calls(module, given)
    if found in ("", _RANDOM):
        found = compare_training(module, given) or found
    return found


def prepared(make: Callable[..., Any]) -> tuple[nn.Module | None, list[Any] | None, str]:
    """Return a module, an input that it takes, and else why there is none."""
    module, why = None, ""
    for module in modules_of(make):
        given, missing = first_input(module, lambda out: bool(_tensors(out)))
        if given is not None:
            return module, given, ""
        why = why or missing
    return module, None, why


def judged(file: str, name: str, make: Callable[..., Any], seconds: float) -> Finding | None:
    """Build a module and compare it; return None for a function that returns no module."""
    begun = time.monotonic()

    def made(kind: str, reason: str = "") -> Finding:
        short = " ".join(reason.split())[:600]
        return Finding(file, name, kind, short, round(time.monotonic() - begun, 1))

    try:
        with time_limit(seconds):
            module, given, why = prepared(make)
            if module is None:
                return None
            if given is None:
                return made("not judged", why)
            trained(module, given, "cpu", torch.float32)
    except (Exception, OverTime) as error:  # code of others may raise anything
        is_class = isinstance(make, type)
        return made("not judged", f"{type(error).__name__}: {error}") if is_class else None
    shapes = f" (arguments {', '.join(map(_described, given))})"
    try:
        with time_limit(seconds):
            found = compared(module, given)
    except ParityError as error:
        return made("differs", str(error) + shapes)
    except TpuportError as error:
        return made("refused", str(error) + shapes)
    except OverTime:
        return made("over time")
    except Exception as error:
        return made("raises", f"{type(error).__name__}: {error}{shapes}")
    kind = {"": "passes", _RANDOM: "runs"}.get(found, "differs")
    return made(kind, found + shapes if kind == "differs" else found)


def _described(value: Any) -> str:
    is_tensor = isinstance(value, torch.Tensor)
    return f"{str(value.dtype)[6:]} {tuple(value.shape)}" if is_tensor else repr(value)


# -- files -----------------------------------------------------------------------------------------


def import_file(folder: Path, file: str) -> Any:
    """Import a file below a folder, as part of its package or, if that fails, by its own name."""
    path = folder / file
    top = path.parent
    while (top / "__init__.py").exists() and top != folder:
        top = top.parent
    sys.path[:0] = [str(folder), str(top), str(path.parent)]
    names = [".".join(path.relative_to(one).with_suffix("").parts) for one in (folder, top)]
    error: Exception | None = None
    for name in dict.fromkeys([*names, path.stem]):
        try:
            return importlib.import_module(name)
        except Exception as raised:  # code of others may raise anything
            error = error or raised
    raise error or ImportError(file)


def judge_file(folder: Path, file: str, seconds: float) -> Iterator[Finding]:
    """Judge what a file defines, each within so many seconds."""
    try:
        with time_limit(seconds):
            module = import_file(folder, file)
    except (Exception, OverTime) as error:
        yield Finding(file, "", "not judged", f"{type(error).__name__}: {error}"[:600])
        return
    # A class that a decorator replaced says another module.
    defined = defined_in(folder / file)
    for name, value in sorted(vars(module).items()):
        is_module = isinstance(value, type) and issubclass(value, nn.Module)
        if not (is_module or inspect.isfunction(value)) or name.startswith("_"):
            continue
        if value.__module__ == module.__name__ or (is_module and name in defined):
            found = judged(file, name, value, seconds)
            if found is not None:
                yield found


def defined_in(path: Path) -> set[str]:
    """Return the names of the classes that a file defines."""
    tree = ast.parse(path.read_bytes())
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


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
