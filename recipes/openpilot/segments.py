"""Files of a folder sorted by route and segment."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tpuport.foundation.errors import UsageError

LOGS = ("rlog.zst", "rlog.bz2", "rlog")
ROAD, WIDE, QUICK = "fcamera.hevc", "ecamera.hevc", "qcamera.ts"
_FILES = (*LOGS, ROAD, WIDE, QUICK)
_SEGMENT = re.compile(r"(?P<route>.+)--(?P<number>\d+)")


@dataclass(frozen=True)
class Segment:
    """One minute of a route, with the files that exist.

    Attributes:
        route: Name of the route.
        number: Number of the segment, from 0.
        files: Files by name, such as "rlog.zst" and "fcamera.hevc".
    """

    route: str
    number: int
    files: dict[str, Path] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the name of the segment, and of its file in a training set."""
        return f"{self.route}--{self.number}"

    @property
    def log(self) -> Path | None:
        """Return the full log, in the newest of its formats."""
        return next((self.files[name] for name in LOGS if name in self.files), None)


def find_segments(root: str | Path) -> list[Segment]:
    """Find all segments below a folder, sorted by route and number.

    The known layouts are a folder per segment, as on devices (`ROUTE--3/rlog.zst`); a folder per
    route (`ROUTE/3/rlog.zst`); and files as connect names them (`ROUTE--3--rlog.zst`).

    Args:
        root: Folder of segments, or of one segment.

    Raises:
        UsageError: There is no such folder, no segment in it, or a segment twice.
    """
    root = Path(root)
    if not root.is_dir():
        raise UsageError(f"{root} is no folder. What to do: give one that holds routes")
    found: dict[tuple[str, int], Segment] = {}
    for path in sorted(root.rglob("*")):
        place = _place(path, root) if path.is_file() else None
        if place is None:
            continue
        route, number, name = place
        segment = found.setdefault((route, number), Segment(route, number))
        if name in segment.files:
            raise UsageError(
                f"{segment.name} is there twice: {segment.files[name]} and {path}. What to do: give"
                " a folder in which each route is once"
            )
        segment.files[name] = path
    if not found:
        raise UsageError(
            f"{root} has no segment: expected files such as ROUTE--0/rlog.zst and"
            " ROUTE--0/fcamera.hevc in it"
        )
    return [found[key] for key in sorted(found)]


def following(segment: Segment, segments: Iterable[Segment]) -> Segment | None:
    """Return the next minute of the same route, or None."""
    wanted = (segment.route, segment.number + 1)
    return next((one for one in segments if (one.route, one.number) == wanted), None)


def _place(path: Path, root: Path) -> tuple[str, int, str] | None:
    """Return route, number and name of a file, or None if it is not of a segment."""
    if path.name in _FILES:
        matched = _SEGMENT.fullmatch(path.parent.name)
        if matched:
            return matched["route"], int(matched["number"]), path.name
        if path.parent.name.isdecimal() and path.parent != root:
            route = path.parent.parent.name if path.parent.parent != root else root.resolve().name
            return route, int(path.parent.name), path.name
        return None
    name = next((one for one in _FILES if path.name.endswith(f"--{one}")), None)
    matched = _SEGMENT.fullmatch(path.name.removesuffix(f"--{name}")) if name else None
    return (matched["route"], int(matched["number"]), name) if matched and name else None
