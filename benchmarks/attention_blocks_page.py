"""docs/attention_blocks.md: the table of block sizes for readers, and a plot."""

from pathlib import Path
from typing import Any

from tpuport.cost import CHIPS

_COLORS = {
    "full": "#0b6e99", "padding": "#4d8c3f", "causal": "#b5482e", "window": "#a07cc5",
    "segments": "#777777",
}  # fmt: skip
_INTRO = """# Block sizes of splash attention

Written by `python -m benchmarks.attention_blocks`, which asks libtpu for the schedule of each
kernel and needs no TPU. A share is of the chip's peak in useful products: what a mask hides and a
block computes anyway is no product. The ceiling is what `head_dim` leaves of the peak: 128 fills
half of v6e's matrix unit, which is 256 wide. The kernel of `tpuport/kernels/attention/dense.py`,
for long sequences without a band there, fills it in one of its two products, and has blocks of its
own.

Figures are for one head over 49,152 tokens. They are lengths of schedules, not measurements: a
kernel that stalls takes longer. On v6e, large products come out at 82 to 90 % of the peak this way;
on v5e at 116 %, as more of them can be started than the matrix units complete. So compare blocks of
chips before v6e with each other only, and take the shares for upper bounds. `time` is that of the
whole attention against no mask at all, on the same chip and with the same `head_dim`, each with its
best blocks. `padding` and `segments` are told to the program only when it runs; all but the last
key are then seen. `backward` is that of both gradient kernels without a mask.

![shares of the ceiling](attention_blocks.svg)

Best blocks (queries, keys, keys a product):
"""


def write(entries: list[dict[str, Any]], folder: Path) -> None:
    """Write the page and its plot into a folder.

    Args:
        entries: Entries of `block_table.json`.
        folder: Folder to write to.
    """
    best: dict[tuple[str, int, str], dict[str, dict[str, Any]]] = {}
    for entry in entries:
        kinds = best.setdefault((entry["chip"], entry["head_dim"], entry["dtype"]), {})
        old = kinds.get(entry["mask"])
        if old is None or entry["share_of_peak"] > old["share_of_peak"]:
            kinds[entry["mask"]] = entry
    page = folder / "attention_blocks.md"
    page.write_text(_INTRO + _table(best), encoding="utf-8")
    _plot(best, folder / "attention_blocks.svg")


def _table(best: dict[tuple[str, int, str], dict[str, dict[str, Any]]]) -> str:
    lines = [
        "| chip | head_dim | dtype | mask | blocks | of peak | of ceiling | time | backward |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (chip, dim, dtype), kinds in sorted(best.items()):
        free = kinds.get("full")
        for mask in _COLORS:
            if mask not in kinds:
                continue
            one = kinds[mask]
            blocks = f"{one['block_q']}, {one['block_kv']}, {one['block_kv_compute']}"
            cost = f"{one['seconds'] / free['seconds'] - 1:+.1%}" if free else ""
            back = ""
            if "block_q_backward" in one:
                back = f"{one['block_q_backward']}, {one['block_kv_backward']}:"
                back += f" {one['share_of_peak_backward']:.1%}"
            lines.append(
                f"| {chip} | {dim} | {dtype} | {mask} | {blocks} | {one['share_of_peak']:.1%}"
                f" | {one['share_of_ceiling']:.1%} | {cost} | {back} |"
            )
    return "\n" + "\n".join(lines) + "\n"


def _plot(best: dict[tuple[str, int, str], dict[str, dict[str, Any]]], path: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    groups = sorted(best)
    # Without these settings matplotlib writes another file on every run for the same numbers.
    with mpl.rc_context({"svg.hashsalt": "tpuport", "font.size": 9}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        axes = figure.add_subplot()
        for place, group in enumerate(groups):
            ceiling = CHIPS[group[0]].attention_fill(group[1])
            axes.plot([place - 0.45, place + 0.45], [ceiling] * 2, color="black", lw=1)
            for at, (mask, color) in enumerate(_COLORS.items()):
                if mask in best[group]:
                    height = best[group][mask]["share_of_peak"]
                    axes.bar(place + (at - 2) * 0.16, height, 0.15, color=color)
        names = [f"{chip}\nhead_dim {dim}\n{dtype}" for chip, dim, dtype in groups]
        axes.set_xticks(range(len(groups)), names)
        axes.set_ylabel("share of the peak (line: ceiling)")
        axes.set_ylim(0, 1.02)
        handles = [axes.bar(0, 0, color=color, label=mask) for mask, color in _COLORS.items()]
        axes.legend(handles=handles, fontsize=8, ncols=5, loc="upper left")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        figure.savefig(path, format="svg", metadata={"Date": None})
