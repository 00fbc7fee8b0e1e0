"""Progress of the preparation of a training set: a bar, and a report of each segment."""

from pathlib import Path
from typing import Any

from rich.console import Console

from recipes.openpilot.prepare import PrepareOptions, Record, prepare, summary
from recipes.openpilot.segments import find_segments
from recipes.progress import steps_bar


def prepare_and_show(
    root: str | Path,
    out: str | Path,
    options: PrepareOptions | None = None,
    *,
    console: Console | None = None,
) -> dict[str, Record]:
    """Run `prepare.prepare` with a bar on the terminal and a report of each segment."""
    total, done = len(find_segments(root)), 0
    with steps_bar("segments", total, console) as bar:

        def on_segment(name: str, record: Record) -> None:
            nonlocal done
            done += 1
            bar(done, total)
            bar.say(report(name, record))

        records = prepare(root, out, options, on_segment=on_segment)
        bar.say(_total(summary(records.values())))
    return records


def report(name: str, record: Record) -> str:
    """Return a report of a segment's frames and problems, with a line for each reason."""
    runs = len(record["runs"])
    lines = [f"{name}: {record['frames']} frames in {runs} unbroken run{'s' * (runs != 1)}"]
    lines += [f"  {count} frames left out: {why}" for why, count in record["skipped"].items()]
    lines += [
        f"  {why}" + f", {count} times" * (count > 1) for why, count in record["problems"].items()
    ]
    return "\n".join(lines + [f"  {note}" for note in record["notes"]])


def _total(found: dict[str, Any]) -> str:
    left_out = sum(found["skipped"].values())
    return (
        f"{found['frames']} frames of {found['segments']} segments in {found['runs']} unbroken"
        f" runs; {left_out} frames left out"
    )
