"""The loop around a training step: resuming, logging, saving, evaluating, ending on SIGTERM."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuport.cost import chip_of
from tpuport.foundation.errors import CheckpointError, UsageError
from tpuport.sharding.shard import argument_name
from tpuport.training.checkpoints import Checkpoints
from tpuport.training.input.batches import MASK, Batches
from tpuport.training.metric_writers import PictureSink, Sink, as_sinks
from tpuport.training.preemption import Preempted, Preemption
from tpuport.training.progress import Meter, Shown
from tpuport.training.state import TrainState

# The most steps in flight: more would only hold their batches in memory.
_AHEAD = 8


@dataclass(frozen=True)
class Profile:
    """The steps to trace with `jax.profiler`, for TensorBoard or xprof.

    Attributes:
        directory: the folder of the trace.
        start: the first step that is traced, counted from 1; the first ones compile.
        steps: the number of steps to trace.
    """

    directory: str | Path
    start: int = 10
    steps: int = 5

    @property
    def stop(self) -> int:
        """Return the first step after the traced ones."""
        return self.start + self.steps


def fit(
    step: Any,
    batches: Any,
    *,
    steps: int,
    state: TrainState | None = None,
    seed: int = 0,
    checkpoints: Checkpoints | str | Path | None = None,
    save_every: int = 1000,
    log_every: int = 10,
    evaluate: Callable[[Any, TrainState], Mapping[str, Any] | None] | None = None,
    evaluate_every: int | None = None,
    sinks: Any = (),
    profile: Profile | None = None,
    progress: bool = True,
    peak_flops: float | None = None,
) -> TrainState:
    """Train up to a step, resuming from where the last run of the same command ended.

    No step waits for the devices: metrics are read every `log_every` steps, one step late. On
    SIGTERM the run ends after the current step: its state is saved, and `Preempted` ends the script
    with status 143. Then, or after a kill, the same call resumes from the last saved state.

    Args:
        step: a step made by `make_train_step` or `alternating`.
        batches: `Batches`, or a list of batches or a DataLoader to make them of.
        steps: the number of steps of the entire run, those before a restart included.
        state: the initial state; by default `step.init(seed)`. A saved one takes precedence.
        seed: random seed of the initial state.
        checkpoints: the folder or `Checkpoints` of saved states, which include the last one.
        save_every: the number of steps between two saves.
        log_every: the number of steps between two logs.
        evaluate: returns numbers by name, given the step and the state, which must not change.
            Among them may be pictures: arrays (height, width, 3) of 8 bits, for sinks that have
            `write_pictures`. If a state is saved after the same step, that happens afterwards, so a
            run that is killed meanwhile evaluates again; on SIGTERM nothing is evaluated.
        evaluate_every: the number of steps between evaluations; by default only after the last one.
        sinks: one or several sinks to log to: `JsonLines`, `TensorBoard`, `WandB`, any `Sink`.
        profile: the steps to trace.
        progress: whether to show a bar on a terminal, lines elsewhere, on standard error.
        peak_flops: peak FLOP/s of one device, for MFU; known for TPUs. MFU counts recomputation.

    Returns:
        The state after the last step; `step.load_state(state)` loads it into the model.

    Raises:
        Preempted: the process was asked to end.
        UsageError: an argument is invalid, or a padded batch's mask is not used by the loss.
        CheckpointError: a state cannot be saved or read.
    """
    counts = {"steps": steps, "save_every": save_every, "log_every": log_every}
    _check(counts, evaluate, evaluate_every)
    first = jax.process_index() == 0
    times = _Times(steps, save_every, log_every, evaluate_every)
    outlets = as_sinks(sinks) if first else []
    with contextlib.ExitStack() as stack:
        if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
            checkpoints = stack.enter_context(Checkpoints(checkpoints))
        given = _as_batches(batches)
        begun: Any = _begun(step, given, state, seed, checkpoints)
        shown = Shown(steps, int(begun.step), on=progress and first)
        loop = _RunLoop(
            step, given, times, checkpoints, evaluate, outlets, profile, shown, peak_flops
        )
        return loop.run(begun)


@dataclass(frozen=True)
class _Times:
    """The steps after which the loop saves, logs and evaluates."""

    steps: int
    save_every: int
    log_every: int
    evaluate_every: int | None

    def is_due(self, number: int, every: int | None) -> bool:
        """Return whether something is due after a step, as it always is after the last one."""
        return number == self.steps or (every is not None and number % every == 0)


def _check(counts: Mapping[str, int], evaluate: Any, evaluate_every: int | None) -> None:
    for name, value in counts.items():
        if value < 1:
            raise UsageError(f"{name}={value}: expected a number of steps, 1 or more")
    if evaluate_every is not None and (evaluate is None or evaluate_every < 1):
        raise UsageError(
            f"evaluate_every={evaluate_every}: expected a number of steps, 1 or more, and evaluate="
        )


def _as_batches(given: Any) -> Batches:
    """Return `Batches`, made of a list of batches or a loader if need be."""
    if isinstance(given, Batches):
        return given
    if isinstance(given, (list, tuple)):
        return Batches(given, None, shuffle=False)
    return Batches(given)


def _begun(
    step: Any, batches: Batches, state: Any, seed: int, checkpoints: Checkpoints | None
) -> Any:
    """Return the initial or the last saved state, and restore the batches to its position."""
    if state is None:
        state = step.init(seed)
    if checkpoints is None or not checkpoints.steps:
        return state
    # Only shapes are kept, so that the arrays make room for the ones that are read.
    like = jax.tree.map(
        lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=getattr(v, "sharding", None)),
        state,
    )
    del state
    found = checkpoints.restore(like)
    if found is None or found.position is None:
        raise CheckpointError(
            f"the state of step {max(checkpoints.steps)} in {checkpoints.directory} was saved"
            " without the position of the input, so which batch comes next is not known. What to"
            " do: save it with batches.position, or give another directory and state="
        )
    batches.restore(found.position)
    return found.state


@dataclass
class _RunLoop:
    """One call of `fit`."""

    step: Any
    batches: Batches
    times: _Times
    checkpoints: Checkpoints | None
    evaluate: Callable[[Any, TrainState], Mapping[str, Any] | None] | None
    sinks: list[Sink]
    profile: Profile | None
    shown: Shown
    peak: float | None
    first: int = 0

    def __post_init__(self) -> None:
        self._meter = Meter()
        self._num_programs = len(getattr(self.step, "causes", ()))
        self._running: deque[Any] = deque()
        # A step, the epoch of its batch, and its metrics, which are not read yet.
        self._pending: tuple[int, int, dict[str, Any]] | None = None
        self._started = time.perf_counter()
        self._tracing = False

    def run(self, state: Any) -> Any:
        """Train up to the last step."""
        self.first = int(state.step)
        try:
            for sink in self.sinks:
                sink.start(self.first)
            if self.first:
                self.shown.note(f"resuming after step {self.first}")
            with Preemption() as preemption, self.batches.device_iterator(self.step) as given:
                state = self._steps(state, given, preemption)
            if self.checkpoints is not None:
                self.checkpoints.wait()
            return state
        finally:
            if self._tracing:
                jax.profiler.stop_trace()
            self.shown.close()
            for sink in self.sinks:
                sink.close()

    def _steps(self, state: Any, given: Iterator[Any], preemption: Preemption) -> Any:
        self._meter.start(self.first)
        times = self.times
        for number in range(self.first + 1, times.steps + 1):
            epoch = self.batches.position["epoch"]
            batch = self._next(state, given, number, preemption)
            state, metrics = self._one(state, batch, number)
            self._log_pending()
            if times.is_due(number, times.log_every):
                self._note(number, epoch, state, metrics)
            asked = preemption.asked(number)
            ends = asked and number < times.steps
            try:
                if not ends and times.is_due(number, times.evaluate_every):
                    self._evaluate(number, state)
            finally:  # a failed evaluation costs no training
                if asked or times.is_due(number, times.save_every):
                    self._save(state)
            if ends:
                self._end(number)
        self._log_pending()
        return state

    def _next(self, state: Any, given: Iterator[Any], number: int, preemption: Preemption) -> Any:
        """Return the next batch; if reading fails during preemption, save the state and end."""
        try:
            return next(given)
        except Exception as error:
            if not preemption.is_noticed:
                raise
            if number - 1 > self.first:
                self._save(state)
            self.shown.note(f"reading ended, too: {type(error).__name__}: {error}")
            self._end(number - 1)

    def _save(self, state: Any) -> None:
        """Save a state if the run has checkpoints, after logging the numbers of its step."""
        if self.checkpoints is not None:
            self._log_pending()
            self.checkpoints.save(state, self.batches.position)

    def _one(self, state: Any, batch: Any, number: int) -> tuple[Any, dict[str, Any]]:
        """Take one step, with profiling and a note if it compiles."""
        if self.profile is not None and number == self.profile.start:
            jax.profiler.start_trace(str(self.profile.directory))
            self._tracing = True
        start = time.perf_counter()
        state, metrics = self.step(state, batch)
        self._meter.count(number, batch)
        if len(getattr(self.step, "causes", ())) != self._num_programs:
            self._compiled(number, batch, metrics, time.perf_counter() - start)
        self._running.append(metrics.get("loss"))
        if len(self._running) > _AHEAD:
            jax.block_until_ready(self._running.popleft())
        self.shown.advance(number)
        if self._tracing and self.profile is not None and number + 1 == self.profile.stop:
            jax.block_until_ready(metrics)
            jax.profiler.stop_trace()
            self._tracing = False
        return state, metrics

    def _compiled(self, number: int, batch: Any, metrics: Any, seconds: float) -> None:
        """Note that the step was compiled, and the causes of a retrace."""
        causes = self.step.causes[self._num_programs :]
        self._num_programs += len(causes)
        for cause in causes:
            what = f"compiled again, because {'; '.join(cause)}" if cause else "compiled"
            self.shown.note(f"step {number}: {what} ({seconds:.1f} s)")
        if self.batches.pads:
            _check_mask(self.step, batch)
        jax.block_until_ready(metrics)
        peak = _peak_of(self.step, self.peak)
        flops = getattr(self.step, "flops", None)
        if peak is not None and flops is not None:
            self._meter.flops, self._meter.peak = flops(), peak
        self._meter.start(number)

    def _note(self, number: int, epoch: int, state: Any, metrics: dict[str, Any]) -> None:
        """Keep the metrics to log, and start copying them to the host."""
        kept = {name: value for name, value in metrics.items() if name != "skipped"}
        if hasattr(state, "skipped"):
            # The state is donated to the next step, which overwrites its arrays.
            kept["skipped_steps"] = jnp.copy(state.skipped)
        for value in kept.values():
            if isinstance(value, jax.Array):
                value.copy_to_host_async()
        self._pending = number, epoch, kept

    def _log_pending(self) -> None:
        """Log a step's metrics once the next one is on its way."""
        if self._pending is None:
            return
        (number, epoch, metrics), self._pending = self._pending, None
        values = {name: _number(value) for name, value in metrics.items()}
        place = {"epoch": epoch}
        since = {"seconds": round(time.perf_counter() - self._started, 3)}
        values |= self._meter.rates(number) | place | since
        self.shown.log(number, values)
        for sink in self.sinks:
            sink.write(number, values)

    def _evaluate(self, number: int, state: Any) -> None:
        if self.evaluate is None:
            return
        self._log_pending()
        found = {f"evaluate/{n}": v for n, v in (self.evaluate(self.step, state) or {}).items()}
        pictures = {name: value for name, value in found.items() if np.ndim(value) == 3}
        values = {name: _number(value) for name, value in found.items() if name not in pictures}
        if values:
            self.shown.note(
                f"step {number}  " + "  ".join(f"{n} {v:.4g}" for n, v in values.items())
            )
        for sink in self.sinks:
            if values:
                sink.write(number, values)
            if pictures and isinstance(sink, PictureSink):
                sink.write_pictures(number, pictures)
        self._meter.start(number)

    def _end(self, number: int) -> None:
        self._log_pending()
        if self.checkpoints is not None:
            self.checkpoints.wait()
        saved = "saved" if self.checkpoints is not None else "nothing saved (no checkpoints=)"
        self.shown.note(f"asked to end after step {number}: {saved}")
        raise Preempted(number)


def _check_mask(step: Any, batch: Any) -> None:
    """Refuse a loss that counts the padding rows of a batch."""
    unread, paths = getattr(step, "leaves_unread", None), getattr(batch, "paths", None)
    if unread is None or not paths:
        return
    names = [argument_name(path) for path in paths]
    # The mask is an entry of a dict, or the last item of a tuple.
    name = f"0.{MASK}" if f"0.{MASK}" in names else names[-1]
    todo = (
        " What to do: return (each * mask).sum() / mask.sum(), {'weight': mask.sum()}, or"
        " Batches(last='drop')"
    )
    if unread(name):
        entry = repr(MASK) if name == f"0.{MASK}" else name.rpartition(".")[2]
        raise UsageError(
            f"the loss does not use batch[{entry}], and the last batch of an epoch has rows that"
            f" repeat others: they would count twice.{todo}"
        )
    if step.counts_parts_alike:
        raise UsageError(
            "the last batch of an epoch has rows that repeat others, and with accumulate= each of"
            f" its parts counts alike, however many of its rows count.{todo}"
        )


def _number(value: Any) -> float:
    """Convert a scalar to a Python number; integers stay int, bools become float."""
    found = np.asarray(value).item()
    return found if isinstance(found, int) and not isinstance(found, bool) else float(found)


def _peak_of(step: Any, peak: float | None) -> float | None:
    """Return the peak FLOP/s of all devices of a step, if they are known."""
    mesh = step.ported.mesh if hasattr(step, "ported") else None
    devices = list(mesh.devices.flat) if mesh is not None else jax.devices()[:1]
    if peak is None:
        try:
            peak = chip_of(devices[0].device_kind).bf16_flops
        except UsageError:
            return None
    return peak * len(devices)
