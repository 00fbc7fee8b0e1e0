"""openpilot's models: frames per second of a teacher, and seconds of a training step.

`python -m benchmarks.openpilot` writes a small model of the real contract (recipes/openpilot/
make_model.py; the published ones are 20 times as large) and prints medians of rounds that take
turns, on random frames. Everyone may use all cores but PyTorch, which has one thread: its tensors
are so small that two wait for each other (`--torch-threads`). What is compared first has to give
the same.

The teacher, over the same frames of one drive: `teacher.drive_all`, from arrays to arrays, with the
jitted port (`teacher.on_accelerator`), given 1, 16 and 64 frames at once, and with onnxruntime
(`teacher.onnx_driver`), which takes frame by frame, as the file's batch is 1, and whose queues are
kept by eager PyTorch; and onnxruntime's sessions alone, on inputs that were made before, without
any queues: what it could do at best.

The step (forward, backward, clipping, Adam) of DoRA on all of the policy, over the same windows,
whose first frames fill the queues and whose others count: the recipe's (`train.make_step`), whose
frames are one scan; the same jitted program with a Python loop over frames, so that each frame is
compiled; and the same modules with PEFT's adapters in eager PyTorch. What frozen layers make of
cameras is computed before, as `train` does. To compile is to trace, lower and compile: the first
step less a later one. Eager PyTorch has nothing of that.
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks import machine, timing
from benchmarks.openpilot_prepare import frame_rates
from recipes.openpilot import driving
from recipes.openpilot.constants import FRAME_SHAPE
from recipes.openpilot.driving import Driver, load_driver
from recipes.openpilot.generations import GENERATIONS
from recipes.openpilot.labels import LABEL_SHAPES
from recipes.openpilot.make_model import make_model
from recipes.openpilot.student import DoraOptions
from recipes.openpilot.teacher import drive_all, on_accelerator, onnx_driver
from recipes.openpilot.train import SequenceLoss, TrainOptions, make_step, make_student
from recipes.openpilot.windows import SEEN

BATCHES = (1, 16, 64)
ONNX, ALONE = "onnxruntime, queues by PyTorch", "onnxruntime alone, inputs ready"
JITTED = "jitted port, {} at once"
SCAN, LOOP, EAGER = "one scan (the recipe)", "a Python loop, jitted", "eager PyTorch with PEFT"
LAYERS = "policy"
# Relative to the largest number, or to the loss.
SAME, SAME_LOSS = 1e-3, 1e-3
Arrays = dict[str, np.ndarray]
Step = Callable[[], float]


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measured work.

    Attributes:
        frames: Frames of the teacher's drive, in one call of a contestant.
        batch: Windows per step.
        warmup: Frames of a window that are not in the loss.
        length: Frames of a window in the loss.
    """

    frames: int = 64
    batch: int = 4
    warmup: int = 8
    length: int = 8


def random_frames(count: int, rows: int | None = None) -> Arrays:
    """Return inputs of frames as in a training set, (count, ...) or (rows, count, ...)."""
    rng = np.random.default_rng(0)
    lead = (count,) if rows is None else (rows, count)
    desires = rng.integers(0, 8, lead)
    return {
        **{n: rng.integers(0, 256, (*lead, *FRAME_SHAPE), np.uint8) for n in ("img", "big_img")},
        "desire": np.eye(8, dtype=np.float32)[desires],
        "traffic_convention": np.tile(np.array([1, 0], np.float32), (*lead, 1)),
        "v_ego": rng.uniform(5, 30, lead).astype(np.float32),
        "action_t": np.full((*lead, 2), 0.3, np.float32),
    }


# The teacher.


def teachers(files: list[Path], frames: int) -> dict[str, Callable[[], np.ndarray]]:
    """Return functions by name that compute the outputs (frames, all heads) of the same drive."""
    arrays = {**random_frames(frames), "run": np.zeros(frames, np.int32)}
    host, driver = onnx_driver(files), load_driver(files)
    ported = on_accelerator(driver)

    def jitted(batch: int) -> Callable[[], np.ndarray]:
        return lambda: drive_all(driver, ported, arrays, batch=batch)

    return {
        ONNX: lambda: drive_all(host, host, arrays, batch=1),
        ALONE: sessions_alone(files, arrays),
        **{JITTED.format(batch): jitted(batch) for batch in BATCHES if batch <= frames},
    }


def sessions_alone(files: list[Path], arrays: Arrays) -> Callable[[], np.ndarray]:
    """Return a function that repeats the calls of onnxruntime during a drive."""
    calls: list[tuple[Any, Any, Any]] = []
    driver: Any = onnx_driver(files)
    for graph in driver.graphs:

        def run(wanted: Any, values: Any, session: Any = graph.session) -> Any:
            calls.append((session, wanted, values))
            return session.run(wanted, values)

        graph.session = SimpleNamespace(run=run)
    drive_all(driver, driver, arrays, batch=1)

    def again() -> np.ndarray:
        found = [session.run(wanted, values)[0].ravel() for session, wanted, values in calls]
        # With two files, vision and policy of each frame alternate.
        return np.concatenate(found).reshape(len(arrays["run"]), -1)

    return again


def check_outputs(found: Mapping[str, np.ndarray]) -> None:
    """Raise an error if the outputs of the contestants differ.

    Raises:
        RuntimeError: They differ.
    """
    expected = found[ONNX]
    scale = float(np.abs(expected).max())
    for name, outputs in found.items():
        away = float(np.abs(outputs - expected).max()) / scale
        if not away <= SAME:
            raise RuntimeError(f"{name}: {away:.1e} from {ONNX}, expected {SAME:.0e} at most")


# The step.


def training_batch(driver: Driver, sizes: Sizes) -> dict[str, torch.Tensor]:
    """Return windows (batch, frames, ...), with the outputs of frozen layers in place of images."""
    count = sizes.warmup + sizes.length
    given = {n: torch.from_numpy(v) for n, v in random_frames(count, sizes.batch).items()}
    frames = {n: given.pop(n).transpose(0, 1) for n in ("img", "big_img")}
    images, _ = driver.images(driver.begin(sizes.batch), frames)
    with torch.no_grad():
        seen = {f"{SEEN}{n}": v.transpose(0, 1) for n, v in driver.see(images).items()}
    lead = (sizes.batch, count)
    plan = torch.randn(*lead, *LABEL_SHAPES["plan"], generator=torch.Generator().manual_seed(0))
    return {**given, **seen, "plan": plan, "plan_valid": torch.ones(lead, dtype=torch.bool)}


def jitted_step(
    student: Driver, loss: SequenceLoss, options: TrainOptions, batch: Any, *, loops: bool
) -> Step:
    """Return the recipe's step, or the same with a Python loop over frames in the program."""
    step = make_step(copy.deepcopy(student), loss, options)
    placed, state = step.place(batch), step.init()

    def take() -> float:
        nonlocal state
        # Patched in every call, though only the first one traces.
        with mock.patch.object(driving, "scan", unrolled if loops else driving.scan):
            state, metrics = step(state, placed)
        return float(metrics["loss"])

    return take


def unrolled(body: Any, carry: Any, xs: Any, *, remat: bool = False) -> tuple[Any, torch.Tensor]:
    """Replace `tpuport`'s scan of a body with one output by a plain Python loop."""
    del remat
    seen, frames, stops = xs
    outputs = []
    for t in range(len(stops)):
        x = ({n: v[t] for n, v in seen.items()}, {n: v[t] for n, v in frames.items()}, stops[t])
        carry, y = body(carry, x)
        outputs.append(y)
    return carry, torch.stack(outputs)


def eager_step(student: Driver, loss: SequenceLoss, options: TrainOptions, batch: Any) -> Step:
    """Return the same step in eager PyTorch, frame by frame."""
    driver = copy.deepcopy(student)
    trained = [p for p in driver.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=options.learning_rate)

    def take() -> float:
        optimizer.zero_grad()
        value, _ = loss(driver, batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(trained, options.clip_norm)
        optimizer.step()
        return value.item()

    return take


def steps(files: list[Path], sizes: Sizes) -> dict[str, Callable[[], Step]]:
    """Return functions by name that make a step that is not compiled yet.

    A call of the step returns its loss.
    """
    # So many steps that the decaying rate is practically constant here.
    options = TrainOptions(
        DoraOptions((LAYERS,), rank=8), warmup=sizes.warmup, length=sizes.length, steps=10**6
    )
    student = make_student(files, options.dora)
    batch = training_batch(student, sizes)
    loss = SequenceLoss(options.losses, options.warmup)
    return {
        SCAN: lambda: jitted_step(student, loss, options, batch, loops=False),
        LOOP: lambda: jitted_step(student, loss, options, batch, loops=True),
        EAGER: lambda: eager_step(student, loss, options, batch),
    }


def begun(
    makers: Mapping[str, Callable[[], Step]], repeats: int
) -> tuple[dict[str, Step], dict[str, list[float]]]:
    """Return compiled steps, and the seconds of compiling by repeat.

    Raises:
        RuntimeError: Their losses differ, in the first step or the two after it.
    """
    ready: dict[str, Step] = {}
    spent: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(repeats):
        losses = {}
        for name, make in makers.items():
            ready[name] = make()
            times, losses[name] = [], []
            for _ in range(3):
                start = time.perf_counter()
                losses[name].append(ready[name]())
                times.append(time.perf_counter() - start)
            spent[name].append(times[0] - min(times[1:]))
        check_losses(losses)
    return ready, spent


def check_losses(losses: Mapping[str, list[float]]) -> None:
    """Raise an error if the losses of the contestants differ.

    Raises:
        RuntimeError: A loss differs.
    """
    for name, found in losses.items():
        for one, other in zip(found, losses[SCAN], strict=True):
            if not abs(one - other) <= SAME_LOSS * abs(other):
                raise RuntimeError(f"{name}: losses {found}, and of {SCAN} {losses[SCAN]}")


def show_teachers(files: list[Path], frames: int, rounds: int) -> None:
    """Check, measure and print the teachers."""
    ways = teachers(files, frames)
    check_outputs({name: way() for name, way in ways.items()})
    times = timing.interleaved(ways, rounds=rounds, seconds=0)
    print(f"\nteacher, {frames} frames")
    print(*frame_rates(times, frames), sep="\n")
    for name in [name for name in ways if name not in (ONNX, ALONE)]:
        print(*(f"{name}: {line}" for line in timing.faster(times, name, (ONNX, ALONE))), sep="\n")


def show_steps(files: list[Path], sizes: Sizes, rounds: int, compiles: int) -> None:
    """Check, measure and print the steps."""
    ready, spent = begun(steps(files, sizes), compiles)
    times = timing.interleaved(ready, rounds=rounds, seconds=0)
    print(f"\nstep, {sizes.batch} windows of {sizes.warmup} frames and {sizes.length} that count")
    for name, series in times.items():
        wall, cpu = (1e3 * statistics.median(of) for of in (series.wall, series.cpu))
        compiled = "" if name == EAGER else f"  {statistics.median(spent[name]):6.1f} s to compile"
        print(f"{name:26} {wall:8.1f} ms a step  {cpu:8.1f} ms of CPU{compiled}")
    print(*(f"{SCAN}: {line}" for line in timing.faster(times, SCAN, (LOOP, EAGER))), sep="\n")
    longer = timing.ratio(spent[LOOP], spent[SCAN]).median
    print(f"{LOOP}: {longer:.1f} times as long to compile as {SCAN}")


def main() -> None:
    """Write a model, measure it, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--generation", choices=list(GENERATIONS), default="0.10.3")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--torch-threads", type=int, default=1)
    parser.add_argument("--compiles", type=int, default=2, help="repeats of compiling")
    for name, value in vars(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    torch.set_num_threads(given.torch_threads)
    sizes = Sizes(given.frames, given.batch, given.warmup, given.length)
    with tempfile.TemporaryDirectory() as folder:
        files = make_model(folder, given.generation)
        print(f"{machine.num_cores()} cores, a small model of {given.generation}")
        show_teachers(files, sizes.frames, given.rounds)
        show_steps(files, sizes, given.rounds, given.compiles)


if __name__ == "__main__":
    main()
