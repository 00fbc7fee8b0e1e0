"""Training sets of damaged, partial and private routes; in parallel, again, and on full disks."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recipes.openpilot import events, frames, make_data, shards
from recipes.openpilot import prepare as preparing
from recipes.openpilot.prepare import PrepareOptions, prepare, summary
from tests.full_disk import full_after
from tests.recipes.killing import kill_when
from tests.recipes.openpilot import routes
from tpuport.foundation.errors import CheckpointError, UsageError

pytest.importorskip("openpilot_logging")
pytest.importorskip("av")
ALONE = PrepareOptions(num_processes=0, num_threads=1)


def prepared(segment: Path, options: PrepareOptions = ALONE) -> tuple[shards.Arrays, dict]:
    """Arrays and record of the only segment."""
    out = segment.parent.parent / "set"
    (record,) = prepare(segment.parent, out, options).values()
    return shards.read_shard(out / record["file"]), record


def cut(path: Path, share: float) -> None:
    """Keep the beginning of a file."""
    os.truncate(path, int(path.stat().st_size * share))


# Videos.


@pytest.mark.parametrize("share", [0.3, 0.61, 0.95])
def test_a_video_that_breaks_off_keeps_what_is_whole(segment: Path, share: float):
    sizes = [
        event.roadEncodeIdx.len
        for event in routes.events_of(segment)
        if event.which() == "roadEncodeIdx"
    ]
    whole = int((np.cumsum(sizes) <= sum(sizes) * share).sum())
    cut(segment / "fcamera.hevc", share)
    arrays, record = prepared(segment)
    routes.check_alignment(arrays)
    assert record["frames"] == whole
    assert record["skipped"] == {"fcamera.hevc: breaks off before them": len(sizes) - whole}


@pytest.mark.parametrize("start_code", [True, False])
def test_damage_in_a_video_costs_frames_up_to_the_next_key_frame(segment: Path, start_code: bool):
    """Where the start of a frame is lost too, a file has one frame less, and all would shift."""
    path = segment / "fcamera.hevc"
    data = bytearray(path.read_bytes())
    sizes = [e.roadEncodeIdx.len for e in routes.events_of(segment) if e.which() == "roadEncodeIdx"]
    start, end = np.cumsum(sizes)[9:11].tolist()
    start += 8 if start_code else 0
    data[start:end] = bytes([0xFF]) * (end - start)
    path.write_bytes(bytes(data))
    arrays, record = prepared(segment)
    routes.check_alignment(arrays)
    # Ten frames before, the last of which has swallowed the next where its start is lost; then what
    # follows the key frame, at place 20: frame 23.
    ids = [37, 38, 39, 40, 41, 44, 45, 46, 47, 48][: 10 if start_code else 9]
    assert arrays["frame_id"].tolist() == ids + list(range(37 + 23, 37 + 40))
    assert set(record["skipped"]) == {"fcamera.hevc: damaged"}
    assert record["skipped"]["fcamera.hevc: damaged"] == 37 - len(arrays["frame_id"])


def test_a_video_that_lost_a_piece_is_not_shifted(segment: Path):
    path = segment / "fcamera.hevc"
    data = path.read_bytes()
    sizes = [e.roadEncodeIdx.len for e in routes.events_of(segment) if e.which() == "roadEncodeIdx"]
    ends = np.cumsum(sizes).tolist()
    path.write_bytes(data[: ends[4]] + data[ends[7] :])  # three frames, with all that is theirs
    arrays, record = prepared(segment)
    routes.check_alignment(arrays)
    assert arrays["frame_id"].tolist() == [*range(37, 42), *range(37 + 23, 37 + 40)]
    assert record["skipped"] == {"fcamera.hevc: damaged": 15}


def test_a_log_without_sizes_is_joined_by_places_alone(segment: Path):
    def unsized(found: list) -> list:
        for event in found:
            if event.which().endswith("EncodeIdx"):
                getattr(event, event.which()).len = 0
        return found

    routes.rewrite(segment, unsized)
    arrays, record = prepared(segment)
    routes.check_alignment(arrays)
    assert (record["frames"], record["skipped"], record["problems"]) == (37, {}, {})


def test_sizes_that_fit_nothing_are_not_believed(segment: Path):
    def other(found: list) -> list:
        for event in found:
            if event.which() == "roadEncodeIdx":
                event.roadEncodeIdx.len += 5000
        return found

    routes.rewrite(segment, other)
    arrays, record = prepared(segment)
    routes.check_alignment(arrays)
    assert record["frames"] == 37
    assert record["problems"] == {"sizes in the log are not those of fcamera.hevc": 1}


def test_without_the_wide_camera_both_pictures_are_of_the_other(segment: Path):
    (segment / "ecamera.hevc").unlink()
    arrays, record = prepared(segment)
    routes.check_alignment(arrays)
    assert record["camera"] == "mici os04c10 fcamera"
    assert "no ecamera.hevc: big_img is of the road camera" in record["notes"]
    # Seen twice as wide: what is in the middle of one is in half of the other, around the horizon.
    y = frames.unpack(arrays["big_img"])[0][0].astype(float)
    near = frames.unpack(arrays["img"])[0][0].astype(float)
    small = near[0:248:2, 0::2]
    there = y[128 : 128 + 124, 128:384]
    assert np.corrcoef(small.ravel(), there.ravel())[0, 1] > 0.97


def test_with_the_wide_camera_alone_both_pictures_are_of_it(segment: Path):
    (segment / "fcamera.hevc").unlink()
    arrays, record = prepared(segment)
    routes.check_alignment(arrays)
    assert "no fcamera.hevc: img is of the wide camera" in record["notes"]


def test_a_wide_video_that_breaks_off_costs_the_frames_without_it(segment: Path):
    cut(segment / "ecamera.hevc", 0.5)
    arrays, record = prepared(segment)
    routes.check_alignment(arrays)
    assert 10 < record["frames"] < 30
    missing = record["skipped"]["without a picture of the wide camera"]
    assert missing + record["frames"] == 37


def test_only_small_videos_are_used_and_that_is_said(tmp_path: Path):
    options = replace(routes.OPTIONS, full_video=False, qcamera=True)
    (segment,) = make_data.make_route(tmp_path / "routes", options)
    arrays, record = prepared(segment)
    routes.check_alignment(arrays)
    assert record["camera"] == "mici os04c10 qcamera"
    assert record["frames"] == 37
    assert "only qcamera.ts: small pictures, and big_img is of the road camera" in record["notes"]


@pytest.mark.parametrize("data", [b"", b"no video at all", bytes(5000)])
def test_what_is_no_video_is_reported(segment: Path, data: bytes):
    (segment / "fcamera.hevc").write_bytes(data)
    (record,) = prepare(segment.parent, segment.parent.parent / "set", ALONE).values()
    assert record["frames"] == 0
    assert record["skipped"]["fcamera.hevc: breaks off before them"] == 37
    assert "file" not in record


# Logs.


def test_a_damaged_log_gives_the_frames_that_it_still_knows(segment: Path):
    path = segment / "rlog.zst"
    cut(path, 0.7)
    arrays, record = prepared(segment)
    routes.check_alignment(arrays)
    assert 10 < record["frames"] < 37
    assert record["problems"]["the log breaks off in the middle of its compression"] == 1
    assert record["skipped"]["fcamera.hevc: not in the log"] > 0


def without(*names: str):
    def change(found: list) -> list:
        return [event for event in found if event.which() not in names]

    return change


@pytest.mark.parametrize(
    ("names", "part", "reason"),
    [
        (("liveCalibration",), "skipped", "without liveCalibration"),
        (("carState",), "skipped", "without carState"),
        (("roadEncodeIdx",), "problems", "the log has no index of fcamera.hevc"),
        (
            ("initData", "deviceState"),
            "problems",
            "no camera is known of device unknown with sensor os04c10",
        ),
    ],
)
def test_what_cannot_be_known_without_an_event_is_not_guessed(
    segment: Path, names: tuple[str, ...], part: str, reason: str
):
    routes.rewrite(segment, without(*names))
    (record,) = prepare(segment.parent, segment.parent.parent / "set", ALONE).values()
    assert record["frames"] == 0
    assert reason in record[part]


def test_what_is_assumed_is_said(segment: Path):
    routes.rewrite(segment, without("driverMonitoringState", "carParams", "modelV2"))
    arrays, record = prepared(segment)
    assert record["frames"] == 37
    assert "without driverMonitoringState: traffic on the right is assumed" in record["notes"]
    assert "without carParams: delays of 0.1 s and 0.15 s are assumed" in record["notes"]
    # What is left of labels is cameraOdometry's.
    assert record["labelled"] == {"pose": 37}
    assert "plan" not in arrays


def test_speeds_that_are_too_old_are_none(segment: Path):
    def stopped(found: list) -> list:
        last = 100_000_000_000 + 10 * 50_000_000
        return [e for e in found if e.which() != "carState" or e.logMonoTime < last]

    routes.rewrite(segment, stopped)
    arrays, record = prepared(segment)
    routes.check_alignment(arrays)
    # Half a second after the last one.
    assert arrays["frame_id"].max() == 37 + 19
    assert record["skipped"] == {"without carState": 19}


def test_a_segment_without_a_log_is_reported(segment: Path):
    (segment / "rlog.zst").unlink()
    (record,) = prepare(segment.parent, segment.parent.parent / "set", ALONE).values()
    assert record["problems"] == {"no rlog": 1}


# Privacy.


def test_who_and_where_are_left_out_unless_asked_for(segment: Path):
    arrays, record = prepared(segment)
    out = segment.parent.parent / "set"
    files = b"".join(path.read_bytes() for path in out.iterdir())
    for private in (events.VIN.encode(), b"0123456789abcdef", b"gps"):
        assert private not in files
    arrays, record = prepared(segment, replace(ALONE, keep_private=True))
    said = shards.shard_metadata(out / record["file"])
    assert (said["vin"], said["dongle_id"]) == (events.VIN, "0123456789abcdef")
    np.testing.assert_allclose(arrays["gps"], [[48.1, 11.6, 0.0]] * 37)


# Again, in parallel, and not to the end.


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two routes of two segments."""
    root = tmp_path_factory.mktemp("several")
    for name in ("00000001--aaaaaaaaaa", "00000002--bbbbbbbbbb"):
        options = replace(
            routes.OPTIONS, name=name, segments=2, seconds=0.5, full_video=False, qcamera=True
        )
        make_data.make_route(root, options)
    return root


def test_segments_are_made_side_by_side_as_one_by_one(several: Path, tmp_path: Path):
    seen: list[str] = []
    options = PrepareOptions(num_processes=2, num_threads=3, batch_size=4)
    made = prepare(several, tmp_path / "a", options, on_segment=lambda name, _: seen.append(name))
    assert sorted(seen) == list(made)
    assert summary(made.values())["frames"] == 36
    assert shards.read_index(tmp_path / "a") == made
    prepare(several, tmp_path / "b", ALONE)
    for path in shards.find_shards(tmp_path / "a"):
        one, other = shards.read_shard(path), shards.read_shard(tmp_path / "b" / path.name)
        assert one.keys() == other.keys()
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name], err_msg=name)


def test_what_is_finished_is_kept_and_what_changed_is_made_again(
    several: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    root = Path(shutil.copytree(several, tmp_path / "routes"))
    prepare(root, tmp_path / "set", ALONE)
    made: list[str] = []
    read = preparing._read
    monkeypatch.setattr(
        preparing, "_read", lambda path, after: made.append(path.parent.name) or read(path, after)
    )
    prepare(root, tmp_path / "set", ALONE)
    assert made == []
    routes.rewrite(root / "00000001--aaaaaaaaaa--1", without("modelV2"))
    (tmp_path / "set" / "00000002--bbbbbbbbbb--0.safetensors").unlink()
    prepare(root, tmp_path / "set", ALONE)
    assert made == ["00000001--aaaaaaaaaa--1", "00000002--bbbbbbbbbb--0"]
    # Without an index, the files themselves say what they are.
    (tmp_path / "set" / shards.INDEX).unlink()
    records = prepare(root, tmp_path / "set", ALONE)
    assert len(made) == 2
    assert shards.read_index(tmp_path / "set") == records
    # Other options are another set.
    prepare(root, tmp_path / "set", replace(ALONE, sampling="nearest"))
    assert len(made) == 6


def test_a_full_disk_is_said_and_loses_nothing_that_is_finished(several: Path, tmp_path: Path):
    out, root = tmp_path / "set", tmp_path / "routes"
    shutil.copytree(several / "00000001--aaaaaaaaaa--0", root / "00000001--aaaaaaaaaa--0")
    first = prepare(root, out, ALONE)
    kept = {path.name: path.read_bytes() for path in out.iterdir()}
    shutil.copytree(several, root, dirs_exist_ok=True)
    with (
        full_after(1_000_000),
        pytest.raises(CheckpointError, match=r"was not saved: the disk is full.*nothing was left"),
    ):
        prepare(root, out, ALONE)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == kept
    made = prepare(root, out, ALONE)
    assert summary(made.values())["frames"] == 36
    assert made["00000001--aaaaaaaaaa--0"] == first["00000001--aaaaaaaaaa--0"]


def test_a_run_that_is_killed_goes_on(several: Path, tmp_path: Path):
    out = tmp_path / "set"
    code = (
        "import sys; from recipes.openpilot.prepare import prepare, PrepareOptions\n"
        "prepare(*sys.argv[1:], PrepareOptions(num_processes=0, num_threads=1))"
    )
    kill_when(lambda: (out / shards.INDEX).is_file(), "-c", code, str(several), str(out))
    finished = {path: path.stat().st_mtime_ns for path in shards.find_shards(out)}
    made = prepare(several, out, ALONE)
    assert summary(made.values())["frames"] == 36
    assert 0 < len(finished) < 4
    for path, when in finished.items():
        assert path.stat().st_mtime_ns == when


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": "teacher"}, "labels: expected one of modelV2, pose, got 'teacher'"),
        ({"sampling": "cubic"}, "sampling: expected one of bilinear, nearest, got 'cubic'"),
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, options: dict, message: str):
    with pytest.raises(UsageError, match=message):
        prepare(tmp_path, tmp_path / "set", PrepareOptions(**options))


# The files.


def test_files_that_are_no_segments_are_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="has no segment of a training set"):
        shards.find_shards(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"none")
    with pytest.raises(CheckpointError, match=r"a.safetensors cannot be read: .*make it again"):
        shards.read_shard(tmp_path / "a.safetensors")
    (tmp_path / shards.INDEX).write_text(json.dumps({"other": 1}))
    with pytest.raises(CheckpointError, match=r"is no index of segments: KeyError"):
        shards.read_index(tmp_path)
    import tpuport

    tpuport.save_checkpoint(tmp_path / "b.safetensors", {"x": np.zeros(2)})
    with pytest.raises(CheckpointError, match=r"is of format 'pt', expected 'openpilot-frames-1'"):
        shards.shard_metadata(tmp_path / "b.safetensors")


def test_arrays_that_do_not_fit_are_not_written(tmp_path: Path):
    whole = {n: np.zeros((2, *shape), dtype) for n, (dtype, shape) in shards.FRAME_ARRAYS.items()}
    path = tmp_path / "a.safetensors"
    for change, message in (
        ({"v_ego": np.zeros(2)}, r"v_ego: expected float32 \(2,\), got float64 \(2,\)"),
        ({"v_ego": np.zeros(3, np.float32)}, r"expected float32 \(2,\), got float32 \(3,\)"),
        ({"other": np.zeros(2)}, "not known: other"),
        ({"plan": np.zeros((2, 33, 15), np.float32)}, "without its values or its _valid: plan"),
    ):
        with pytest.raises(UsageError, match=message):
            shards.write_shard(path, {**whole, **change}, {})
    with pytest.raises(UsageError, match="without img, big_img"):
        shards.write_shard(path, {n: whole[n] for n in list(whole)[2:]}, {})
    assert not path.exists()
    shards.write_shard(path, whole, {"camera": "x"})
    assert shards.read_shard(path, ["run", "plan"]).keys() == {"run"}
    assert shards.shard_metadata(path)["camera"] == "x"
