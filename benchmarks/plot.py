"""The results as one SVG: steps, staging, and growth with depth."""

from pathlib import Path
from typing import Any

from benchmarks.contestants import COMPILED, EAGER, HAND, OURS, PLAIN

_COLORS = {
    OURS: "#0b6e99",
    PLAIN: "#b5482e",
    HAND: "#4d8c3f",
    EAGER: "#777777",
    COMPILED: "#a07cc5",
}
_TARGETS = {PLAIN: 1.02, HAND: 1.05}
_STAGING_TARGET = 1.25


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw results of `benchmarks.__main__.run` into an SVG file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Without these settings matplotlib writes another file on every run for the same numbers.
    with mpl.rc_context({"svg.hashsalt": "tpuport", "font.size": 9, "axes.titlesize": 10}):
        figure = Figure(figsize=(13, 8.5), layout="constrained")
        axes = figure.subplot_mosaic(
            [["step", "step", "staging", "staging"], ["trace", "lower", "compile", "depth"]]
        )
        _draw_steps(axes["step"], results["step"])
        _draw_staging(axes["staging"], results["staging"])
        for name in ("trace", "lower", "compile", "depth"):
            _draw_depth(axes[name], results["depth"], "step" if name == "depth" else name)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _draw_steps(axes: Any, rows: list[dict[str, Any]]) -> None:
    labels = list(dict.fromkeys((row["model"], row["what"]) for row in rows))
    for row in rows:
        y = labels.index((row["model"], row["what"]))
        axes.plot([row["low"], row["high"]], [y, y], color=_COLORS[row["against"]], lw=2, alpha=0.4)
        axes.plot(row["median"], y, "o", color=_COLORS[row["against"]], ms=5)
    _finish(axes, [f"{model}, {what}" for model, what in labels], {row["against"] for row in rows})
    axes.set_title("A step of the port, in steps of the others (left of 1: the port is faster)")


def _draw_staging(axes: Any, rows: list[dict[str, Any]]) -> None:
    chosen = [
        row
        for row in rows
        if row["against"] == PLAIN and row["stage"] in ("trace and lower", "first result")
    ]
    labels = list(dict.fromkeys((row["model"], row["what"], row["stage"]) for row in chosen))
    for row in chosen:
        y = labels.index((row["model"], row["what"], row["stage"]))
        axes.plot([row["low"], row["high"]], [y, y], color=_COLORS[PLAIN], lw=2, alpha=0.4)
        axes.plot(row["median"], y, "o", color=_COLORS[PLAIN], ms=5)
    axes.axvline(_STAGING_TARGET, color="black", lw=0.8, ls=":")
    names = [f"{model}, {what}: {stage}" for model, what, stage in labels]
    _finish(axes, names, {PLAIN})
    axes.set_title("Trace and lowering, in those of plain torchax (dotted: the target)")


def _finish(axes: Any, labels: list[str], shown: set[str]) -> None:
    axes.axvline(1, color="black", lw=0.8)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.25)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    handles = [
        axes.plot([], [], "o", color=_COLORS[n], label=f"against {n}")[0]
        for n in _COLORS
        if n in shown
    ]
    axes.legend(handles=handles, fontsize=8, loc="best")


def _draw_depth(axes: Any, rows: list[dict[str, Any]], stage: str) -> None:
    for who in dict.fromkeys(row["who"] for row in rows):
        chosen = [row for row in rows if row["who"] == who and row["stage"] == stage]
        x, y = [row["layers"] for row in chosen], [row["time"] for row in chosen]
        axes.plot(x, y, "o-", color=_COLORS[who], label=who, ms=4)
    axes.set(xscale="log", yscale="log", xlabel="layers of the DiT stack", title=stage)
    axes.set_xticks([row["layers"] for row in rows if row["stage"] == stage and row["who"] == OURS])
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    if stage == "trace":
        axes.set_ylabel(f"time ({PLAIN}, fewest layers = 1)")
        axes.legend(fontsize=8)
