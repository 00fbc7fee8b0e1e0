"""From a drawn road to packed frames: where things lie, and that labels are of their pictures.

Encoded, logged, read, decoded, joined, warped and packed by the recipe's own code and real codecs.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recipes.openpilot import drawing, frames, geometry, make_data, pretrain, shards
from recipes.openpilot.constants import MODEL_CAMERA_HEIGHT
from recipes.openpilot.prepare import PrepareOptions, prepare
from tests.recipes.openpilot import routes

pytest.importorskip("openpilot_logging")
pytest.importorskip("av")
ALONE = PrepareOptions(num_processes=0, num_threads=1)
CLEAR = make_data.RouteOptions(
    segments=1, seconds=0.15, seed=3, dashed=False, lead=0.0, shrink=1, quality=8
)


def prepared(root: Path, out: Path, options: PrepareOptions = ALONE) -> tuple[shards.Arrays, dict]:
    """Arrays and record of the only segment."""
    (record,) = prepare(root, out, options).values()
    return shards.read_shard(out / record["file"]), record


def line_errors(packed: np.ndarray, drive, time: float, *, big: bool) -> list[float]:
    """How far lines on the picture are from where they are projected to, in pixels of the model."""
    y = frames.unpack(packed)[0].astype(float)
    found = []
    for forward in (8.0, 11.0, 15.0, 20.0):
        for right in drive.lines(time, [forward], drive.options.lane_lines)[:, 0]:
            point = [forward, right, MODEL_CAMERA_HEIGHT]
            column, row = geometry.project(point, geometry.model_from_calib(big=big))
            if not (12 < column < 499 and row < 250):
                continue
            # The row's own distance, as the picture has rows at whole numbers only.
            reach = 11 if not big else 6
            start = round(column) - reach
            strip = y[round(row), start : start + 2 * reach + 1]
            weight = np.clip(strip - 140, 0, None)  # of the line only, grass has less
            assert weight.max() > 20, "no line there"
            at_row = forward * (row - geometry_horizon(big)) / (round(row) - geometry_horizon(big))
            shifted = drive.lines(time, [at_row], drive.options.lane_lines)[:, 0]
            right_there = shifted[np.abs(shifted - right).argmin()]
            expected, _ = geometry.project(
                [at_row, right_there, MODEL_CAMERA_HEIGHT], geometry.model_from_calib(big=big)
            )
            middle = (weight * (np.arange(len(strip)) + start)).sum() / weight.sum()
            # Along a row, shallow lines are cut at an angle: what counts is how far it is to them.
            found.append((middle - expected) / np.hypot(1, right / MODEL_CAMERA_HEIGHT))
    return found


def geometry_horizon(big: bool) -> float:
    """The row of what is infinitely far."""
    return float(geometry.project([1e9, 0, 0], geometry.model_from_calib(big=big))[1])


@pytest.mark.parametrize("sampling", geometry.SAMPLINGS)
@pytest.mark.parametrize(
    ("device", "sensor", "rpy"),
    [
        ("mici", "os04c10", (0.0, 0.0, 0.0)),
        ("mici", "os04c10", (0.01, 0.03, -0.04)),
        ("tici", "ar0231", (-0.01, 0.04, 0.03)),
    ],
)
def test_lines_land_within_a_pixel(
    tmp_path: Path, sampling: geometry.Sampling, device: str, sensor: str, rpy
):
    options = replace(CLEAR, device=device, sensor=sensor, rpy_calib=rpy)
    make_data.make_route(tmp_path / "routes", options)
    how = replace(ALONE, sampling=sampling)
    arrays, record = prepared(tmp_path / "routes", tmp_path / "set", how)
    assert (record["frames"], record["skipped"], record["notes"]) == (3, {}, [])
    drive = options.drive()
    for row, number in enumerate(arrays["frame_id"] - routes.FIRST_ID):
        for name, big in (("img", False), ("big_img", True)):
            errors = line_errors(arrays[name][row], drive, number / 20, big=big)
            assert len(errors) >= (6 if not big else 10)
            assert np.abs(errors).max() < 1.0, (name, errors)
            assert abs(np.mean(errors)) < 0.5


def test_frames_to_pretrain_with_look_like_those_of_a_camera(tmp_path: Path):
    """Drawn and warped alone, against through camera, encoder, decoder and warp."""
    options = replace(CLEAR, seconds=0.3, seed=8, dashed=True, lead=1.0, shrink=2, quality=20)
    make_data.make_route(tmp_path / "routes", options)
    arrays, _ = prepared(tmp_path / "routes", tmp_path / "set")
    drive = options.drive()
    (drawn,) = pretrain.pictures(drive, [0.25])
    away = {
        (number, old): np.abs(arrays["img"][number].astype(float) - half).mean()
        for number in (1, 5)
        for old, half in ((True, drawn[:6]), (False, drawn[6:]))
    }
    for number, old in ((1, True), (5, False)):
        # In grey levels: of its own moment, and of one that is 0.2 s away.
        assert away[number, old] < 1.0
        assert away[number, not old] > 2 * away[number, old]
        there = frames.unpack(arrays["img"][number])[0].astype(float)
        ours = frames.unpack(drawn[:6] if old else drawn[6:])[0].astype(float)
        assert abs((there - ours).mean()) < 0.5
        assert np.corrcoef(there.ravel(), ours.ravel())[0, 1] > 0.95


def test_the_calibration_is_what_makes_them_land(tmp_path: Path):
    """The check above is sharp: half a degree is many pixels."""
    make_data.make_route(tmp_path / "routes", replace(CLEAR, rpy_calib=(0.0, 0.0, 0.009)))
    (segment,) = (tmp_path / "routes").iterdir()

    def forgotten(events: list) -> list:
        for event in events:
            if event.which() == "liveCalibration":
                event.liveCalibration.rpyCalib = [0.0, 0.0, 0.0]
        return events

    routes.rewrite(segment, forgotten)
    arrays, _ = prepared(tmp_path / "routes", tmp_path / "set")
    number = arrays["frame_id"][0] - routes.FIRST_ID
    errors = line_errors(arrays["img"][0], CLEAR.drive(), number / 20, big=False)
    assert np.abs(errors).min() > 1.5, errors


def test_pictures_and_labels_are_of_the_same_frame(marked_route: Path, tmp_path: Path):
    arrays, record = prepared(marked_route, tmp_path / "set")
    assert record["frames"] == 37
    assert record["runs"] == [5, 13, 19]
    routes.check_alignment(arrays)
    assert routes.numbers_seen(arrays["img"])[:7] == [0, 1, 2, 3, 4, 7, 8]
    # By position, everything behind the first dropped frame would be of another moment.
    by_position = np.arange(len(arrays["frame_id"])) % drawing.MARKERS
    assert (by_position != routes.numbers_seen(arrays["img"])).sum() == 32
    assert set(np.diff(arrays["frame_id"])[np.diff(arrays["run"]) == 0]) == {1}
    assert arrays["run"].tolist() == [0] * 5 + [1] * 13 + [2] * 19
    assert arrays["v_ego"][0] == pytest.approx(routes.OPTIONS.drive().speed_at(0.0), abs=0.02)


def test_both_cameras_show_the_same_moment(tmp_path: Path):
    """Encoders drop frames each on its own."""
    options = replace(routes.OPTIONS, seconds=1.0, dropped_wide=frozenset({2, 3, 9}))
    make_data.make_route(tmp_path / "routes", options)
    arrays, record = prepared(tmp_path / "routes", tmp_path / "set")
    routes.check_alignment(arrays, options)
    assert record["skipped"] == {"without a picture of the wide camera": 3}
    numbers = (arrays["frame_id"] - routes.FIRST_ID).tolist()
    assert numbers == [n for n in range(20) if n not in {2, 3, 5, 6, 9}]
    wide = frames.unpack(arrays["big_img"])[0]
    # In the wide picture, the marker is at half the angle in pixels, above another horizon.
    for y, number in zip(wide, numbers, strict=True):
        bright = np.flatnonzero(y[135:143].mean(0) > 225).mean()
        expected = 256 + (number - drawing.MARKERS // 2) * drawing.MARKER_STEP * 455
        assert abs(bright - expected) < 2


def test_a_log_that_is_shifted_against_the_video_joins_right(segment: Path, tmp_path: Path):
    """It begins with the minute before, lost messages, and has them in another order."""

    def shifted(events: list) -> list:
        kept, before = [], []
        for event in events:
            name = event.which()
            index = getattr(event, name) if name.endswith("EncodeIdx") else None
            if index is not None and 37 <= index.frameId < 40:
                continue
            if name in ("modelV2", "roadCameraState") and getattr(event, name).frameId < 45:
                continue
            kept.append(event)
            if index is not None and index.frameId < 50:
                copy = event.copy()
                old = getattr(copy, name)
                old.segmentNum, old.frameId = old.segmentNum - 1, old.frameId - 13
                before.append(copy)
        return before + kept[::-1]

    routes.rewrite(segment, shifted)
    arrays, record = prepared(segment.parent, tmp_path / "set")
    routes.check_alignment(arrays)
    assert record["skipped"] == {
        "fcamera.hevc: not in the log": 3,
        "ecamera.hevc: not in the log": 3,
    }
    assert record["problems"] == {
        "frames of road of another segment": 8,
        "frames of wideRoad of another segment": 8,
    }
    # Frames of which modelV2 was lost have no labels, and no one else's.
    numbers = arrays["frame_id"] - routes.FIRST_ID
    np.testing.assert_array_equal(arrays["plan_valid"], numbers >= 8)
    assert not arrays["plan"][numbers < 8].any()


def test_a_lane_change_is_wished_for_from_the_next_frame_on(tmp_path: Path):
    options = replace(routes.OPTIONS, seconds=6.0, lane_change=True, full_video=False, qcamera=True)
    make_data.make_route(tmp_path / "routes", options)
    arrays, _ = prepared(tmp_path / "routes", tmp_path / "set")
    drive = options.drive()
    numbers = arrays["frame_id"] - routes.FIRST_ID
    wished = [drive.desire((number - 1) / 20) for number in numbers]
    np.testing.assert_array_equal(arrays["desire"].argmax(1), wished)
    assert len(set(wished)) == 2
    np.testing.assert_array_equal(arrays["desire"].sum(1), 1)


@pytest.mark.parametrize("right_hand_drive", [False, True])
def test_the_side_of_the_road_and_the_delays_are_told(tmp_path: Path, right_hand_drive: bool):
    options = replace(
        routes.OPTIONS,
        seconds=0.1,
        full_video=False,
        qcamera=True,
        right_hand_drive=right_hand_drive,
    )
    make_data.make_route(tmp_path / "routes", options)
    arrays, _ = prepared(tmp_path / "routes", tmp_path / "set")
    assert arrays["traffic_convention"].argmax(1).tolist() == [int(right_hand_drive)] * 2
    # The car's own delays, what is added to them upstream, and a frame and a half.
    expected = [0.12 + 0.2 + 0.075, 0.15 + 0.3 + 0.075]
    np.testing.assert_allclose(arrays["action_t"], [expected] * 2, rtol=1e-6)
