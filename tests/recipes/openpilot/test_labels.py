"""Labels of modelV2 and of the path that was driven, against a drive of which all is known."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recipes.openpilot import labels, make_data, shards
from recipes.openpilot.constants import T_IDXS
from recipes.openpilot.geometry import rotation_from_euler
from recipes.openpilot.prepare import PrepareOptions, prepare
from recipes.openpilot.scene import Drive, DriveOptions
from tests.recipes.openpilot import routes

SECOND = 10**9


def poses_of(drive: Drive, seconds: np.ndarray, rpy: tuple[float, float, float]) -> labels.Poses:
    """What a device that is mounted at an angle measures."""
    device_from_calib = rotation_from_euler(rpy)
    zero = np.zeros_like(seconds)
    moving = np.stack([drive.speed_at(seconds), zero, zero], axis=1) @ device_from_calib.T
    turning = np.stack([zero, zero, drive.at("turning", seconds)], axis=1) @ device_from_calib.T
    time = np.round(seconds * SECOND).astype(np.int64) + 5 * SECOND
    return labels.Poses(time, moving, turning, np.ones(len(time), bool))


DRIVE = Drive(DriveOptions(20, seed=8))
MOUNTED = (0.02, 0.05, -0.04)


@pytest.mark.parametrize("rpy", [(0.0, 0.0, 0.0), MOUNTED])
def test_the_path_that_was_driven_is_the_plan(rpy: tuple[float, float, float]):
    poses = poses_of(DRIVE, np.arange(0, 14, 0.05), rpy)
    frames = np.array([0.0, 1.02, 2.5, 3.7])
    times = np.round(frames * SECOND).astype(np.int64) + 5 * SECOND
    found = labels.path_labels(poses, times, np.array([rpy] * 4))
    plan, known = found["plan"]
    assert known.all()
    for row, time in enumerate(frames):
        expected = DRIVE.plan(time)
        np.testing.assert_allclose(plan[row, :, 0:3], expected[:, 0:3], atol=0.03)
        np.testing.assert_allclose(plan[row, :, 3:6], expected[:, 3:6], atol=0.02)
        np.testing.assert_allclose(plan[row, 1:, 6:9], expected[1:, 6:9], atol=0.05)
        np.testing.assert_allclose(plan[row, :, 9:12], expected[:, 9:12], atol=0.002)
        np.testing.assert_allclose(plan[row, :, 12:15], expected[:, 12:15], atol=0.002)
    assert abs(plan[:, -1, 1]).max() > 5  # it turns
    pose, known = found["pose"]
    assert known.all()
    truth = np.stack([DRIVE.labels(time)["pose"] for time in frames])
    np.testing.assert_allclose(pose, truth, atol=0.005)


def test_the_calibration_counts():
    """A device that looks aside would see the car drive aside."""
    poses = poses_of(DRIVE, np.arange(0, 14, 0.05), MOUNTED)
    times = np.array([6 * SECOND])
    plan = labels.path_labels(poses, times, np.zeros((1, 3)))["plan"][0][0]
    assert np.abs(plan[:, 0:3] - DRIVE.plan(1.0)[:, 0:3]).max() > 5


def test_ten_seconds_have_to_be_known():
    seconds = np.arange(0, 14, 0.05)
    poses = poses_of(DRIVE, seconds, MOUNTED)
    times = np.round(np.arange(0, 13, 0.5) * SECOND).astype(np.int64) + 5 * SECOND
    rpy = np.array([MOUNTED] * len(times))

    def known(poses: labels.Poses) -> tuple[list[float], list[float]]:
        found = labels.path_labels(poses, times, rpy)
        return tuple(
            ((times[found[n][1]] - 5 * SECOND) / SECOND).tolist() for n in ("plan", "pose")
        )

    assert known(poses)[0] == list(np.arange(0, 4, 0.5))
    assert known(poses)[1] == list(np.arange(0, 13, 0.5))
    # A gap at 1.2 s, and a moment at 11.6 s that is not valid.
    keep = (seconds < 1.2) | (seconds > 1.45)
    cut = labels.Poses(*(column[keep] for column in vars(poses).values()))
    assert known(cut)[0] == [1.5, 2.0, 2.5, 3.0, 3.5]
    invalid = replace(poses, valid=np.abs(seconds - 11.6) > 0.01)
    assert known(invalid)[0] == [0.0, 0.5, 1.0, 1.5]
    assert known(labels.Poses(*(c[:2] for c in vars(poses).values()))) == ([], [])


def test_rotations_from_vectors_are_those_of_angles():
    for axis in range(3):
        vector, angles = np.zeros(3), np.zeros(3)
        vector[axis] = angles[axis] = 0.7
        np.testing.assert_allclose(
            labels.rotation_from_vector(vector), rotation_from_euler(angles), atol=1e-12
        )
    np.testing.assert_array_equal(labels.rotation_from_vector(np.zeros((2, 3))), [np.eye(3)] * 2)


pytest.importorskip("openpilot_logging")


def model_of(**changes) -> object:
    """modelV2 as a device writes it, with changes."""
    from recipes.openpilot.events import Recording, _model

    recording = Recording(DRIVE, "mici", "os04c10", (0.0, 0.0, 0.0), 0, range(5), 37, start=0)
    message = _model(recording, 2)[0].modelV2
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def test_a_message_gives_its_own_numbers():
    problems: Counter[str] = Counter()
    found = labels.model_labels(model_of(), problems)
    truth = DRIVE.labels(0.1)
    assert found.keys() == truth.keys() - {"pose"}
    for name, value in found.items():
        assert (value.dtype, value.shape) == (np.float32, labels.LABEL_SHAPES[name])
        np.testing.assert_allclose(value, truth[name], rtol=1e-6, atol=1e-6, err_msg=name)
    assert not problems


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"laneLines": []}, {"lane_lines"}),
        ({"leadsV3": []}, {"lead", "lead_prob"}),
        ({"acceleration": {"x": []}}, {"plan"}),
        ({"position": {"t": [0.0, 1.0], "x": [0.0, 1.0]}}, {"plan"}),
        ({"laneLineProbs": [0.5, float("nan"), 0.5, 0.5]}, {"lane_lines_prob"}),
        ({"roadEdges": [{"x": [float(n) for n in range(33)]}] * 2}, {"road_edges"}),
    ],
)
def test_what_another_generation_said_otherwise_is_left_out(changes: dict, missing: set[str]):
    problems: Counter[str] = Counter()
    found = labels.model_labels(model_of(**changes), problems)
    assert labels.LABEL_SHAPES.keys() - found.keys() - {"pose"} == missing
    assert problems == {f"modelV2 without {name} as models have it now": 1 for name in missing}


def test_a_segment_ends_in_the_next_ones_log(tmp_path: Path):
    """The ten seconds after a frame go on behind the end of its minute."""
    options = replace(
        routes.OPTIONS, segments=2, seconds=6.0, full_video=False, qcamera=True, dropped=frozenset()
    )
    make_data.make_route(tmp_path / "routes", options)
    how = PrepareOptions(labels="pose", num_processes=0, num_threads=1)
    first, second = prepare(tmp_path / "routes", tmp_path / "set", how).values()
    # Of twelve seconds, frames of the first two have ten to come.
    assert first["labelled"]["plan"] in (39, 40)
    assert "plan" not in second["labelled"]
    assert second["labelled"]["pose"] >= 118
    arrays = shards.read_shard(tmp_path / "set" / first["file"])
    assert shards.shard_metadata(tmp_path / "set" / first["file"])["labels"] == "pose"
    drive = options.drive()
    for row in np.flatnonzero(arrays["plan_valid"])[::8]:
        truth = drive.plan((arrays["mono_time"][row] - 100_020_000_000) / SECOND)
        np.testing.assert_allclose(arrays["plan"][row, :, :3], truth[:, :3], atol=0.05)
    assert T_IDXS[-1] == 10.0
