"""What one sees while a training set is prepared."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from recipes.openpilot.prepare import PrepareOptions
from recipes.openpilot.progress import prepare_and_show, report

pytest.importorskip("openpilot_logging")
pytest.importorskip("av")


def test_each_segment_says_what_it_left_out(segment: Path, tmp_path: Path):
    (segment / "ecamera.hevc").unlink()
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    options = PrepareOptions(num_processes=0, num_threads=1)
    records = prepare_and_show(segment.parent, tmp_path / "set", options, console=console)
    said = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert f"{segment.name}: 37 frames in 3 unbroken runs" in said
    assert "  no ecamera.hevc: big_img is of the road camera" in said
    assert "37 frames of 1 segments in 3 unbroken runs; 0 frames left out" in said
    assert "1/1" in said
    assert records[segment.name]["frames"] == 37


def test_reports_have_a_line_for_each_reason():
    record = {
        "frames": 5,
        "runs": [5],
        "skipped": {"fcamera.hevc: damaged": 3},
        "problems": {"no video": 1, "messages of a kind": 4},
        "notes": ["[assumed]"],
    }
    assert report("a--0", record).splitlines() == [
        "a--0: 5 frames in 1 unbroken run",
        "  3 frames left out: fcamera.hevc: damaged",
        "  no video",
        "  messages of a kind, 4 times",
        "  [assumed]",
    ]
