"""Pictures: what is drawn lies where the path is, and files are what players and browsers show."""

from pathlib import Path

import numpy as np
import pytest

from recipes.hunyuan_video.video import read_video
from recipes.openpilot import constants, drawing, frames, geometry, pictures
from recipes.openpilot.scene import Drive, DriveOptions
from tpuport.foundation.errors import UsageError

av = pytest.importorskip("av")
DRIVE = Drive(DriveOptions(10, seed=5, lead=0.0))
CAMERA = constants.DEVICE_CAMERAS["mici", "os04c10"].road
SIZE = (CAMERA.width, CAMERA.height)
RPY = (0.0, 0.03, -0.02)


def labels_of(times: list[float]) -> dict[str, np.ndarray]:
    rows = [DRIVE.labels(time) for time in times]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def seen(forward: float, right: float, matrix: np.ndarray) -> tuple[int, int]:
    """Row and column of a point of the road."""
    column, row = geometry.project([forward, right, constants.MODEL_CAMERA_HEIGHT], matrix)
    return round(row), round(column)


@pytest.mark.parametrize("of_camera", [False, True])
def test_a_path_lies_on_the_road_where_it_goes(of_camera: bool):
    matrix = geometry.camera_from_calib(RPY, CAMERA.intrinsics)
    shape = (CAMERA.height, CAMERA.width, 3) if of_camera else (256, 512, 3)
    matrix = matrix if of_camera else geometry.model_from_calib()
    image = np.full(shape, 100, np.uint8)
    labels = labels_of([2.0])
    drawn = pictures.draw(
        image,
        pictures.Overlay.of(labels, 0),
        pictures.AFTER,
        camera_from_calib=matrix if of_camera else None,
    )
    assert (image == 100).all()
    x, y = labels["plan"][0, :, 0], labels["plan"][0, :, 1]
    for forward in (6.0, 10.0, 25.0):
        middle = float(np.interp(forward, x, y))
        for right, inside in (
            (0.0, True),
            (-0.75, True),
            (0.75, True),
            (-1.2, False),
            (1.2, False),
        ):
            there = drawn[seen(forward, middle + right, matrix)]
            assert (there[1] > there[0]) == inside, (forward, right)
        for line in DRIVE.lines(2.0, [forward], (-1.75, 1.75))[:, 0]:
            row, column = seen(forward, line, matrix)
            if 0 <= column < shape[1]:
                np.testing.assert_allclose(drawn[row, column], (64, 190, 91), atol=2)
    # Nothing in the sky.
    horizon = int(geometry.project([1e9, 0, 0], matrix)[1])
    assert (drawn[: horizon - 3] == 100).all()


def test_lines_that_are_unlikely_and_labels_that_are_not_valid_are_not_drawn():
    labels = labels_of([2.0])
    image = np.full((256, 512, 3), 100, np.uint8)
    lines = {"lane_lines": labels["lane_lines"], "lane_lines_prob": np.zeros((1, 8))}
    assert (pictures.draw(image, pictures.Overlay.of(lines, 0), (0, 0, 0)) == 100).all()
    lines["lane_lines_prob"][0, 3] = 0.9  # the second of four, of which two numbers each are said
    drawn = pictures.draw(image, pictures.Overlay.of(lines, 0), (0, 0, 0))
    columns = np.flatnonzero((drawn[200] != 100).any(axis=-1))
    assert 0 < len(columns) < 30
    assert columns.max() < 256
    invalid = labels | {"plan_valid": np.array([False])}
    assert pictures.Overlay.of(invalid, 0).plan is None
    behind = pictures.Overlay(plan=np.full((33, 15), -5.0))
    assert (pictures.draw(image, behind, (0, 0, 0)) == 100).all()


def test_a_path_ends_at_the_horizon_and_where_the_road_hides_it():
    image = np.full((256, 512, 3), 100, np.uint8)
    horizon = int(geometry.project([1e9, 0, 0], geometry.model_from_calib())[1])
    number = np.arange(33)
    plain = np.zeros((33, 15))
    plain[:, 0] = 3.0 + 4.0 * number
    changed = {}
    for name, column, values in (
        ("level", 2, 0.0 * number),
        ("flies", 2, np.where(number < 10, 0.0, -3.0)),
        ("turns back", 0, np.where(number < 10, plain[:, 0], 40.0 - 4.0 * number)),
        ("jumps", 2, np.where(number % 2 & (number > 5), 0.5, 0.0)),
    ):
        plan = plain.copy()
        plan[:, column] = values
        drawn = pictures.draw(image, pictures.Overlay(plan=plan), (0, 0, 0))
        changed[name] = (drawn != image).any(-1)
        assert not changed[name][:horizon].any(), name
        # Narrower from row to row, as a straight path of one width is: no spikes.
        widths = changed[name][200:horizon:-1].sum(1)
        assert (np.diff(widths) <= 1).all(), (name, widths)
    near = [np.flatnonzero(rows.any(1))[0] for rows in changed.values()]
    end = geometry.project([39.0, 0, 1.22], geometry.model_from_calib())[1]
    assert near[0] < horizon + 10
    assert near[1] == pytest.approx(end, abs=2)
    assert near[2] == pytest.approx(end, abs=2)
    for name in ("flies", "turns back"):
        assert not (changed[name] & ~changed["level"]).any()
    higher = pictures.Overlay(plan=plain, height=2.0)
    below = pictures.draw(image, higher, (0, 0, 0))
    assert (below != image).any(-1).sum() != changed["level"].sum()
    labels = {"lane_lines": np.full((1, 4, 33, 2), 2.0)}
    assert pictures.Overlay.of(labels, 0).height == 2.0


def test_both_models_and_the_truth_are_seen(tmp_path: Path):
    times = [1.0, 1.05, 1.1, 1.15]
    painter = drawing.Painter(CAMERA.intrinsics, SIZE, RPY)
    given = np.stack([painter.paint(DRIVE, time) for time in times])
    matrix = geometry.warp_matrix(RPY, CAMERA.intrinsics)
    packed = np.asarray(frames.prepare_frames(given, np.stack([matrix] * 4), SIZE))
    images = pictures.model_images(packed)
    assert images.shape == (4, 256, 512, 3)
    truth = labels_of(times)
    before = {"plan": truth["plan"].copy()}
    before["plan"][:, :, 1] += 3
    made = pictures.before_and_after(images, truth, before, {"plan": truth["plan"]})
    assert made.shape == (4, 256, 1024, 3)
    x, y = truth["plan"][0, :, 0], truth["plan"][0, :, 1]
    row, column = seen(8.0, float(np.interp(8.0, x, y)), geometry.model_from_calib())
    for half in (0, 512):  # the truth, in white on both
        assert made[0, row, half + column].min() > 200
    right, off = made[0, row, 512 + column + 40], made[0, row, column + 40]
    assert right[1] > right[0] + 20  # green where it should be
    assert off[1] <= off[0] + 20
    pictures.save(tmp_path / "a" / "both.mp4", made, about={"seed": 5})
    found, about = read_video(tmp_path / "a" / "both.mp4")
    assert (found.shape, about) == (made.shape, {"seed": 5})
    pictures.save(tmp_path / "both.png", made)
    with av.open(str(tmp_path / "both.png")) as file:
        (back,) = file.decode(video=0)
    np.testing.assert_array_equal(back.to_ndarray(format="rgb24"), made[0])


def test_colours_are_those_of_the_camera():
    planes = [np.full((2, 2), 81, np.uint8), *(np.full((1, 1), n, np.uint8) for n in (91, 240))]
    # Full range: Y 81, U 91, V 240 is a red.
    np.testing.assert_array_equal(pictures.to_rgb(*planes)[0, 0], [238, 14, 15])
    flat = np.concatenate([plane.ravel() for plane in planes])
    np.testing.assert_array_equal(pictures.camera_image(flat, (2, 2)), pictures.to_rgb(*planes))


def test_what_does_not_fit_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"frame: expected 6 bytes of 2x2, got \(7,\)"):
        pictures.camera_image(np.zeros(7, np.uint8), (2, 2))
    with pytest.raises(UsageError, match=r"a.gif: expected a name that ends in .mp4 or .png"):
        pictures.save(tmp_path / "a.gif", np.zeros((1, 4, 4, 3), np.uint8))
