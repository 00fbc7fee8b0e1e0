"""The events that a car logs while it drives: messages of the real schema for a `scene.Drive`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from recipes.openpilot.constants import (
    CALIBRATION_FREQ,
    CAR_STATE_FREQ,
    DT_MDL,
    LEAD_T_IDXS,
    LEAD_T_OFFSETS,
    T_IDXS,
    X_IDXS,
)
from recipes.openpilot.geometry import rotation_from_euler
from recipes.openpilot.scene import Drive
from recipes.openpilot.schema import log_schema

_SECOND = 1_000_000_000  # ns
_READOUT = 20_000_000  # ns between the start and the end of a frame
_GPS_FREQ, _DEVICE_FREQ, _MONITORING_FREQ = 10, 2, 20
VIN = "1HGCM82633A004352"  # an example, of no real car
LATERAL_DELAY, LONGITUDINAL_DELAY = 0.12, 0.15  # s


@dataclass(frozen=True)
class Encoded:
    """A frame in a video file.

    Attributes:
        frame: Number of the frame in the drive.
        place: Position in the file, from 0.
        size: Size in bytes.
    """

    frame: int
    place: int
    size: int


@dataclass(frozen=True)
class Recording:
    """The settings with which a drive is logged.

    Attributes:
        drive: The drive.
        device: Device as initData names it.
        sensor: Sensor as roadCameraState names it.
        rpy_calib: Mounting angles in rad.
        segment: Number of the segment in the route.
        frames: Numbers of the frames in the segment.
        first_frame_id: Id of frame 0.
        start: Start of frame 0, in ns.
        right_hand_drive: Whether the driver's camera found right-hand drive.
    """

    drive: Drive
    device: str
    sensor: str
    rpy_calib: tuple[float, float, float]
    segment: int
    frames: range
    first_frame_id: int
    start: int
    right_hand_drive: bool = False

    def sof(self, frame: int) -> int:
        """Return the time in ns at which a frame begins."""
        return self.start + frame * int(DT_MDL * _SECOND)

    def eof(self, frame: int) -> int:
        """Return the time in ns at which a frame ends, which is the time that its picture shows."""
        return self.sof(frame) + _READOUT

    def seconds(self, mono_time: int) -> float:
        """Return the drive's time in seconds."""
        return (mono_time - self.start - _READOUT) / _SECOND

    def ticks(self, frequency: int) -> Iterator[int]:
        """Yield the times in ns of events at a frequency in the segment, with their own phase."""
        step = _SECOND // frequency
        first = self.sof(self.frames.start) + (frequency * 7919) % step // 2
        yield from range(first, self.sof(self.frames.stop), step)


def make_events(recording: Recording, encoded: dict[str, list[Encoded]]) -> list[bytes]:
    """Return a segment's log as serialised events in the order of their times.

    Args:
        recording: The settings of the log.
        encoded: The frames that were written, by camera: "road", "wideRoad" and "qRoad".
    """
    made = [*_beginning(recording), *_states(recording)]
    for frame in recording.frames:
        made += [*_camera_states(recording, frame, "wideRoad" in encoded)]
        made += _model(recording, frame)
    for camera, frames in encoded.items():
        made += [_encode_index(recording, camera, one) for one in frames]
    made.sort(key=lambda event: event.logMonoTime)
    return [event.to_bytes() for event in made]


def _event(mono_time: int, **member: dict[str, Any]) -> Any:
    return log_schema().Event.new_message(logMonoTime=mono_time, valid=True, **member)


def _beginning(recording: Recording) -> Iterator[Any]:
    time = recording.sof(recording.frames.start) - 1000
    yield _event(
        time,
        initData={
            "deviceType": recording.device,
            "version": "0.10.3",
            "dongleId": "0123456789abcdef",
            "gitBranch": "release-tizi",
        },
    )
    first = "startOfRoute" if recording.segment == 0 else "startOfSegment"
    yield _event(time + 1, sentinel={"type": first})
    yield _event(
        time + 2,
        carParams={
            "carFingerprint": "SYNTHETIC ROAD",
            "carVin": VIN,
            "steerActuatorDelay": LATERAL_DELAY,
            "longitudinalActuatorDelay": LONGITUDINAL_DELAY,
        },
    )


def _states(recording: Recording) -> Iterator[Any]:
    drive, device_from_calib = recording.drive, rotation_from_euler(recording.rpy_calib)
    for time in recording.ticks(CAR_STATE_FREQ):
        yield _event(time, carState={"vEgo": float(drive.speed_at(recording.seconds(time)))})
    for time in recording.ticks(CALIBRATION_FREQ):
        yield _event(
            time,
            liveCalibration={
                "calStatus": "calibrated",
                "calPerc": 100,
                "rpyCalib": list(recording.rpy_calib),
                "height": [drive.options.height],
            },
        )
    for time in recording.ticks(_MONITORING_FREQ):
        yield _event(time, driverMonitoringState={"isRHD": recording.right_hand_drive})
    for time in recording.ticks(_DEVICE_FREQ):
        yield _event(time, deviceState={"deviceType": recording.device, "started": True})
    for time in recording.ticks(_GPS_FREQ):
        yield _event(
            time, gpsLocationExternal={"latitude": 48.1, "longitude": 11.6, "hasFix": True}
        )
    for frame in recording.frames:
        time = recording.eof(frame)
        now = recording.seconds(time)
        moving = device_from_calib @ (float(drive.speed_at(now)), 0, 0)
        turning = device_from_calib @ (0, 0, float(drive.at("turning", now)))
        yield _event(
            time,
            livePose={
                "velocityDevice": _measured(moving),
                "angularVelocityDevice": _measured(turning),
                "inputsOK": True,
                "posenetOK": True,
                "sensorsOK": True,
            },
        )


def _measured(values: np.ndarray) -> dict[str, Any]:
    return {"valid": True, **dict(zip("xyz", values.tolist(), strict=True))}


def _camera_states(recording: Recording, frame: int, wide: bool) -> Iterator[Any]:
    state = {
        "frameId": recording.first_frame_id + frame,
        "timestampSof": recording.sof(frame),
        "timestampEof": recording.eof(frame),
        "sensor": recording.sensor,
    }
    time = recording.eof(frame) + 2_000_000
    yield _event(time, roadCameraState=state)
    if wide:
        yield _event(time + 1000, wideRoadCameraState=state)


def _encode_index(recording: Recording, camera: str, one: Encoded) -> Any:
    index = {
        "frameId": recording.first_frame_id + one.frame,
        "type": "qcameraH264" if camera == "qRoad" else "fullHEVC",
        "encodeId": one.frame,
        "segmentNum": recording.segment,
        "segmentId": one.place,
        "segmentIdEncode": one.place,
        "timestampSof": recording.sof(one.frame),
        "timestampEof": recording.eof(one.frame),
        "len": one.size,
    }
    member: dict[str, Any] = {f"{camera}EncodeIdx": index}
    return _event(recording.eof(one.frame) + 60_000_000, **member)


def _model(recording: Recording, frame: int) -> list[Any]:
    """Return modelV2 and cameraOdometry events with the truth, as from a perfect model."""
    time = recording.seconds(recording.eof(frame))
    labels = {name: value.tolist() for name, value in recording.drive.labels(time).items()}
    plan = np.array(labels["plan"]).T.tolist()
    names = ("position", "velocity", "acceleration", "orientation", "orientationRate")
    paths = {
        name: {"t": list(T_IDXS), **dict(zip("xyz", plan[3 * n : 3 * n + 3], strict=True))}
        for n, name in enumerate(names)
    }
    changing = recording.drive.desire(time)
    model = {
        "frameId": recording.first_frame_id + frame,
        "frameIdExtra": recording.first_frame_id + frame,
        "timestampEof": recording.eof(frame),
        **paths,
        "laneLines": [_line(line) for line in labels["lane_lines"]],
        "laneLineProbs": labels["lane_lines_prob"],
        "laneLineStds": [0.1] * 4,
        "roadEdges": [_line(line) for line in labels["road_edges"]],
        "roadEdgeStds": [0.1] * 2,
        "leadsV3": [
            {
                "prob": probability,
                "probTime": offset,
                "t": list(LEAD_T_IDXS),
                **dict(zip("xyva", np.array(lead).T.tolist(), strict=True)),
            }
            for lead, probability, offset in zip(
                labels["lead"], labels["lead_prob"], LEAD_T_OFFSETS, strict=True
            )
        ],
        "meta": {
            "desireState": labels["desire_state"],
            "laneChangeState": "laneChangeStarting" if changing else "off",
            "laneChangeDirection": {0: "none", 3: "left", 4: "right"}[changing],
        },
    }
    odometry = {
        "frameId": recording.first_frame_id + frame,
        "timestampEof": recording.eof(frame),
        "trans": labels["pose"][:3],
        "rot": labels["pose"][3:],
    }
    said = recording.eof(frame) + 35_000_000
    return [_event(said, modelV2=model), _event(said + 1000, cameraOdometry=odometry)]


def _line(line: list[list[float]]) -> dict[str, Any]:
    right, down = np.array(line).T.tolist()
    return {"x": list(X_IDXS), "y": right, "z": down}
