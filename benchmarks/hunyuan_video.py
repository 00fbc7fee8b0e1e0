"""`python -m benchmarks.hunyuan_video`: a step of HunyuanVideo-1.5 on slices without hardware.

One step of denoising at full size (8.33 B parameters, bfloat16, both halves of guidance in one
call) with several spreads, slices, frames and resolutions. Writes
docs/benchmarks/hunyuan_video.json after each case, docs/hunyuan_video.md and the plot in it. A case
takes minutes; `--only` compiles some and keeps the rows of the others.
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = DOCS / "benchmarks" / "hunyuan_video.json"
PLOT = DOCS / "hunyuan_video.svg"
SIZES = {"480p": (480, 848), "720p": (720, 1280)}
FRAMES = (33, 65, 121)
_PARTS = ("dense", "hbm", "collectives", "kernels")


@dataclass(frozen=True)
class Case:
    """One step of denoising.

    Attributes:
        spread: A name of `recipes.hunyuan_video.spreading.SPREADS`.
        topology: TPU slice.
        resolution: A name of `SIZES`.
        frames: Frames of the video.
        i2v: Whether there are tokens of a picture.
    """

    spread: str = "sequence"
    topology: str = "v6e-8"
    resolution: str = "720p"
    frames: int = 121
    i2v: bool = False

    @property
    def name(self) -> str:
        """Return the name of the case for `--only`."""
        task = "-i2v" if self.i2v else ""
        return f"{self.spread}-{self.topology}-{self.resolution}-{self.frames}{task}"

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the video and the texts, per row of the batch."""
        from recipes.hunyuan_video.compile import PICTURE_TOKENS
        from recipes.hunyuan_video.options import FRAMES_A_LATENT, STRIDE
        from recipes.hunyuan_video.prompts import MAX_GLYPH_LENGTH, MAX_LENGTH

        height, width = SIZES[self.resolution]
        video = ((self.frames - 1) // FRAMES_A_LATENT + 1) * (height // STRIDE) * (width // STRIDE)
        return video + MAX_LENGTH + MAX_GLYPH_LENGTH + (PICTURE_TOKENS if self.i2v else 0)


CASES = [
    *(Case(spread=spread) for spread in ("sequence", "guidance", "tensor", "mixed")),
    Case(i2v=True),
    *(Case("sequence", topology) for topology in ("v6e-16", "v5p-8")),
    Case("guidance", "v6e-16"),
    *(
        Case(resolution=resolution, frames=frames)
        for resolution in SIZES
        for frames in FRAMES
        if (resolution, frames) != ("720p", 121)
    ),
]


def compiled(case: Case, *, quick: bool = True) -> dict[str, Any]:
    """Compile a case and return what the page shows of it, as JSON."""
    from recipes.hunyuan_video.compile import compile_denoise

    report = compile_denoise(
        case.spread,
        case.topology,
        case.frames,
        *SIZES[case.resolution],
        i2v=case.i2v,
        quick=quick,
    )
    print(report)
    work, estimate = report.work, report.estimate
    return {
        **asdict(case),
        "tokens": case.tokens,
        "chips": report.num_chips,
        "mesh": {axis: size for axis, size in report.mesh.items() if size > 1},
        "fits": report.fits,
        "peak": report.memory.peak,
        "available": report.memory.available,
        "model_flops": work.model_flops if work else None,
        "collectives": work.bytes_by_kind() if work else {},
        "attention": sorted({one.kernel for one in work.attention}) if work else [],
        "step": {p.name: p.seconds for p in estimate.parts} if estimate else {},
        "compile": report.seconds.compile,
        "refused": report.refused,
    }


def _seconds(row: dict[str, Any]) -> float | None:
    """Return the estimate for a step, or None if the time of a part could not be read."""
    parts = row["step"]
    return sum(parts.values()) if set(_PARTS) <= set(parts) else None


def _line(row: dict[str, Any]) -> str:
    mesh = " ".join(f"{axis}={size}" for axis, size in row["mesh"].items())
    seconds = _seconds(row)
    parts = [f"{row['step'][name]:.2f}" if name in row["step"] else "?" for name in _PARTS]
    sent = sum(row["collectives"].values()) / 2**30
    kernels = sorted({kernel.partition("_")[0] for kernel in row["attention"]})
    what = f"{row['frames']} of {row['resolution']}{', i2v' if row['i2v'] else ''}"
    flops = "?" if row["model_flops"] is None else f"{row['model_flops'] / 1e15:.2f}"
    return (
        f"| {row['topology']}, {mesh} | {what} | {row['tokens']:,} | {flops}"
        f" | {row['peak'] / 2**30:.1f} of {row['available'] / 2**30:.1f}"
        f"{'' if row['fits'] else ' (does not fit)'} | {sent:.1f}"
        f" | {'?' if seconds is None else f'{seconds:.2f}'} | {' + '.join(parts)}"
        f" | {', '.join(kernels)} | {row['compile']:.0f} |"
    )


def page(rows: Iterable[dict[str, Any]]) -> str:
    """Return the page of these rows."""
    lines = [
        "# HunyuanVideo-1.5, a step of denoising",
        "",
        "Compiled for slices that were not there, without weights: `python -m"
        " benchmarks.hunyuan_video`. 8.33 B parameters, bfloat16, both halves of guidance in one"
        " call, one video. Times are estimates, not measurements: parts one after the other,"
        " kernels as long as their schedules, links at 90 GB/s each way.",
        "",
        "![Estimated seconds a step by frames and resolution](hunyuan_video.svg)",
        "",
        "| slice, mesh | frames | tokens | PFLOP | GiB a chip | GiB sent, a chip | seconds"
        " | dense + memory + collectives + attention | kernel | compile, s |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *map(_line, rows),
        "",
        "A hand port on v6e-8 is known to take 7.29 s for 121 frames of 720p with JAX's splash"
        " attention, and 5.81 s with a kernel of its own.",
        "",
        "Taken with "
        + ", ".join(f"{name} {version}" for name, version in machine.versions().items())
        + ".",
        "",
    ]
    return "\n".join(lines)


def plot(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Draw seconds per step against frames, one line per resolution."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = list(rows)
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    times, work = figure.subplots(1, 2)
    for resolution in SIZES:
        found = sorted(
            (row["frames"], seconds, row["model_flops"] / 1e15)
            for row in rows
            if row["resolution"] == resolution
            and (row["spread"], row["topology"], row["i2v"]) == ("sequence", "v6e-8", False)
            and (seconds := _seconds(row)) is not None
        )
        if not found:
            continue
        frames, seconds, flops = zip(*found, strict=True)
        times.plot(frames, seconds, "o-", label=resolution)
        work.plot(frames, flops, "o-", label=resolution)
    times.set_ylabel("estimated seconds a step, v6e-8")
    work.set_ylabel("PFLOP a step")
    for panel in (times, work):
        panel.set_xlabel("frames")
        panel.set_xticks(FRAMES)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend()
    # Without a fixed salt and date the file would differ each time.
    with rc_context({"svg.hashsalt": "hunyuan_video"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    """Compile, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="*", choices=names, default=names, metavar="CASE")
    parser.add_argument("--full", action="store_true", help="let libtpu optimise fully")
    options = parser.parse_args()
    for case in CASES:
        if case.name in options.only:
            rows = _rows()
            rows[case.name] = compiled(case, quick=not options.full)
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    rows = _rows()
    ordered = [rows[case.name] for case in CASES if case.name in rows]
    (DOCS / "hunyuan_video.md").write_text(page(ordered), encoding="utf-8")
    plot(ordered, PLOT)


def _rows() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


if __name__ == "__main__":
    main()
