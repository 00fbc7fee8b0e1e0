"""The display of a running training: a progress bar or lines, and rates."""

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

# The rates to show, in this order, and their formats.
_RATES = {
    "steps_per_second": "{:.3g} steps/s",
    "samples_per_second": "{:.3g} samples/s",
    "tokens_per_second": "{:.3g} tokens/s",
    "mfu": "MFU {:.1%}",
}
_HIDDEN = {"epoch", "seconds"}


class Shown:
    """The display of a run: a bar on a terminal, lines elsewhere, nothing if switched off.

    Args:
        total: steps of the entire run.
        first: steps taken before this start.
        on: whether to show anything.
        console: the console to print to; standard error by default.
    """

    def __init__(self, total: int, first: int, *, on: bool, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._total, self._on = total, on
        self._bar: Progress | None = None
        if on and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=total, completed=first)
            self._bar.start()

    def advance(self, step: int) -> None:
        """Show how many steps were started."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show the numbers of a step."""
        if not self._on:
            return
        text = shown(values)
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        else:
            self.note(f"step {step}/{self._total}  {text}")

    def note(self, text: str) -> None:
        """Print a line of its own."""
        if self._on:
            self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the bar and restore the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def shown(values: Mapping[str, float]) -> str:
    """Format numbers as in `loss 1.25  grad_norm 0.3  12.5 steps/s`."""
    parts = [
        f"{name} {value:.4g}"
        for name, value in values.items()
        if name not in _RATES
        and name not in _HIDDEN
        and not (name == "skipped_steps" and not value)
    ]
    parts += [form.format(values[name]) for name, form in _RATES.items() if name in values]
    return "  ".join(parts)


class Meter:
    """A meter of rates since they were last read.

    Attributes:
        flops: FLOPs of a step on all devices; None if unknown.
        peak: peak FLOP/s of all devices; None if unknown.
    """

    def __init__(self) -> None:
        self.flops: float | None = None
        self.peak: float | None = None
        self._counts: dict[int, tuple[int, int]] = {}
        self.start(0)

    def start(self, step: int) -> None:
        """Restart the clock at a step, so that compiling and evaluating count for no step."""
        self._time, self._step = time.perf_counter(), step
        self._counts = {n: c for n, c in self._counts.items() if n > step}

    def count(self, step: int, batch: Any) -> None:
        """Count the rows and tokens of the batch of a step."""
        self._counts[step] = getattr(batch, "rows", 0), getattr(batch, "tokens", 0)

    def rates(self, step: int) -> dict[str, float]:
        """Return the rates of the steps since the last call; empty if there is none."""
        seconds, steps = time.perf_counter() - self._time, step - self._step
        if steps < 1 or seconds <= 0:
            return {}
        found = {"steps_per_second": steps / seconds}
        counts = [c for n, c in self._counts.items() if self._step < n <= step]
        for index, name in enumerate(("samples", "tokens")):
            if number := sum(count[index] for count in counts):
                found[f"{name}_per_second"] = number / seconds
        if self.flops and self.peak:
            found["mfu"] = self.flops * steps / seconds / self.peak
        self.start(step)
        return found
