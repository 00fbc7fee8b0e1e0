"""Logs of any generation, as far as they can be read, as arrays for training.

Cap'n Proto only ever appends to a schema, so an old schema reads new logs except for messages that
it does not know, which are counted. A log that breaks off is read up to there.
"""

import bz2
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.openpilot.labels import model_labels
from recipes.openpilot.schema import capnp, log_schema, zstandard

Table = NDArray[np.void]  # structured: fields by name
_CHUNK = 1 << 16  # bytes unpacked at a time, and lost together if damaged

_FRAME = [("time", "i8"), ("frame_id", "i8"), ("sof", "i8"), ("eof", "i8")]
_INDEX = [*_FRAME, ("segment", "i8"), ("place", "i8"), ("size", "i8")]
_POSE = [("time", "i8"), ("velocity", "f8", 3), ("turning", "f8", 3), ("valid", "?")]
TABLES: dict[str, list[Any]] = {
    "roadCameraState": _FRAME,
    "wideRoadCameraState": _FRAME,
    "roadEncodeIdx": _INDEX,
    "wideRoadEncodeIdx": _INDEX,
    "qRoadEncodeIdx": _INDEX,
    "carState": [("time", "i8"), ("v_ego", "f8")],
    "liveCalibration": [("time", "i8"), ("rpy", "f8", 3), ("calibrated", "?")],
    "driverMonitoringState": [("time", "i8"), ("right_hand_drive", "?")],
    "liveDelay": [("time", "i8"), ("lateral", "f8")],
    "lateralPlan": [("time", "i8"), ("desire", "i8")],
    "livePose": _POSE,
    "cameraOdometry": [("time", "i8"), ("frame_id", "i8"), ("pose", "f8", 6)],
    "modelV2": [("time", "i8"), ("frame_id", "i8"), ("desire", "i8")],
    "gps": [("time", "i8"), ("place", "f8", 3)],
}
_LANE_CHANGES = {"left": 3, "right": 4}  # of cereal's Desire
_CHANGING = ("laneChangeStarting", "laneChangeFinishing")


@dataclass
class Log:
    """The contents of one or several logs.

    Attributes:
        tables: Tables by name as in `TABLES`, each in the order of its times.
        labels: Labels by frame id from the model that drove (`labels.model_labels`).
        device: Device as initData or deviceState names it.
        sensor: Sensor as roadCameraState names it.
        delays: Delays of steering and acceleration in s, from carParams; None if it has none.
        private: VIN and dongle id.
        events: Number of events that were read, by kind.
        problems: Number of problems, by description.
    """

    tables: dict[str, Table]
    labels: dict[int, dict[str, NDArray[np.float32]]] = field(default_factory=dict)
    device: str = "unknown"
    sensor: str = "unknown"
    delays: tuple[float, float] | None = None
    private: dict[str, str] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)


def read_log(path: Path, *, only: frozenset[str] | None = None) -> Log:
    """Read one log.

    Args:
        path: File rlog.zst, rlog.bz2 or rlog, recognised by its contents.
        only: Names of the events that are needed. The others are skipped.

    Raises:
        OSError: The file cannot be read at all.
        MissingExtraError: openpilot-logging, pycapnp or zstandard is not installed.
    """
    reading = _Reading(only)
    for event in _events(unpack_log(path.read_bytes(), reading.problems), reading.problems):
        reading.take(event)
    return reading.finish()


def unpack_log(data: bytes, problems: Counter[str]) -> bytes:
    """Decompress the messages of a log file, as far as possible.

    Args:
        data: Contents of the file.
        problems: Problems are added to it.
    """
    if data.startswith(b"BZh"):
        return _unpacked(data, bz2.BZ2Decompressor, OSError, problems)
    if data.startswith(b"\x28\xb5\x2f\xfd"):
        zstd = zstandard()
        return _unpacked(data, zstd.ZstdDecompressor().decompressobj, zstd.ZstdError, problems)
    return data


def _unpacked(
    data: bytes,
    make: Callable[[], Any],
    error: type[Exception],
    problems: Counter[str],
) -> bytes:
    """Decompress in pieces, so that data before damage are kept. Streams may follow each other."""
    unpacked, stream = [], make()
    for start in range(0, len(data), _CHUNK):
        rest = data[start : start + _CHUNK]
        while rest:
            if stream.eof:
                stream = make()
            try:
                unpacked.append(stream.decompress(rest))
            except error as reason:
                problems[f"the log's compression is damaged ({reason})"] += 1
                return b"".join(unpacked)
            rest = stream.unused_data if stream.eof else b""
    if not stream.eof:
        problems["the log breaks off in the middle of its compression"] += 1
    return b"".join(unpacked)


def _events(data: bytes, problems: Counter[str]) -> Iterator[Any]:
    try:
        yield from log_schema().Event.read_multiple_bytes(data)
    except capnp().KjException as error:
        problems[f"the log breaks off ({_first_line(error)})"] += 1


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rpartition(": ")[2]


class _Reading:
    """The rows of tables while a log is read."""

    def __init__(self, only: frozenset[str] | None) -> None:
        self.rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in TABLES}
        self.log = Log({})
        self.problems = self.log.problems
        self._only = only
        self._broken = capnp().KjException

    def take(self, event: Any) -> None:
        """Add an event, or count the reason why it cannot be."""
        try:
            name = str(event.which())
        except self._broken:
            # A union member that the schema does not have.
            self.problems["messages of a kind that the schema does not know"] += 1
            return
        self.log.events[name] += 1
        take = _TAKE.get(name)
        if take is None or (self._only is not None and name not in self._only):
            return
        try:
            take(self, event.logMonoTime, getattr(event, name))
        except (self._broken, ValueError, AttributeError) as error:
            # This also catches fields that another schema, such as an installed openpilot's, has
            # removed.
            self.problems[f"damaged {name} ({_first_line(error)})"] += 1

    def finish(self) -> Log:
        """Return the log, with each table sorted by time."""
        for name, rows in self.rows.items():
            table = np.array(rows, TABLES[name])
            self.log.tables[name] = table[np.argsort(table["time"], kind="stable")]
        return self.log


def _init(reading: _Reading, time: int, message: Any) -> None:
    del time
    reading.log.private["dongle_id"] = message.dongleId
    _device(reading, 0, message)


def _device(reading: _Reading, time: int, message: Any) -> None:
    del time
    if reading.log.device == "unknown":
        reading.log.device = str(message.deviceType)


def _car(reading: _Reading, time: int, message: Any) -> None:
    del time
    reading.log.delays = (message.steerActuatorDelay, message.longitudinalActuatorDelay)
    reading.log.private["vin"] = message.carVin


def _camera(table: str) -> Callable[[_Reading, int, Any], None]:
    def take(reading: _Reading, time: int, message: Any) -> None:
        row = (time, message.frameId, message.timestampSof, message.timestampEof)
        reading.rows[table].append(row)
        if table == "roadCameraState" and reading.log.sensor == "unknown":
            reading.log.sensor = str(message.sensor)

    return take


def _encode_index(table: str) -> Callable[[_Reading, int, Any], None]:
    def take(reading: _Reading, time: int, message: Any) -> None:
        times = (message.timestampSof, message.timestampEof)
        place = (message.segmentNum, message.segmentId, message.len)
        reading.rows[table].append((time, message.frameId, *times, *place))

    return take


def _calibration(reading: _Reading, time: int, message: Any) -> None:
    rpy = list(message.rpyCalib)
    if len(rpy) != 3 or not np.isfinite(rpy).all():
        raise ValueError("rpyCalib is not three numbers")
    calibrated = str(message.calStatus) == "calibrated"
    reading.rows["liveCalibration"].append((time, rpy, calibrated))


def _live_pose(reading: _Reading, time: int, message: Any) -> None:
    moving, turning = message.velocityDevice, message.angularVelocityDevice
    valid = moving.valid and turning.valid
    row = (time, (moving.x, moving.y, moving.z), (turning.x, turning.y, turning.z), valid)
    reading.rows["livePose"].append(row)


def _kalman(reading: _Reading, time: int, message: Any) -> None:
    """Add a row of what was livePose until 2024."""
    moving, turning = message.velocityDevice, message.angularVelocityDevice
    valid = moving.valid and turning.valid
    row = (time, tuple(moving.value), tuple(turning.value), valid)
    if not len(row[1]) == len(row[2]) == 3:
        raise ValueError("a velocity is not three numbers")
    reading.rows["livePose"].append(row)


def _odometry(reading: _Reading, time: int, message: Any) -> None:
    pose = [*message.trans, *message.rot]
    if len(pose) != 6:
        raise ValueError("trans and rot are not six numbers")
    reading.rows["cameraOdometry"].append((time, message.frameId, pose))


def _model(reading: _Reading, time: int, message: Any) -> None:
    meta = message.meta
    changing = str(meta.laneChangeState) in _CHANGING
    desire = _LANE_CHANGES.get(str(meta.laneChangeDirection), 0) if changing else 0
    reading.rows["modelV2"].append((time, message.frameId, desire))
    reading.log.labels[message.frameId] = model_labels(message, reading.problems)


def _values(table: str, *names: str) -> Callable[[_Reading, int, Any], None]:
    def take(reading: _Reading, time: int, message: Any) -> None:
        reading.rows[table].append((time, *(getattr(message, name) for name in names)))

    return take


def _lateral_plan(reading: _Reading, time: int, message: Any) -> None:
    """Add a row of desires, which were logged here until modelV2 had the state of lane changes."""
    reading.rows["lateralPlan"].append((time, message.desire.raw))


def _gps(reading: _Reading, time: int, message: Any) -> None:
    place = (message.latitude, message.longitude, message.altitude)
    reading.rows["gps"].append((time, place))


_TAKE: dict[str, Callable[[_Reading, int, Any], None]] = {
    "initData": _init,
    "deviceState": _device,
    "carParams": _car,
    **{name: _camera(name) for name in ("roadCameraState", "wideRoadCameraState")},
    **{
        name: _encode_index(name)
        for name in ("roadEncodeIdx", "wideRoadEncodeIdx", "qRoadEncodeIdx")
    },
    "carState": _values("carState", "vEgo"),
    "liveCalibration": _calibration,
    "driverMonitoringState": _values("driverMonitoringState", "isRHD"),
    "liveDelay": _values("liveDelay", "lateralDelay"),
    "lateralPlan": _lateral_plan,
    "lateralPlanDEPRECATED": _lateral_plan,
    "livePose": _live_pose,
    "liveLocationKalman": _kalman,
    "liveLocationKalmanDEPRECATED": _kalman,
    "cameraOdometry": _odometry,
    "modelV2": _model,
    "gpsLocation": _gps,
    "gpsLocationExternal": _gps,
}
POSES = frozenset({"livePose", "liveLocationKalman", "liveLocationKalmanDEPRECATED"})
