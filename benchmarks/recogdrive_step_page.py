"""docs/recogdrive_step.md, made from the results of `benchmarks.recogdrive_step`."""

import textwrap
from typing import TYPE_CHECKING

import torch

from benchmarks import machine, timing
from benchmarks.contestants import COMPILED, EAGER, OURS, PLAIN

if TYPE_CHECKING:
    from benchmarks.recogdrive_step import Found, Options

UPSTREAM, COMPACT = "upstream's", "the recipe's"
WAYS = (EAGER, COMPILED, PLAIN, OURS)


def page(options: "Options", found: "Found") -> str:
    """Return the page, with ratios, since the times of one machine do not carry over to another.

    Args:
        options: Settings of the measurement.
        found: Losses, times and errors, by planner and way.
    """
    base = next(iter(found.times))
    if (UPSTREAM, EAGER) in found.times:
        base = UPSTREAM, EAGER
    lines = [
        "# A step of stage 2",
        "",
        *_setting(options, found),
        "",
        "| planner | | tpuport's step, in times of its | quartiles | CPU |"
        f" its, in times of {base[1]} with {base[0]} |",
        "|---|---|---|---|---|---|",
    ]
    planners = [UPSTREAM, COMPACT] if options.upstream is not None else [COMPACT]
    for planner in planners:
        lines += [_row(found, planner, way, base) for way in WAYS]
    lines += ["", *_errors(found)]
    if options.upstream is not None:
        lines.append(
            "- Eager PyTorch is without upstream's own `torch.compile` of two small functions,"
            " which the second row has in its program."
        )
    lines += [f"- {note}" for note in found.notes]
    shown = ", ".join(f"{name} {version}" for name, version in machine.versions().items())
    return "\n".join([*lines, "", f"Taken with {shown}.", ""])


def _setting(options: "Options", found: "Found") -> list[str]:
    whose = "of upstream's own planner from an untouched checkout and " * bool(options.upstream)
    cores = f"{options.cores} core{'s' * (options.cores != 1)}"
    losses = ", ".join(f"{loss:.6g}" for loss in next(iter(found.losses.values())))
    command = "python -m benchmarks.recogdrive_step" + " --upstream DIR" * bool(options.upstream)
    setting = (
        f"Forward, loss, backward, clipping and AdamW {whose}of the recipe's (`{options.size}`), in"
        f" float32 on {cores} ({machine.describe()['processor']},"
        f" {torch.backends.cpu.get_cpu_capability()}): {options.batch} rows of {options.tokens}"
        " hidden states (upstream's caches have 2800 each, its batches 16 rows), medians of"
        f" {options.rounds} rounds of everyone in turn. Written by `{command}`. All have the same"
        " weights, batch, noise and rate, the batch where they compute, and every step waits for"
        " its loss, which none in training does. The first losses of all were"
        f" {losses} (to {_apart(found):.0e})."
    )
    reading = (
        "A row's first number is tpuport's time over that of the row, with the same planner: below"
        " 1 tpuport is faster. CPU is the same of the processor's seconds."
    )
    return [*_wrapped(setting), "", *_wrapped(reading)]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_on_hyphens=False, break_long_words=False)


def _apart(found: "Found") -> float:
    """Return the largest relative difference of the losses."""
    first, *others = found.losses.values()
    return max(abs(a - b) / abs(b) for one in others for a, b in zip(one, first, strict=True))


def _row(found: "Found", planner: str, way: str, base: tuple[str, str]) -> str:
    key, ours = (planner, way), (planner, OURS)
    if key not in found.times:
        return f"| {planner} | {way} | does not run | | | |"
    wall = timing.ratio(found.times[ours].wall, found.times[key].wall)
    cpu = timing.ratio(found.times[ours].cpu, found.times[key].cpu).median
    whole = timing.ratio(found.times[key].wall, found.times[base].wall).median
    if way == OURS:
        return f"| {planner} | {way} | | | | {whole:.2f} |"
    quartiles = f"{wall.low:.2f} to {wall.high:.2f}"
    return f"| {planner} | {way} | {wall.median:.2f} | {quartiles} | {cpu:.2f} | {whole:.2f} |"


def _errors(found: "Found") -> list[str]:
    told = [
        f"- {way[0].upper()}{way[1:]} does not run {planner} planner: `{error}`."
        for (planner, way), error in found.errors.items()
    ]
    if (UPSTREAM, PLAIN) in found.errors and (COMPACT, PLAIN) in found.times:
        told.append(
            "- The best that plain torchax can do is the recipe's planner, which computes the same"
            " function and was written to be ported."
        )
    return told
