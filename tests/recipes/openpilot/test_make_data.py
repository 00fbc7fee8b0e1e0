"""Routes in the real formats: what real readers find there, and that scenes agree with labels."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from recipes.openpilot import constants, drawing, geometry, make_data
from recipes.openpilot.scene import LANE, Drive, DriveOptions
from tpuport.foundation.errors import UsageError

av = pytest.importorskip("av")
openpilot_logging = pytest.importorskip("openpilot_logging.logreader")

OPTIONS = make_data.RouteOptions(segments=2, seconds=1.0, seed=5, qcamera=True, height=1.5)


@pytest.fixture(scope="module")
def segments(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_data.make_route(tmp_path_factory.mktemp("route"), OPTIONS)


def events_of(path: Path) -> list:
    return list(openpilot_logging.LogReader(str(path)))


def test_openpilots_own_reader_reads_the_log(segments: list[Path]):
    events = events_of(segments[1] / "rlog.zst")
    counts = Counter(event.which() for event in events)
    # A second of driving, at the rates of devices.
    assert counts["carState"] == 100
    assert counts["liveCalibration"] == 4
    for name in ("roadCameraState", "wideRoadCameraState", "roadEncodeIdx", "wideRoadEncodeIdx"):
        assert counts[name] == 20, name
    for name in (
        "modelV2",
        "cameraOdometry",
        "livePose",
        "driverMonitoringState",
        "qRoadEncodeIdx",
    ):
        assert counts[name] == 20, name
    assert counts["initData"] == counts["carParams"] == 1
    times = [event.logMonoTime for event in events]
    assert times == sorted(times)
    heights = [e.liveCalibration.height[0] for e in events if e.which() == "liveCalibration"]
    assert heights == pytest.approx([1.5] * 4)
    first = next(event.roadEncodeIdx for event in events if event.which() == "roadEncodeIdx")
    # Frames are counted over the route, places in the file from the segment's start.
    assert (first.frameId, first.segmentId, first.segmentNum) == (37 + 20, 0, 1)


@pytest.mark.parametrize(
    ("name", "codec", "size"),
    [
        ("fcamera.hevc", "hevc", (672, 380)),
        ("ecamera.hevc", "hevc", (672, 380)),
        ("qcamera.ts", "h264", (526, 330)),
    ],
)
def test_videos_are_of_the_devices_kind(
    segments: list[Path], name: str, codec: str, size: tuple[int, int]
):
    with av.open(str(segments[0] / name)) as file:
        context = file.streams.video[0].codec_context
        assert (context.name, (context.width, context.height)) == (codec, size)
        frames = list(file.decode(video=0))
    assert len(frames) == 20
    kinds = {av.video.frame.PictureType(frame.pict_type).name for frame in frames}
    assert kinds == {"I", "P"}


@pytest.mark.parametrize("log_format", ["zst", "bz2", "raw"])
def test_every_format_of_logs_is_read_by_openpilot(tmp_path: Path, log_format):
    log = openpilot_logging.capnp_log
    given = [log.Event.new_message(logMonoTime=n, carState={"vEgo": n}) for n in range(5)]
    path = make_data.write_log(tmp_path, [event.to_bytes() for event in given], log_format)
    assert [event.carState.vEgo for event in events_of(path)] == [0, 1, 2, 3, 4]
    with pytest.raises(UsageError, match="expected one of zst, bz2, raw, got 'gz'"):
        make_data.write_log(tmp_path, [], "gz")  # pyright: ignore[reportArgumentType]


def test_an_unknown_camera_is_refused(tmp_path: Path):
    options = make_data.RouteOptions(device="neo", sensor="os04c10")
    with pytest.raises(UsageError, match=r"mici os04c10.*; got neo os04c10"):
        make_data.make_route(tmp_path, options)


def test_routes_to_learn_from_and_others_to_evaluate_with(tmp_path: Path):
    seen = []
    options = make_data.RouteOptions(segments=1, seconds=0.1)
    made = make_data.make_data(
        tmp_path, train=2, held_out=1, options=options, num_processes=2, on_segment=seen.append
    )
    assert [path.parent.name for path in seen] == ["train", "train", "held_out"]
    assert seen == made["train"] + made["held_out"]
    assert all((path / "rlog.zst").is_file() for path in seen)
    logs = [events_of(path / "rlog.zst") for path in seen]
    mounted, plans = set(), set()
    for events in logs:
        mounted |= {
            tuple(e.liveCalibration.rpyCalib) for e in events if e.which() == "liveCalibration"
        }
        plans |= {tuple(e.modelV2.position.y)[-1] for e in events if e.which() == "modelV2"}
    assert len(mounted) == 3
    assert len(plans) == 6


@pytest.mark.parametrize("module", ["make_data", "prepare"])
def test_processes_that_draw_or_read_start_without_torch_and_jax(module: str):
    code = (
        f"import sys, recipes.openpilot.{module}\n"
        "print(*sorted({'torch', 'jax', 'torchax'} & sys.modules.keys()))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == ""


@pytest.fixture
def drive() -> Drive:
    return Drive(DriveOptions(10, seed=2, lead=1.0))


def test_the_path_is_where_the_car_will_be(drive: Drive):
    """The plan's points, taken into the frame of a later moment, are that moment's origin."""
    plan = drive.plan(2.0)
    times = np.array(constants.T_IDXS)
    for number in (8, 16, 24):
        later = 2.0 + times[number]
        x, y = drive.to_car(later, *(drive.at(n, later) for n in "xy"))
        np.testing.assert_allclose([x, y], 0, atol=1e-9)
        ahead = drive.plan(later)[0, 3:5]
        turned = geometry.rotation_from_euler([0, 0, plan[number, 11]])[:2, :2]
        np.testing.assert_allclose(turned @ ahead, plan[number, 3:5], atol=1e-6)
    for first, second in ((0, 3), (3, 6)):
        steps = np.diff(plan[:, first : first + 2], axis=0) / np.diff(times)[:, None]
        middle = (plan[1:, second : second + 2] + plan[:-1, second : second + 2]) / 2
        np.testing.assert_allclose(steps, middle, atol=0.02)
    assert abs(plan[-1, 1]) > 2  # it does turn


def test_the_car_keeps_to_its_lane(drive: Drive):
    labels = drive.labels(3.0)
    np.testing.assert_allclose(np.diff(labels["lane_lines"][:, 0, 0]), LANE, rtol=0.02)
    np.testing.assert_allclose(labels["lane_lines"][1:3, 0, 0].mean(), 0, atol=0.2)
    path = np.interp(20.0, labels["plan"][:, 0], labels["plan"][:, 1])
    middle = labels["lane_lines"][1:3, :, 0].mean(0)
    np.testing.assert_allclose(path, np.interp(20.0, constants.X_IDXS, middle), atol=0.4)
    # All of it at the height of the road, below the camera.
    assert (labels["lane_lines"][..., 1] == np.float32(1.22)).all()


def test_the_car_ahead_moves_as_it_says(drive: Drive):
    lead = drive.labels(1.0)["lead"]
    assert lead[0, 0, 0] > 10
    # Two seconds later it is where the second entry, and the second lead's first, have it.
    np.testing.assert_allclose(lead[0, 1], lead[1, 0], atol=1e-4)
    gone = np.hypot(*(lead[0, 1, :2] - lead[0, 0, :2]))
    np.testing.assert_allclose(gone, 2 * lead[0, :2, 2].mean(), rtol=0.05)
    assert not Drive(DriveOptions(10, seed=2, lead=0.0)).labels(1.0)["lead_prob"].any()


def test_a_lane_change_is_wished_for_and_driven():
    drive = Drive(DriveOptions(10, seed=4, lane_change=True))
    wished = [drive.desire(t) for t in (2.0, 4.0, 6.0, 8.0)]
    assert wished[0] == wished[3] == 0
    assert wished[1] == wished[2]
    side = 1 if wished[1] == 4 else -1
    assert constants.DESIRES[wished[1]] == ("laneChangeRight" if side > 0 else "laneChangeLeft")
    before, after = (drive.lines(t, [0.0], (0.0,))[0, 0] for t in (2.5, 7.5))
    np.testing.assert_allclose(before - after, side * LANE, atol=0.4)


@pytest.mark.parametrize(
    ("rpy", "lane", "height"),
    [
        ((0.0, 0.0, 0.0), LANE, constants.MODEL_CAMERA_HEIGHT),
        ((0.02, 0.03, -0.02), LANE, constants.MODEL_CAMERA_HEIGHT),
        ((0.0, 0.02, 0.0), 2.8, 1.9),
    ],
)
def test_lines_are_painted_where_they_are_projected_to(
    rpy: tuple[float, float, float], lane: float, height: float
):
    camera = constants.DEVICE_CAMERAS["mici", "os04c10"].road
    size = (camera.width, camera.height)
    drive = Drive(DriveOptions(10, seed=6, lead=0.0, lane=lane, height=height))
    painter = drawing.Painter(camera.intrinsics, size, rpy, dashed=False, height=height)
    labels = drive.labels(1.0)
    np.testing.assert_allclose(np.diff(labels["lane_lines"][:, 0, 0]), lane, rtol=0.02)
    assert (labels["lane_lines"][..., 1] == np.float32(height)).all()
    assert np.abs(labels["road_edges"][:, 0, 0]).sum() == pytest.approx(3 * lane + 1.5, rel=0.02)
    y = painter.paint(drive, 1.0)[: size[0] * size[1]].reshape(size[::-1])
    for forward in (7.0, 12.0, 25.0):
        for right in drive.lines(1.0, [forward], (-lane / 2, lane / 2))[:, 0]:
            seen = geometry.project(
                [forward, right, height],
                geometry.camera_from_calib(rpy, camera.intrinsics),
            )
            row, column = round(seen[1]), round(seen[0])
            around = y[row, column - 30 : column + 31].astype(float)
            weight = np.clip(around - 90, 0, None)
            middle = (weight * np.arange(-30, 31)).sum() / weight.sum() + column
            assert abs(middle - seen[0]) < 1.0, (forward, right)
