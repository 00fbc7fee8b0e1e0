"""Timing on a machine with other load: contestants in turn, ratios round by round.

Two clocks are used: wall time, and CPU time (seconds of all threads of this process), which hardly
depends on other load, but does not show whether threads run in parallel.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Series:
    """Seconds per call, round by round, on both clocks."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Ratio:
    """The time of one contestant relative to another's.

    Attributes:
        median: Median over the rounds. Each round's ratio is of two times taken one after the
            other.
        low: Lower quartile.
        high: Upper quartile.
    """

    median: float
    low: float
    high: float


def interleaved(
    contestants: Mapping[str, Callable[[], object]], *, rounds: int, seconds: float
) -> dict[str, Series]:
    """Return the seconds per call of each contestant, by round.

    In each round every contestant runs for about `seconds`, in rotating order, so that a slow spell
    of the machine affects all alike. Each is called once beforehand.
    """
    repeats = {}
    for name, call in contestants.items():
        call()
        repeats[name] = max(1, round(seconds / max(_timed(call, 1)[0], 1e-9)))
    names = list(contestants)
    times = {name: Series() for name in names}
    with quiet():
        for number in range(rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                wall, cpu = _timed(contestants[name], repeats[name])
                times[name].wall.append(wall)
                times[name].cpu.append(cpu)
    return times


def ratio(times: list[float], others: list[float]) -> Ratio:
    """Return the ratio of two series measured in the same rounds."""
    ratios = [a / b for a, b in zip(times, others, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Ratio(statistics.median(ratios), low, high)


def faster(times: Mapping[str, Series], ours: str, others: Iterable[str]) -> list[str]:
    """Return lines with the speedup of one contestant over others, in wall time."""
    lines = []
    for name in others:
        found = ratio(times[name].wall, times[ours].wall)
        lines.append(
            f"{found.median:.2f} times as fast as {name} (quartiles {found.low:.2f} to"
            f" {found.high:.2f})"
        )
    return lines


@contextmanager
def quiet() -> Iterator[None]:
    """Collect garbage before the block, and disable collection inside it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _timed(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - wall) / repeats, (time.process_time() - cpu) / repeats
