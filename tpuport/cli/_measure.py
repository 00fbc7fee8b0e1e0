"""`tpuport doctor --measure`: runs the jobs with a progress bar, and saves the report."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tpuport.cli._common import has_color, printable, say
from tpuport.foundation.errors import UsageError
from tpuport.foundation.files import explained

if TYPE_CHECKING:
    from tpuport.doctor.machine import Machine
    from tpuport.measurement.report import MeasureReport
    from tpuport.measurement.runner import Progress

NAME = "measurement"
_MINUTE = 60.0


@dataclass(frozen=True)
class MeasureOptions:
    """What is to be measured.

    Attributes:
        out: Folder of the report.
        minutes: When no further job begins.
        limit: Seconds that a job may take.
        only: Jobs by name; all if empty.
        programs: Programs as `tpuport compile` takes them; those of the recipes if empty.
        as_json: Whether to print JSON.
    """

    out: Path
    minutes: float
    limit: float
    only: tuple[str, ...]
    programs: tuple[str, ...]
    as_json: bool


def measure(machine: "Machine", wanted: MeasureOptions) -> bool:
    """Measure, print and save the report, and return whether there is a problem.

    Raises:
        UsageError: The folder cannot be made.
        CheckpointError: The disk is full, or a file cannot be written; the report was printed.
    """
    from tpuport.measurement.report import make_report
    from tpuport.measurement.runner import TimeLimits, watch

    # Now, and not after ten minutes.
    _make_folder(wanted.out)
    limits = TimeLimits(max(machine.timeout, wanted.limit), wanted.limit, wanted.minutes * _MINUTE)
    with _bar() as progress:
        outcome = watch(limits, only=wanted.only, targets=wanted.programs, progress=progress)
    report = make_report(
        outcome,
        machine.versions,
        has_tpu=machine.has_tpu,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    _show(report, as_json=wanted.as_json)
    for suffix in (".json", ".html"):
        path = wanted.out / f"{NAME}{suffix}"
        with explained(path):
            report.save(path)
        say(f"wrote {path}")
    return bool(report.problems)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be made: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise UsageError(f"{path} cannot be written to. What to do: choose another --out")


def _show(report: "MeasureReport", *, as_json: bool) -> None:
    if as_json or not has_color():
        typer.echo(report.to_json() if as_json else printable(str(report)))
        return
    from rich.console import Console

    Console().print(report)


@contextmanager
def _bar() -> "Iterator[Progress]":
    """Show which job runs, on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[job]}"),
    )
    with Progress(TextColumn("measuring"), *columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=None, job="waiting for the devices")

        def show(job: str, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, job=job)

        yield show
