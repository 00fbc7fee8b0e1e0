"""Logs that are damaged, of another time, or say things that nobody knows."""

import bz2
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from recipes.openpilot import logs, make_data, segments
from recipes.openpilot.joining import frame_table, latest, runs, together
from tests.recipes.openpilot import routes
from tpuport.foundation.errors import UsageError

pytest.importorskip("openpilot_logging")
zstandard = pytest.importorskip("zstandard")
from recipes.openpilot.schema import log_schema  # noqa: E402


def event(time: int, **member) -> bytes:
    return log_schema().Event.new_message(logMonoTime=time, **member).to_bytes()


def speeds(count: int) -> list[bytes]:
    return [event(n * 10, carState={"vEgo": float(n)}) for n in range(count)]


def written(folder: Path, data: bytes, name: str = "rlog") -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def of_unknown_kind() -> bytes:
    """A message whose member of the union no schema has yet."""
    one, other = (bytearray(event(5, **{name: {}})) for name in ("carState", "carControl"))
    known = log_schema().Event.schema.fields
    differing = [
        place
        for place in range(0, 60, 2)
        if int.from_bytes(one[place : place + 2], "little")
        == known["carState"].proto.discriminantValue
        and int.from_bytes(other[place : place + 2], "little")
        == known["carControl"].proto.discriminantValue
    ]
    (place,) = differing
    one[place : place + 2] = (60_000).to_bytes(2, "little")
    return bytes(one)


def in_small_blocks(data: bytes) -> bytes:
    """bz2 gives nothing of a block that is not whole."""
    return bz2.compress(data, 1)


@pytest.mark.parametrize("log_format", ["zst", "bz2", "raw"])
def test_whole_logs_have_no_problems(tmp_path: Path, log_format):
    path = make_data.write_log(tmp_path, speeds(50), log_format)
    log = logs.read_log(path)
    assert log.tables["carState"]["v_ego"].tolist() == list(range(50))
    assert log.tables["carState"]["time"].tolist() == list(range(0, 500, 10))
    assert (log.problems, log.events) == (Counter(), {"carState": 50})


def test_messages_of_unknown_kinds_are_counted(tmp_path: Path):
    data = b"".join([*speeds(3), of_unknown_kind(), of_unknown_kind(), event(99, carState={})])
    log = logs.read_log(written(tmp_path, data))
    assert len(log.tables["carState"]) == 4
    assert log.problems == {"messages of a kind that the schema does not know": 2}


@pytest.mark.parametrize(
    ("compress", "message"),
    [
        (lambda data: zstandard.compress(data), "breaks off in the middle of its compression"),
        (in_small_blocks, "breaks off in the middle of its compression"),
        (bytes, "the log breaks off"),
    ],
)
def test_a_log_that_breaks_off_gives_what_comes_before(tmp_path: Path, compress, message: str):
    values = np.random.default_rng(0).uniform(0, 30, 20_000)
    data = b"".join(event(n, carState={"vEgo": v}) for n, v in enumerate(values.tolist()))
    whole = compress(data)
    log = logs.read_log(written(tmp_path, whole[: len(whole) * 2 // 3 - 3]))
    found = log.tables["carState"]["v_ego"]
    assert 1_000 < len(found) < 19_000
    np.testing.assert_allclose(found, values[: len(found)], rtol=1e-6)
    assert any(message in problem for problem in log.problems)


@pytest.mark.parametrize("compress", [lambda data: zstandard.compress(data), in_small_blocks])
def test_damage_in_the_middle_costs_what_follows_and_is_said(tmp_path: Path, compress):
    values = np.random.default_rng(0).uniform(0, 30, 40_000)
    data = b"".join(event(n, carState={"vEgo": v}) for n, v in enumerate(values.tolist()))
    whole = bytearray(compress(data))
    middle = len(whole) // 2
    whole[middle : middle + 64] = bytes(64)
    log = logs.read_log(written(tmp_path, bytes(whole)))
    found = log.tables["carState"]["v_ego"]
    assert 0 < len(found) < 40_000
    np.testing.assert_allclose(found[:1000], values[:1000], rtol=1e-6)
    assert any("damaged" in problem or "breaks off" in problem for problem in log.problems)


def test_streams_one_after_the_other_are_one_log(tmp_path: Path):
    """As a log that was appended to."""
    for compress in (zstandard.compress, bz2.compress):
        data = compress(b"".join(speeds(3))) + compress(b"".join(speeds(2)))
        log = logs.read_log(written(tmp_path, data))
        assert (len(log.tables["carState"]), log.problems) == (5, Counter())


def test_what_is_no_log_or_nothing_is_no_crash(tmp_path: Path):
    for data in (b"", b"\x00", b"no log at all, but some words", b"\x28\xb5\x2f\xfd"):
        log = logs.read_log(written(tmp_path, data))
        assert not log.events
        assert len(log.problems) == bool(data)


def test_numbers_that_are_none_are_left_out(tmp_path: Path):
    data = [
        event(1, liveCalibration={"rpyCalib": [0.1, 0.2]}),
        event(2, liveCalibration={"rpyCalib": [0.1, float("nan"), 0.2]}),
        event(3, liveCalibration={"rpyCalib": [0.1, 0.2, 0.3], "calStatus": "calibrated"}),
        event(4, cameraOdometry={"trans": [1.0], "rot": []}),
    ]
    log = logs.read_log(written(tmp_path, b"".join(data)))
    assert log.tables["liveCalibration"]["time"].tolist() == [3]
    assert log.problems["damaged liveCalibration (rpyCalib is not three numbers)"] == 2
    assert log.problems["damaged cameraOdometry (trans and rot are not six numbers)"] == 1


def test_a_car_that_does_not_say_its_delay_has_none(tmp_path: Path):
    log = logs.read_log(written(tmp_path, event(1, carParams={"steerActuatorDelay": 0.5})))
    assert (log.delays, log.problems) == ((0.5, 0.0), Counter())


def test_names_of_older_logs_are_known(tmp_path: Path):
    moving = {"value": [10.0, 1.0, 0.0], "valid": True}
    turning = {"value": [0.0, 0.0, 0.5], "valid": True}
    kalman = {"velocityDevice": moving, "angularVelocityDevice": turning}
    data = [
        event(1, liveLocationKalmanDEPRECATED=kalman),
        event(2, lateralPlanDEPRECATED={"desire": "laneChangeLeft"}),
        event(3, gpsLocation={"latitude": 1.0, "longitude": 2.0, "altitude": 3.0}),
    ]
    log = logs.read_log(written(tmp_path, b"".join(data)))
    assert log.tables["livePose"]["velocity"].tolist() == [[10.0, 1.0, 0.0]]
    assert log.tables["livePose"]["valid"].tolist() == [True]
    assert log.tables["lateralPlan"]["desire"].tolist() == [3]
    assert log.tables["gps"]["place"].tolist() == [[1.0, 2.0, 3.0]]


def test_openpilots_own_schema_is_used_where_it_is_installed(tmp_path: Path):
    """One that is ahead of the package's: liveDelay is known, and read."""
    own = Path(log_schema().__file__).parent
    (tmp_path / "cereal").mkdir()
    for path in own.rglob("*.capnp"):
        target = tmp_path / "cereal" / path.relative_to(own)
        target.parent.mkdir(exist_ok=True)
        text = path.read_text(encoding="utf-8")
        if path.name == "log.capnp":
            text = text.replace(
                "    onroadEventsDEPRECATED @68",
                "    liveDelay @146 :LiveDelayData;\n    onroadEventsDEPRECATED @68",
            )
            text += "\nstruct LiveDelayData {\n  lateralDelay @0 :Float32;\n}\n"
        target.write_text(text, encoding="utf-8")
    (tmp_path / "cereal" / "__init__.py").write_text(
        "import capnp, pathlib\nhere = pathlib.Path(__file__).parent\n"
        "names = ('log', 'car', 'custom')\n"
        "log, car, custom = (capnp.load(str(here / f'{n}.capnp')) for n in names)\n"
    )
    code = (
        "import pathlib, sys; from recipes.openpilot import logs, schema\n"
        "make = schema.log_schema().Event.new_message\n"
        "e = make(logMonoTime=3, liveDelay={'lateralDelay': .25})\n"
        "p = pathlib.Path(sys.argv[1]); p.write_bytes(e.to_bytes())\n"
        "print(logs.read_log(p).tables['liveDelay'].tolist())"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    command = [sys.executable, "-c", code, str(tmp_path / "rlog")]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[(3, 0.25)]"
    # Without it, the same message is of an unknown kind.
    log = logs.read_log(tmp_path / "rlog")
    assert log.problems == {"messages of a kind that the schema does not know": 1}


# Joining.


def index(time: int, frame_id: int, place: int, segment: int = 0, **more) -> bytes:
    values = {"frameId": frame_id, "segmentId": place, "segmentNum": segment, **more}
    return event(time, roadEncodeIdx=values)


def state(time: int, frame_id: int) -> bytes:
    times = {"timestampSof": frame_id * 50, "timestampEof": frame_id * 50 + 20}
    return event(time, roadCameraState={"frameId": frame_id, **times})


def test_times_of_frames_are_their_cameras_where_encoders_do_not_say(tmp_path: Path):
    data = [state(n, 10 + n) for n in range(4)] + [index(100 - n, 10 + n, n) for n in range(5)]
    log = logs.read_log(written(tmp_path, b"".join(data)))
    table = frame_table(log, "road")
    assert table.place.tolist() == [0, 1, 2, 3]
    assert table.eof.tolist() == [520, 570, 620, 670]
    # Frame 14 is in the file, but nobody says when it was.
    assert log.problems == {"frames of road without a time": 1}


def test_a_place_with_two_frames_is_none(tmp_path: Path):
    when = {"timestampSof": 5, "timestampEof": 6}
    data = [index(n, 10 + n, n, **when) for n in range(3)]
    data += [index(7, 11, 1, **when), index(8, 99, 2, **when)]
    log = logs.read_log(written(tmp_path, b"".join(data)))
    assert frame_table(log, "road").frame_id.tolist() == [10, 11]
    assert log.problems == {"places of road with several frames": 2}


def test_frames_whose_ids_go_back_are_none(tmp_path: Path):
    when = {"timestampSof": 5, "timestampEof": 6}
    data = [index(n, frame_id, n, **when) for n, frame_id in enumerate((10, 11, 3, 12))]
    log = logs.read_log(written(tmp_path, b"".join(data)))
    assert frame_table(log, "road").frame_id.tolist() == [10, 11, 12]
    assert log.problems == {"frames of road whose ids do not grow": 1}


def test_cameras_are_paired_by_when_frames_began(tmp_path: Path):
    def table(starts: list[int]):
        values = [{"timestampSof": s * 10**6, "timestampEof": s * 10**6 + 1} for s in starts]
        data = b"".join(index(n, n + 1, n, **value) for n, value in enumerate(values))
        return frame_table(logs.read_log(written(tmp_path, data)), "road")

    road = table([1000, 1050, 1100, 1150, 1200])
    assert together(road, table([1003, 1049, 1101, 1148, 1203])).tolist() == [0, 1, 2, 3, 4]
    assert together(road, table([1049, 1101, 1203])).tolist() == [-1, 0, 1, -1, 2]
    assert together(road, table([1100])).tolist() == [-1, -1, 0, -1, -1]
    assert together(road, table([])).tolist() == [-1] * 5


def test_runs_end_at_gaps():
    assert runs(np.array([4, 5, 6, 8, 9, 20])).tolist() == [0, 0, 0, 1, 1, 2]
    assert runs(np.zeros(0, np.int64)).tolist() == []
    table = np.array([(10,), (20,)], [("time", "i8")])
    assert latest(table, np.array([5, 10, 15, 99])).tolist() == [-1, 0, 0, 1]


# Finding segments.


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def test_segments_are_found_however_they_lie(tmp_path: Path):
    touch(
        tmp_path,
        "2024-01-02--03-04-05--10/rlog.zst",
        "2024-01-02--03-04-05--9/fcamera.hevc",
        "2024-01-02--03-04-05--9/rlog.bz2",
        "2024-01-02--03-04-05--9/rlog",
        "0000001a--0123456789/3/ecamera.hevc",
        "flat/a2a0ccea_2023-07-27--13-01-19--0--qcamera.ts",
        "2024-01-02--03-04-05--9/dcamera.hevc",
        "other/notes.txt",
    )
    found = segments.find_segments(tmp_path)
    assert [one.name for one in found] == [
        "0000001a--0123456789--3",
        "2024-01-02--03-04-05--9",
        "2024-01-02--03-04-05--10",
        "a2a0ccea_2023-07-27--13-01-19--0",
    ]
    assert found[1].log == tmp_path / "2024-01-02--03-04-05--9/rlog.bz2"
    assert found[0].log is None
    assert segments.following(found[1], found) == found[2]
    assert segments.following(found[2], found) is None


def test_a_folder_that_is_no_collection_of_routes_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="nowhere is no folder"):
        segments.find_segments(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"has no segment: expected files such as ROUTE--0"):
        segments.find_segments(touch(tmp_path, "a/rlog.zst"))
    touch(tmp_path, "x/abc--0/rlog", "y/abc--0/rlog")
    with pytest.raises(UsageError, match=r"abc--0 is there twice: .*x.abc--0.* and .*y.abc--0"):
        segments.find_segments(tmp_path)


def test_a_made_log_reads_back(marked_route: Path):
    (folder,) = marked_route.iterdir()
    log = logs.read_log(folder / "rlog.zst")
    assert (log.device, log.sensor) == ("mici", "os04c10")
    assert log.delays == pytest.approx((0.12, 0.15))
    assert len(log.tables["carState"]) == 200
    assert len(log.labels) == 40
    only = logs.read_log(folder / "rlog.zst", only=logs.POSES)
    assert len(only.tables["livePose"]) == 40
    assert not len(only.tables["carState"])
    assert len(routes.events_of(folder)) == sum(log.events.values())
