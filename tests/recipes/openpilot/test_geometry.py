"""Matrices between frames of reference, against numbers worked out by hand."""

import numpy as np
import pytest

from recipes.openpilot import constants, geometry
from tpuport.foundation.errors import UsageError

TICI = constants.DEVICE_CAMERAS["tici", "ar0231"].road


def test_times_and_distances_grow_with_the_square():
    assert constants.T_IDXS[:2] == (0.0, 10 / 1024)
    assert (constants.T_IDXS[-1], constants.X_IDXS[-1]) == (10.0, 192.0)
    assert constants.X_IDXS[16] == 48.0
    assert constants.TEMPORAL_SKIP == 4


@pytest.mark.parametrize(
    ("device", "sensor", "width", "focal", "wide"),
    [
        ("tici", "unknown", 1928, 2648.0, 567.0),
        ("tizi", "ox03c10", 1928, 2648.0, 567.0),
        ("mici", "os04c10", 1344, 1141.5, 425.25),
        ("neo", "unknown", 1164, 910.0, None),
    ],
)
def test_cameras_are_those_of_the_device(
    device: str, sensor: str, width: int, focal: float, wide: float | None
):
    cameras = constants.DEVICE_CAMERAS[device, sensor]
    assert (cameras.road.width, cameras.road.focal_length) == (width, focal)
    assert (cameras.wide and cameras.wide.focal_length) == wide
    np.testing.assert_array_equal(cameras.road.intrinsics[2], [0, 0, 1])
    assert cameras.road.intrinsics[0, 2] == width / 2


@pytest.mark.parametrize(
    ("angles", "forward", "right"),
    [
        ((0, 0, np.pi / 2), (0, 1, 0), (-1, 0, 0)),  # yaw to the right
        ((0, np.pi / 2, 0), (0, 0, -1), (0, 1, 0)),  # pitch up
        ((np.pi / 2, 0, 0), (1, 0, 0), (0, 0, 1)),  # roll to the right
        ((np.pi / 2, 0, np.pi / 2), (0, 1, 0), (0, 0, 1)),  # the roll comes first
    ],
)
def test_angles_turn_as_in_the_device_frame(
    angles: tuple[float, ...], forward: tuple[int, ...], right: tuple[int, ...]
):
    turned = geometry.rotation_from_euler(angles)
    np.testing.assert_allclose(turned[:, 0], forward, atol=1e-12)
    np.testing.assert_allclose(turned[:, 1], right, atol=1e-12)


def test_angles_come_back_from_matrices():
    angles = np.random.default_rng(0).uniform(-1.5, 1.5, (50, 3))
    matrices = geometry.rotation_from_euler(angles)
    unit = np.broadcast_to(np.eye(3), (50, 3, 3))
    np.testing.assert_allclose(matrices @ matrices.swapaxes(1, 2), unit, atol=1e-12)
    np.testing.assert_allclose(np.linalg.det(matrices), 1)
    np.testing.assert_allclose(geometry.euler_from_rotation(matrices), angles, atol=1e-9)


def test_a_device_that_looks_straight_only_zooms():
    matrix = geometry.warp_matrix([0, 0, 0], TICI.intrinsics)
    zoom = 2648 / 910
    expected = [[zoom, 0, 964 - 256 * zoom], [0, zoom, 604 - 47.6 * zoom], [0, 0, 1]]
    np.testing.assert_allclose(matrix, expected, atol=1e-9)
    # Corners as worked out from openpilot's own functions: most of the sky is cropped.
    corners = np.array([[0, 0, 1], [511, 255, 1]]) @ matrix.T
    np.testing.assert_allclose(corners[:, :2], [[219.07, 465.49], [1706.02, 1207.5]], atol=0.05)


@pytest.mark.parametrize("big", [False, True])
def test_a_point_is_where_both_cameras_see_it(big: bool):
    """Through the warp, a point lies where the model's own camera would have it."""
    rpy = (0.02, -0.04, 0.03)
    points = np.random.default_rng(1).uniform((5, -3, -1), (90, 3, 2), (20, 3))
    seen = geometry.project(points, geometry.model_from_calib(big=big))
    through = np.c_[seen, np.ones(20)] @ geometry.warp_matrix(rpy, TICI.intrinsics, big=big).T
    in_camera = geometry.project(points, geometry.camera_from_calib(rpy, TICI.intrinsics))
    np.testing.assert_allclose(through[:, :2] / through[:, 2:], in_camera, atol=1e-6)
    # By hand: turned into the device's frame, right and down of the middle by the tangents.
    x, y, z = (geometry.rotation_from_euler(rpy) @ points[0]).tolist()
    by_hand = [964 + 2648 * y / x, 604 + 2648 * z / x]
    np.testing.assert_allclose(in_camera[0], by_hand, atol=1e-9)


def test_what_is_behind_the_camera_is_nowhere():
    seen = geometry.project([[-5.0, 0, 1], [5, 0, 1]], geometry.model_from_calib())
    assert np.isnan(seen[0]).all()
    np.testing.assert_allclose(seen[1], [256, 47.6 + 910 / 5])


def test_planes_of_colour_have_matrices_of_their_own():
    """2026: M with scale 0.5, as written down; before, centres of pixels stay where they are."""
    matrix = geometry.warp_matrix([0.01, 0.02, 0.03], TICI.intrinsics)
    new = geometry.chroma_matrix(matrix, "nearest")
    np.testing.assert_allclose(new, matrix * [[1, 1, 0.5], [1, 1, 0.5], [2, 2, 1]])
    old = geometry.chroma_matrix(matrix, "bilinear")
    place = np.array([37.0, 81.0])
    full = np.array([*(place * 2 + 0.5), 1]) @ matrix.T
    expected = (full[:2] / full[2] - 0.5) / 2
    half = np.array([*place, 1]) @ old.T
    np.testing.assert_allclose(half[:2] / half[2], expected)
    with pytest.raises(UsageError, match="expected one of bilinear, nearest, got 'cubic'"):
        geometry.chroma_matrix(matrix, "cubic")  # pyright: ignore[reportArgumentType]


def test_a_resized_image_keeps_its_corners():
    camera = geometry.scaled_intrinsics(TICI.intrinsics, (1928, 1208), (964, 302))
    assert camera[0, 0] == 1324
    corner = np.array([-0.5, -0.5, 1]) @ np.linalg.inv(TICI.intrinsics).T
    np.testing.assert_allclose(corner @ camera.T, [-0.5, -0.5, 1])
