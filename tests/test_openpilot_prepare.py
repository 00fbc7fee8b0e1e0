"""The benchmark of preparing frames: everyone prepares the same ones."""

from pathlib import Path

import pytest

pytest.importorskip("av")
pytest.importorskip("openpilot_logging")

from benchmarks import openpilot_prepare as benchmark
from recipes.openpilot import make_data
from recipes.openpilot.logs import read_log
from recipes.openpilot.segments import find_segments


def test_all_give_the_same_bytes(tmp_path: Path):
    options = make_data.RouteOptions(segments=1, seconds=0.15, shrink=1)
    make_data.make_route(tmp_path, options)
    (segment,) = find_segments(tmp_path)
    assert segment.log is not None
    ways = benchmark.contestants(segment, read_log(segment.log), options, None)
    made = {name: way() for name, way in ways.items()}
    assert [len(arrays) for arrays in made.values()] == [2, 2, 2]
    assert made[benchmark.RECIPE][0].shape == (3, 6, 128, 256)
    benchmark.check_same(made)
    made[benchmark.RECIPE][1] = made[benchmark.RECIPE][0]
    with pytest.raises(RuntimeError, match=r"recipes.openpilot: 0\.\d+ of the bytes are the same"):
        benchmark.check_same(made)
