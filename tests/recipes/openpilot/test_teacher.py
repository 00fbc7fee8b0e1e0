"""A teacher says the same of many frames at once as of each alone, and is written once."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import tpuport
from recipes.openpilot.driving import load_driver
from recipes.openpilot.outputs import parse
from recipes.openpilot.shards import open_arrays
from recipes.openpilot.teacher import (
    drive_all,
    label,
    on_accelerator,
    onnx_driver,
    pseudo_labels,
    read_outputs,
    runs_of,
)
from tests.recipes.openpilot.frames import make_shard
from tpuport.foundation.errors import CheckpointError, UsageError


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    with open_arrays(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def test_frames_at_once_are_frames_one_by_one(
    driving_models: Callable[..., list[Path]], tmp_path: Path
):
    # The first run takes two calls, of which the second is filled up.
    arrays = arrays_of(make_shard(tmp_path / "a.safetensors", 14, runs=(10, 4)))
    files = driving_models("0.10.3")
    driver = load_driver(files)
    expected = drive_all(driver, driver, arrays, batch=1)
    ported = on_accelerator(driver)
    found = drive_all(driver, ported, arrays, batch=8)
    assert found.shape == expected.shape == (14, 2576)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    host = onnx_driver(files)
    some = {name: value[:8] for name, value in arrays.items()}
    np.testing.assert_allclose(drive_all(host, host, some, batch=3), expected[:8], atol=1e-4)
    # A run begins cold: its frames do not follow from those before.
    alone = {name: value[10:] for name, value in arrays.items()}
    np.testing.assert_allclose(drive_all(driver, driver, alone, batch=4), expected[10:], atol=1e-4)


def test_segments_are_labelled_once(driving_models: Callable[..., list[Path]], tmp_path: Path):
    shards = [make_shard(tmp_path / f"{n}.safetensors", 9, seed=n) for n in (0, 1)]
    files, told = driving_models("0.10.3"), []
    out = tmp_path / "teacher"

    def run(model: list[Path], which: list[Path]) -> list[Path]:
        with tpuport.compile_cache(tmp_path / "programs", min_compile_seconds=0.0):
            return label(
                model, which, out, batch=8, done=lambda path, n: told.append((path.name, n))
            )

    (first,) = run(files, shards[:1])
    before = first.stat().st_mtime_ns
    both = run(files, shards)
    assert told == [("0.safetensors", 9), ("1.safetensors", 9)]
    assert first.stat().st_mtime_ns == before
    # A segment that was prepared anew is labelled anew.
    make_shard(shards[0], 9, seed=5)
    run(files, shards)
    assert told[2:] == [("0.safetensors", 9)]
    outputs, slices = read_outputs(both[1])
    driver = load_driver(files)
    assert slices == driver.slices
    expected = drive_all(driver, driver, arrays_of(shards[1]), batch=9)
    np.testing.assert_allclose(outputs, expected, atol=1e-4)
    with pytest.raises(UsageError, match=r"was begun otherwise .*model was"):
        run(driving_models("2026-07"), shards)
    with pytest.raises(CheckpointError, match="is of format 'openpilot-frames-1': expected"):
        read_outputs(shards[0])
    both[0].write_bytes(b"broken")
    with pytest.raises(CheckpointError, match=r"cannot be read: .* What to do: delete it"):
        run(files, shards)


def test_outputs_become_labels():
    slices = {"plan": slice(0, 990), "lane_lines_prob": slice(990, 998)}
    outputs = np.random.default_rng(0).normal(size=(6, 998)).astype(np.float32)
    run = np.array([0, 0, 0, 0, 3, 3])
    found = pseudo_labels(outputs, slices, run, warmup=3)
    assert found["plan"].shape == (6, 33, 15)
    np.testing.assert_array_equal(found["plan"], parse(outputs, slices)["plan"])
    expected = torch.sigmoid(torch.from_numpy(outputs[:, 991:998:2])).numpy()
    np.testing.assert_allclose(found["lane_lines_prob"], expected, rtol=1e-5)
    assert found["plan_valid"].tolist() == [False, False, False, True, False, False]


def test_runs():
    assert list(runs_of(np.array([2, 2, 5, 1, 1]))) == [slice(0, 2), slice(2, 3), slice(3, 5)]
    assert list(runs_of(np.array([], int))) == []
