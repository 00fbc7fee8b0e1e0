"""Ports on a GPU: equal to eager PyTorch on the CPU, and how fast beside CUDA PyTorch there.

`python -m benchmarks.gpu` needs a GPU that both jax and torch can use, and writes gpu.json to
`--out`. `--quick` runs the same lines at tiny sizes, on a CPU too. docs/gpu.md has what one machine
gave.
"""

import argparse
import copy
import itertools
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_models, machine, timing
from benchmarks.gpu_models import Checked, Timed

# jax takes three quarters of a GPU's memory at its start unless told not to; torch needs some too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
RATE, STEPS = 1e-3, 3


@dataclass(frozen=True)
class Compared:
    """A port beside eager PyTorch on the CPU.

    Attributes:
        name: Name of the program.
        calls: Calls that were compared, with other values in each.
        error: Largest error of outputs, relative to the largest number of each.
        gradient: The same of the parameters' gradients at the first call; None if not compared.
        tolerance: What tpuport allows.
        refused: The error, if the port was refused or differed.
    """

    name: str
    calls: int = 0
    error: float | None = None
    gradient: float | None = None
    tolerance: float | None = None
    refused: str = ""


def compare(case: Checked) -> Compared:
    """Port a program and call it as often as it has inputs; each call is compared, by tpuport too.

    tpuport compares with the same random numbers; where a program draws none, the outputs are also
    compared here, with a copy of the module that tpuport never saw.
    """
    import tpuport

    module, apart = case.module, copy.deepcopy(case.module)
    try:
        ported = tpuport.convert(module, verify="always")
        worst = 0.0
        for args in case.inputs:
            found = tpuport.to_torch(ported(*args))
            if not case.draws:
                worst = max(worst, _error(found, apart(*args)))
        ported.verify(*case.inputs[0])
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {str(error).strip()}"
        return Compared(case.name, refused=text[:2000])
    shown = ported.report.worst
    gradients = [one for one in ported.report.parity if "grad" in one.path]
    return Compared(
        case.name,
        len(case.inputs),
        max(worst, 0.0 if shown is None else shown.max_rel),
        max((one.max_rel for one in gradients), default=None),
        None if shown is None else shown.tolerance,
    )


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    if found.shape != wanted.shape:
        return float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def compare_training(case: Timed) -> dict[str, Any]:
    """Take a few steps on the device and in eager PyTorch on the CPU, and compare the losses."""
    import tpuport
    from tpuport.training import from_torch, make_train_step

    module, apart = copy.deepcopy(case.module), copy.deepcopy(case.module)
    optimizer = torch.optim.AdamW(apart.parameters(), lr=RATE)
    wanted = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = gpu_models.loss(apart, case.args)
        loss.backward()
        optimizer.step()
        wanted.append(float(loss.detach()))
    try:
        ported = tpuport.convert(module)
        made = torch.optim.AdamW(module.parameters(), lr=RATE)
        step = make_train_step(ported, gpu_models.loss, from_torch(ported, made))
        state, found = step.init(seed=0), []
        for _ in range(STEPS):
            state, metrics = step(state, case.args)
            found.append(float(metrics["loss"]))
    except Exception as error:
        traceback.print_exc()
        return {"name": case.name, "refused": f"{type(error).__name__}: {error}"[:2000]}
    worst = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
    return {"name": case.name, "losses": found, "eager": wanted, "error": worst}


@dataclass(frozen=True)
class Setting:
    """The numbers that both sides compute in.

    Attributes:
        name: Name for the table.
        dtype: Dtype of parameters and of floating inputs.
        tf32: Whether products of float32 may round their operands to TF32.
    """

    name: str
    dtype: torch.dtype
    tf32: bool = False

    def place(self, case: Timed, device: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
        """Return a copy of the module, and its arguments, on a device."""
        module = copy.deepcopy(case.module).to(device, self.dtype)
        return module, tuple(
            x.to(device, self.dtype if x.is_floating_point() else x.dtype) for x in case.args
        )


SETTINGS = (
    Setting("float32", torch.float32),
    Setting("bfloat16", torch.bfloat16),
    Setting("TF32", torch.float32, tf32=True),
)
FORWARD, TRAINING = "forward", "training step"
OURS, EAGER, COMPILED = "tpuport", "eager CUDA", "torch.compile"


def _synchronized(call: Callable[[], Any], device: str, count: int) -> Callable[[], None]:
    """Return a function that makes calls one after the other and waits for the last."""

    def run() -> None:
        for _ in range(count):
            call()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def torch_call(
    case: Timed, what: str, setting: Setting, device: str, *, compiled: bool
) -> Callable[[], Any]:
    """Return a call in PyTorch on a device; with a fused optimizer where it trains."""
    module, args = setting.place(case, device)
    run: Any = torch.compile(module, fullgraph=True, dynamic=False) if compiled else module
    if what == FORWARD:

        def forward() -> None:
            with torch.no_grad():
                run(*args)

        return forward
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, fused=device == "cuda")

    def training() -> None:
        optimizer.zero_grad()
        gpu_models.loss(run, args).backward()
        optimizer.step()

    return training


def ported_call(case: Timed, what: str, setting: Setting) -> Callable[[int], None]:
    """Return a function that makes so many calls of the port, and waits for the last."""
    import jax

    import tpuport
    from tpuport.training import from_torch, make_train_step

    module, args = setting.place(case, "cpu")
    precision = "tensorfloat32" if setting.tf32 else "highest"
    ported = tpuport.convert(module, matmul_precision=precision, verify=False, checks=False)
    arrays = tuple(jax.numpy.asarray(tpuport.to_numpy(x)) for x in args)
    if what == FORWARD:
        forward = jax.jit(lambda p, b, x: ported.apply(p, b, None, *x)[0])

        def run(count: int) -> None:
            out = None
            for _ in range(count):
                out = forward(ported.params, ported.buffers, arrays)
            jax.block_until_ready(out)

        return run
    optimizer = from_torch(ported, torch.optim.AdamW(module.parameters(), lr=RATE))
    step = make_train_step(ported, gpu_models.loss, optimizer)
    held = [step.init(seed=0)]

    def train(count: int) -> None:
        for _ in range(count):
            held[0], _ = step(held[0], arrays)
        jax.block_until_ready(held[0].params)

    return train


def measure(
    case: Timed, setting: Setting, device: str, *, ours: bool, rounds: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield medians of a call, in the ways of torch in turn or as a port.

    One run of a contestant is several calls and one wait for the device.
    """
    torch.set_float32_matmul_precision("high" if setting.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = setting.tf32
    for what in (FORWARD, TRAINING):
        row: dict[str, Any] = {"name": case.name, "setting": setting.name, "what": what}
        start = time.perf_counter()
        contestants, counts = {}, {}
        for name, make in _ways(case, what, setting, device, ours=ours):
            try:
                run = make()
                run(2)
                counts[name] = _calls_in(run, seconds)
            except Exception as error:
                traceback.print_exc()
                row[f"{name} failed"] = f"{type(error).__name__}: {error}"[:500]
                continue
            contestants[name] = lambda run=run, count=counts[name]: run(count)
        times = timing.interleaved(contestants, rounds=rounds, seconds=0)
        each = {name: [s / counts[name] for s in one.wall] for name, one in times.items()}
        row["seconds"] = {name: statistics.median(one) for name, one in each.items()}
        row["spread"] = {name: [min(one), max(one)] for name, one in each.items()}
        row["took"] = time.perf_counter() - start
        yield row
        torch._dynamo.reset()


def _calls_in(run: Callable[[int], None], seconds: float) -> int:
    start = time.perf_counter()
    run(1)
    return max(1, round(seconds / max(time.perf_counter() - start, 1e-6)))


def _ways(
    case: Timed, what: str, setting: Setting, device: str, *, ours: bool
) -> Iterator[tuple[str, Callable[[], Callable[[int], None]]]]:
    def of_torch(*, compiled: bool) -> Callable[[int], None]:
        call = torch_call(case, what, setting, device, compiled=compiled)
        return lambda count: _synchronized(call, device, count)()

    if ours:
        yield OURS, lambda: ported_call(case, what, setting)
        return
    yield COMPILED, lambda: of_torch(compiled=True)
    yield EAGER, lambda: of_torch(compiled=False)


def main() -> None:
    """Compare and time, and write gpu.json after each step: what is there stays there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, on a CPU too")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder of gpu.json")
    parser.add_argument("--part", choices=("check", "times"), help="only one part")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="when no case is timed any more"
    )
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"gpu{'-' + options.part if options.part else ''}.json"
    found: dict[str, Any] = {"check": [], "training": [], "times": []}

    def note(kind: str, one: dict[str, Any]) -> None:
        found[kind].append(one)
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(kind, json.dumps(one), flush=True)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = gpu_models.timed(quick=options.quick)
    if options.part != "check":
        rounds, seconds = (3, 0.0) if options.quick else (7, 0.1)
        settings = SETTINGS[:1] if options.quick else SETTINGS
        # Once torchax is imported, torch refuses backward() and torch.compile on CUDA: "PyTorch is
        # not linked with support for jax devices". So all of torch's own come first.
        for ours, setting, case in itertools.product((False, True), settings, cases):
            if time.monotonic() > end:
                print(f"no time is left for {case.name}, {setting.name}", flush=True)
                continue
            for row in measure(case, setting, device, ours=ours, rounds=rounds, seconds=seconds):
                note("times", row)
    import jax

    found["machine"] = {
        **machine.versions(),
        "jax device": f"{jax.devices()[0].device_kind} ({jax.default_backend()})",
        "torch device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    torch.set_float32_matmul_precision("highest")
    if options.part != "times":
        for case in gpu_models.checked(quick=options.quick):
            note("check", asdict(compare(case)))
        for case in gpu_models.timed(quick=True):
            note("training", compare_training(case))
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
