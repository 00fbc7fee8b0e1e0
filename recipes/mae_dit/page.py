"""A page of runs: the curves of their logs, and their pictures."""

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from recipes.mae_dit.watching import Log, curve, read_log
from tpuport.foundation.errors import UsageError
from tpuport.foundation.files import replacing_file
from tpuport.foundation.reporting.markup import Markup
from tpuport.foundation.reporting.templates import render

_POINTS = 300  # of a curve
_GRIDS = 8  # pictures of a run


@dataclass(frozen=True)
class Picture:
    """A picture as it stands in the page."""

    name: str
    address: Markup
    width: int
    height: int


@dataclass(frozen=True)
class Run:
    """What the page shows of a folder."""

    name: str
    log: Log
    curves: list[Markup]
    pictures: list[Picture]


def write_page(
    path: Path,
    folders: Sequence[Path],
    *,
    pictures: Sequence[Path] = (),
    measures: Sequence[Path] = (),
) -> None:
    """Write one HTML file that shows runs, and loads nothing.

    Args:
        path: The file.
        folders: Folders of `stage1`, `stage2` or `sample`.
        pictures: More pictures, such as those of `reconstruct`.
        measures: Files of `evaluate`.

    Raises:
        UsageError: A folder has neither a log nor pictures, or a file is not what it should be.
    """
    page = render(
        "mae_dit/templates/page.html.j2",
        "recipes",
        runs=[read_run(folder) for folder in folders],
        pictures=[read_picture(file) for file in pictures],
        measures=[(str(file), read_measures(file)) for file in measures],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing_file(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def read_run(folder: Path) -> Run:
    """Read a folder's log and pictures.

    Raises:
        UsageError: It has neither.
    """
    log = read_log(folder / "log.jsonl")
    found = sorted((folder / "grids").glob("step-*.png"))
    shown = [found[i * (len(found) - 1) // (_GRIDS - 1)] for i in range(_GRIDS)] if found else []
    files = [*dict.fromkeys(shown), *folder.glob("grid.png")]
    if not log.values and not files:
        raise UsageError(
            f"{folder} has no log.jsonl and no pictures. What to do: give the folder of a run of"
            " stage1, stage2 or sample"
        )
    curves = [curve(name, thinned(points)) for name, points in log.values.items()]
    return Run(str(folder), log, curves, [read_picture(file) for file in files])


def thinned(points: dict[int, float]) -> dict[int, float]:
    """Return some of the points, evenly spaced, with the first and the last."""
    steps = sorted(points)
    if len(steps) <= _POINTS:
        return points
    kept = {steps[i * (len(steps) - 1) // (_POINTS - 1)] for i in range(_POINTS)}
    return {step: points[step] for step in sorted(kept)}


def read_picture(file: Path) -> Picture:
    """Read a picture as PNG.

    Raises:
        UsageError: It is no picture.
    """
    try:
        with Image.open(file) as image:
            made = io.BytesIO()
            image.convert("RGB").save(made, format="PNG")
            width, height = image.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UsageError(f"{file} is no picture: {error}") from error
    text = base64.b64encode(made.getvalue()).decode("ascii")
    return Picture(str(file), Markup(f"data:image/png;base64,{text}"), width, height)


def read_measures(file: Path) -> dict[str, float]:
    """Read what `evaluate --out` wrote.

    Raises:
        UsageError: It is no object of numbers.
    """
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(v, int | float) for v in found.values()):
        raise UsageError(f"{file} is no object of numbers, as evaluate --out writes it")
    return found
