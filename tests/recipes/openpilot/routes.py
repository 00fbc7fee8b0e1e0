"""Small routes with numbered frames, and what is done to them in tests."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from recipes.openpilot import drawing, frames, make_data, shards
from recipes.openpilot.logs import unpack_log
from recipes.openpilot.schema import log_schema

FIRST_ID = 37  # of frame 0
OPTIONS = make_data.RouteOptions(
    segments=1,
    seconds=2.0,
    seed=11,
    markers=True,
    lead=0.0,
    dropped=frozenset({5, 6, 20}),
    shrink=2,
)


def numbers_seen(packed: np.ndarray) -> list[int]:
    """What the pictures say which frames they are, up to a multiple of `drawing.MARKERS`."""
    return [drawing.read_marker(y) for y in frames.unpack(packed)[0]]


def numbers_said(arrays: shards.Arrays) -> list[int]:
    """What the log says of the same pictures."""
    return ((arrays["frame_id"] - FIRST_ID) % drawing.MARKERS).tolist()


def check_alignment(arrays: shards.Arrays, options: make_data.RouteOptions = OPTIONS) -> None:
    """Pictures, ids, times and labels are of the same frames."""
    assert numbers_seen(arrays["img"]) == numbers_said(arrays)
    drive = options.drive()
    times = (arrays["mono_time"] - 100_020_000_000) / 1e9
    np.testing.assert_allclose(times * 20, arrays["frame_id"] - FIRST_ID, atol=1e-6)
    for row, time in enumerate(times):
        for name, value in drive.labels(time).items():
            if arrays[f"{name}_valid"][row]:
                np.testing.assert_allclose(arrays[name][row], value, atol=1e-4, err_msg=name)


def events_of(folder: Path) -> list:
    """The messages of a segment's log."""
    path = next(path for path in folder.iterdir() if path.name.startswith("rlog"))
    from collections import Counter

    data = unpack_log(path.read_bytes(), Counter())
    return list(log_schema().Event.read_multiple_bytes(data))


def rewrite(folder: Path, change: Callable[[list], list]) -> None:
    """Change the messages of a segment's log."""
    events = [event.as_builder() for event in events_of(folder)]
    changed = change(events)
    make_data.write_log(folder, [event.to_bytes() for event in changed], "zst")
