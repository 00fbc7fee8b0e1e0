"""Constants that all driving models share: times and distances of outputs, cameras, frames.

Constants that differ between generations of models are read from their files (`contract.py`).
Sources in commaai/openpilot: selfdrive/modeld/constants.py, cereal/log.capnp,
common/transformations/camera.py and model.py.
"""

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

IDX_N = 33
T_IDXS = tuple(10.0 * (i / (IDX_N - 1)) ** 2 for i in range(IDX_N))  # s
X_IDXS = tuple(192.0 * (i / (IDX_N - 1)) ** 2 for i in range(IDX_N))  # m
LEAD_T_IDXS = (0.0, 2.0, 4.0, 6.0, 8.0, 10.0)  # s
LEAD_T_OFFSETS = (0.0, 2.0, 4.0)  # s, of the three leads
META_T_IDXS = (2.0, 4.0, 6.0, 8.0, 10.0)  # s
NUM_LANE_LINES, NUM_ROAD_EDGES, NUM_LEADS = 4, 2, 3

# Columns of the plan, (33, 15), in the calibrated frame: x forward, y right, z down.
PLAN_WIDTH = 15
POSITION, VELOCITY, ACCELERATION = slice(0, 3), slice(3, 6), slice(6, 9)
T_FROM_CURRENT_EULER, ORIENTATION_RATE = slice(9, 12), slice(12, 15)
LEAD_WIDTH = 4  # x, y, v, a
POSE_WIDTH = 6  # m/s, then rad/s

DESIRES = (
    "none",
    "turnLeft",
    "turnRight",
    "laneChangeLeft",
    "laneChangeRight",
    "keepLeft",
    "keepRight",
)
DESIRE_LEN = 8  # one more than there are
DESIRE_PRED_LEN = 4
TRAFFIC_CONVENTION_LEN = 2

MODEL_RUN_FREQ = 20  # Hz; so do cameras
MODEL_CONTEXT_FREQ = 5  # Hz, of queues of features and desires
TEMPORAL_SKIP = MODEL_RUN_FREQ // MODEL_CONTEXT_FREQ  # frames between the two of one input
DT_MDL = 1 / MODEL_RUN_FREQ  # s
CAR_STATE_FREQ, CALIBRATION_FREQ = 100, 4  # Hz
SEGMENT_SECONDS = 60

MODEL_WIDTH, MODEL_HEIGHT = 512, 256
FRAME_SHAPE = (6, 128, 256)  # of one packed frame
QCAMERA_SIZE = (526, 330)  # width, height


@dataclass(frozen=True)
class Camera:
    """A pinhole camera.

    Attributes:
        width: Width in pixels.
        height: Height in pixels.
        focal_length: Focal length in pixels.
    """

    width: int
    height: int
    focal_length: float

    @property
    def intrinsics(self) -> np.ndarray:
        """Return the matrix (3, 3) float64 from the view frame (x right, y down) to pixels."""
        return np.array(
            [
                [self.focal_length, 0.0, self.width / 2],
                [0.0, self.focal_length, self.height / 2],
                [0.0, 0.0, 1.0],
            ]
        )


@dataclass(frozen=True)
class DeviceCameras:
    """The road-facing cameras of a device.

    Attributes:
        road: The camera of fcamera.
        wide: The camera of ecamera, or None if there is none.
    """

    road: Camera
    wide: Camera | None


_AR_OX = DeviceCameras(Camera(1928, 1208, 2648.0), Camera(1928, 1208, 567.0))
_OS = DeviceCameras(Camera(1344, 760, 1141.5), Camera(1344, 760, 425.25))
_SENSORS = {"ar0231": _AR_OX, "ox03c10": _AR_OX, "os04c10": _OS}

# By initData.deviceType and roadCameraState.sensor. Logs from before the second sensor do not name
# it.
DEVICE_CAMERAS = MappingProxyType(
    {
        ("neo", "unknown"): DeviceCameras(Camera(1164, 874, 910.0), None),
        ("tici", "unknown"): _AR_OX,
        ("pc", "unknown"): _AR_OX,
        ("unknown", "ar0231"): _AR_OX,
        ("unknown", "ox03c10"): _AR_OX,
        **{
            (device, sensor): cameras
            for device in ("tici", "tizi", "mici")
            for sensor, cameras in _SENSORS.items()
        },
    }
)

_CY = 47.6  # pixels; the horizon, as models crop most of the sky
# Intrinsics of `img`, and of `big_img`, which has twice the field of view.
MODEL_INTRINSICS = np.array([[910.0, 0, MODEL_WIDTH / 2], [0, 910.0, _CY], [0, 0, 1]])
BIG_MODEL_INTRINSICS = np.array(
    [[455.0, 0, MODEL_WIDTH / 2], [0, 455.0, 0.5 * (MODEL_HEIGHT + _CY)], [0, 0, 1]]
)
for _matrix in (MODEL_INTRINSICS, BIG_MODEL_INTRINSICS):
    _matrix.setflags(write=False)

MODEL_CAMERA_HEIGHT = 1.22  # m above the road, of the calibrated frame's origin
