"""`python -m benchmarks.depth`: cost of tracing, lowering and compiling by the number of blocks.

Writes docs/depth.md and docs/benchmarks/depth.svg. A stack of diffusion-transformer blocks is
staged with each block inline, as one function, and as one loop over stacked weights, for the
CPU, and ahead of time for a TPU if libtpu is installed.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.dit_stack import DiTStack

DOCS = Path(__file__).parent.parent / "docs"
DEPTHS = (2, 8, 54)
STAGES = ("trace", "lower", "compile")
WAYS = {"unroll": "inline", "once": "one function", "scan": "one loop"}
_COLORS = {"unroll": "#b5482e", "once": "#a07cc5", "scan": "#0b6e99"}
WIDTH, HEADS, TOKENS, BATCH = 256, 2, 512, 2


@dataclass(frozen=True)
class Row:
    """Seconds of each stage.

    Attributes:
        target: "cpu" or a topology.
        way: One of `WAYS`.
        depth: Number of blocks.
        seconds: Seconds by stage.
    """

    target: str
    way: str
    depth: int
    seconds: dict[str, float]


def measure(target: str, way: str, repeats: int) -> list[Row]:
    """Trace stacks of all depths several times, and lower and compile each once.

    The depths take turns, each with its own port, so that other load on the machine slows all of
    them.
    """
    runs = {depth: [_stage(target, way, depth, whole=True)] for depth in DEPTHS}
    for done in runs.values():
        del done[0]["trace"]
    for _ in range(repeats):
        for depth, done in runs.items():
            done.append(_stage(target, way, depth, whole=False))
    return [
        Row(
            target, way, depth, {s: statistics.median(r[s] for r in done if s in r) for s in STAGES}
        )
        for depth, done in runs.items()
    ]


def _stage(target: str, way: str, depth: int, *, whole: bool) -> dict[str, float]:
    """Return the seconds of each stage, or the CPU seconds of tracing alone if not `whole`."""
    import jax
    import torch

    import tpuport
    from tpuport.aot.aot import compile_ahead
    from tpuport.aot.entry_points import forward_step
    from tpuport.sharding import make_mesh

    jax.clear_caches()
    gc.collect()
    with torch.device("meta"):
        model = DiTStack(depth, WIDTH, HEADS).eval()
    ported = tpuport.convert(model, verify=False, blocks=way)
    devices: Any = jax.devices()[:1] if target == "cpu" else target
    mesh = make_mesh({"data": 1}, devices)
    tpuport.shard(ported, mesh, "replicated")
    if way == "scan":
        tpuport.stack_blocks(ported)
    with torch.device("meta"):
        inputs = torch.empty(BATCH, TOKENS, WIDTH), torch.empty(BATCH, WIDTH)
    with torch.no_grad():
        step = forward_step(ported, "forward", inputs)
        if whole:
            return compile_ahead(step, mesh).seconds
        start = time.process_time()
        jax.jit(step.function, donate_argnums=step.donated).trace(*step.arguments.values())
        return {"trace": time.process_time() - start}


def targets() -> list[str]:
    """Return the CPU, and a TPU topology if libtpu can compile for it."""
    import importlib.util

    return ["cpu", *(["v6e-1"] if importlib.util.find_spec("libtpu") else [])]


def plot(rows: list[Row], path: Path) -> None:
    """Draw a chart for each target and stage."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.target for row in rows))
    with mpl.rc_context({"svg.hashsalt": "tpuport", "font.size": 9, "axes.titlesize": 10}):
        figure = Figure(figsize=(11, 3.4 * len(names)), layout="constrained")
        grid = figure.subplots(len(names), len(STAGES), squeeze=False)
        for axes_row, target in zip(grid, names, strict=True):
            for axes, stage in zip(axes_row, STAGES, strict=True):
                _draw(axes, [row for row in rows if row.target == target], stage)
                axes.set_title(f"{target}: {stage}")
        grid[0][0].legend(fontsize=8)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _draw(axes: Any, rows: list[Row], stage: str) -> None:
    least = min(row.seconds[stage] for row in rows)
    for way, label in WAYS.items():
        chosen = [row for row in rows if row.way == way]
        y = [row.seconds[stage] / least for row in chosen]
        axes.plot([row.depth for row in chosen], y, "o-", color=_COLORS[way], label=label, ms=4)
    axes.set(xscale="log", yscale="log", xlabel="blocks", ylabel="time (least = 1)")
    axes.set_xticks(list(dict.fromkeys(row.depth for row in rows)))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.minorticks_off()
    axes.grid(alpha=0.25)


def page(rows: list[Row]) -> str:
    """Return the page, with ratios, since the times of one machine do not carry over to another."""
    deepest, middle = max(r.depth for r in rows), sorted({r.depth for r in rows})[-2]
    lines = [
        "# What depth costs",
        "",
        'Equal blocks are one function (`blocks="auto"`), and on TPU one loop where their'
        " weights are stacked",
        "(`tpuport.stack_blocks`); see [blocks](blocks.md). Written by `python -m"
        " benchmarks.depth`: a stack of",
        f"diffusion-transformer blocks of width {WIDTH}, forward. Each number is the time with"
        f" {deepest} blocks as a multiple of the",
        f"time with {middle}; tracing in seconds of the processor.",
        "",
        "| target | blocks | " + " | ".join(STAGES) + " |",
        "|---|---|---|---|---|",
    ]
    by = {(r.target, r.way, r.depth): r.seconds for r in rows}
    for target in dict.fromkeys(r.target for r in rows):
        for way, label in WAYS.items():
            deep, less = by[target, way, deepest], by[target, way, middle]
            cells = " | ".join(f"{deep[s] / less[s]:.2f}x" for s in STAGES)
            lines.append(f"| {target} | {label} | {cells} |")
    lines += [
        "",
        "Each block is traced, so tracing grows with depth:"
        " [why](design/departures.md#repeated-blocks-are-compared-as-programs).",
    ]
    lines += ["", f"With {deepest} blocks, in times of the loop:", ""]
    lines += ["| target | blocks | " + " | ".join(STAGES) + " |", "|---|---|---|---|---|"]
    for target in dict.fromkeys(r.target for r in rows):
        for way, label in WAYS.items():
            ours, loop = by[target, way, deepest], by[target, "scan", deepest]
            cells = " | ".join(f"{ours[s] / loop[s]:.2f}x" for s in STAGES)
            lines.append(f"| {target} | {label} | {cells} |")
    shown = ", ".join(f"{name} {version}" for name, version in machine.versions().items())
    return "\n".join([*lines, "", "![](benchmarks/depth.svg)", "", f"Taken with {shown}.", ""])


def run(repeats: int, say: Callable[[str], None]) -> list[Row]:
    """Measure all targets, ways and depths."""
    rows = []
    for target in targets():
        _stage(target, "once", DEPTHS[0], whole=True)  # warms up imports and caches
        for way in WAYS:
            for row in measure(target, way, repeats):
                shown = " ".join(f"{stage} {row.seconds[stage]:.2f} s" for stage in STAGES)
                say(f"{target} {way} {row.depth}: {shown}")
                rows.append(row)
    return rows


def main() -> None:
    """Measure, and write the page and its plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows = run(options.repeats, print)
    plot(rows, DOCS / "benchmarks" / "depth.svg")
    (DOCS / "depth.md").write_text(page(rows))


if __name__ == "__main__":
    main()
