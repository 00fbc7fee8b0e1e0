"""Labels for a model: from the log of the model that drove, or from the path that the car drove.

Labels are in the calibrated frame of the moment: x forward, y right, z down, metres and seconds.
Velocities and accelerations of a plan are those of its positions, in the same frame.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.openpilot.constants import (
    DESIRE_LEN,
    IDX_N,
    LEAD_T_IDXS,
    NUM_LANE_LINES,
    NUM_LEADS,
    NUM_ROAD_EDGES,
    PLAN_WIDTH,
    POSE_WIDTH,
    T_IDXS,
    X_IDXS,
)
from recipes.openpilot.geometry import euler_from_rotation, rotation_from_euler

Floats = NDArray[np.float32]
Array = NDArray[np.floating[Any]]
# Shapes for one frame, by name.
LABEL_SHAPES: dict[str, tuple[int, ...]] = {
    "plan": (IDX_N, PLAN_WIDTH),
    "lane_lines": (NUM_LANE_LINES, IDX_N, 2),
    "lane_lines_prob": (NUM_LANE_LINES,),
    "road_edges": (NUM_ROAD_EDGES, IDX_N, 2),
    "lead": (NUM_LEADS, len(LEAD_T_IDXS), 4),
    "lead_prob": (NUM_LEADS,),
    "desire_state": (DESIRE_LEN,),
    "pose": (POSE_WIDTH,),
}
_PLAN = ("position", "velocity", "acceleration", "orientation", "orientationRate")
_LONGEST_GAP = 0.2  # s between two poses that are integrated over
_SECOND = 1e9  # ns


def model_labels(message: Any, problems: Counter[str]) -> dict[str, Floats]:
    """Return the labels of a modelV2 message, by the names of the training set.

    This inverts openpilot's fill_model_msg.py. Labels that an older model did not log are left out.

    Args:
        message: The modelV2 message.
        problems: Counts labels whose sizes differ from today's.
    """
    found: dict[str, Any] = {}
    if _is_at(message.position.t, T_IDXS):
        columns = [getattr(getattr(message, name), axis) for name in _PLAN for axis in "xyz"]
        found["plan"] = _stacked(columns, (IDX_N, PLAN_WIDTH), transposed=True)
    for name, lines, count in (
        ("lane_lines", message.laneLines, NUM_LANE_LINES),
        ("road_edges", message.roadEdges, NUM_ROAD_EDGES),
    ):
        if all(_is_at(line.x, X_IDXS) for line in lines):
            both = [_stacked([line.y, line.z], (IDX_N, 2), transposed=True) for line in lines]
            found[name] = _stacked(both, (count, IDX_N, 2))
    found["lane_lines_prob"] = _stacked(message.laneLineProbs, (NUM_LANE_LINES,))
    leads = list(message.leadsV3)
    each = [_stacked([a.x, a.y, a.v, a.a], (6, 4), transposed=True) for a in leads]
    found["lead"] = _stacked(each, LABEL_SHAPES["lead"])
    found["lead_prob"] = _stacked([lead.prob for lead in leads], (NUM_LEADS,))
    found["desire_state"] = _stacked(message.meta.desireState, (DESIRE_LEN,))
    kept = {name: value for name, value in found.items() if value is not None}
    for name in LABEL_SHAPES:
        if name not in kept and name != "pose":
            problems[f"modelV2 without {name} as models have it now"] += 1
    return kept


def _is_at(values: Any, expected: tuple[float, ...]) -> bool:
    return len(values) == len(expected) and np.allclose(list(values), expected, atol=1e-2)


def _stacked(parts: Any, shape: tuple[int, ...], *, transposed: bool = False) -> Floats | None:
    """Return an array of a shape, or None if the parts do not make one of finite numbers."""
    parts = list(parts)
    if any(part is None for part in parts):
        return None
    rows = [
        np.asarray(part if isinstance(part, np.ndarray | float) else list(part)) for part in parts
    ]
    if len({row.shape for row in rows}) != 1:
        return None
    made = np.stack(rows).astype(np.float32)
    made = made.T if transposed else made
    return made if made.shape == shape and np.isfinite(made).all() else None


@dataclass(frozen=True)
class Poses:
    """The motion of the device, in its own frame.

    Attributes:
        time: (n,) ns, increasing.
        velocity: (n, 3) m/s.
        turning: (n, 3) rad/s.
        valid: (n,) whether the motion was known.
    """

    time: NDArray[np.int64]
    velocity: Array
    turning: Array
    valid: NDArray[np.bool_]


def path_labels(
    poses: Poses, times: NDArray[np.int64], rpy_calib: Array
) -> dict[str, tuple[Floats, NDArray[np.bool_]]]:
    """Return plan and pose from the motion of the car.

    Args:
        poses: Poses, also of the ten seconds after the last frame if they are known.
        times: (T,) ns, of the frames.
        rpy_calib: (T, 3) rad.

    Returns:
        By "plan" and "pose", the labels (T, ...) and which of them are known: those whose ten
        seconds have poses without a gap.
    """
    count = len(times)
    plan = np.zeros((count, IDX_N, PLAN_WIDTH), np.float32)
    pose = np.zeros((count, POSE_WIDTH), np.float32)
    if len(poses.time) < 3:
        nothing = np.zeros(count, bool)
        return {"plan": (plan, nothing), "pose": (pose, nothing.copy())}
    path = _Path(poses)
    future = times[:, None] + np.round(np.array(T_IDXS) * _SECOND).astype(np.int64)
    known, now_known = path.covers(times, future[:, -1]), path.covers(times, times)
    calib = np.swapaxes(rotation_from_euler(rpy_calib), -1, -2)  # calibrated from device
    if known.any():
        plan[known] = _plans(path, future[known], calib[known])
    now = path.at(times[now_known])
    for columns, name in ((slice(0, 3), "velocity"), (slice(3, 6), "turning")):
        # Both are in the device's frame at that time, since the world frame is only where the path
        # began.
        own = now[name] if name == "turning" else _turned(_inverse(now["turn"]), now[name])
        pose[now_known, columns] = _turned(calib[now_known], own)
    return {"plan": (plan, known), "pose": (pose, now_known)}


def _plans(path: "_Path", future: NDArray[np.int64], calib: Array) -> Array:
    """Return plans (n, 33, 15) at times (n, 33), the first of which is now."""
    at = path.at(future)
    here = calib @ _inverse(at["turn"][:, 0])  # calibrated now from world
    made = np.zeros((*future.shape, PLAN_WIDTH))
    made[..., 0:3] = _turned(here[:, None], at["place"] - at["place"][:, :1])
    made[..., 3:6] = _turned(here[:, None], at["velocity"])
    made[..., 6:9] = _turned(here[:, None], at["acceleration"])
    turned = here[:, None] @ at["turn"] @ _inverse(calib)[:, None]
    made[..., 9:12] = euler_from_rotation(turned)
    made[..., 12:15] = _turned(calib[:, None], at["turning"])
    return made


class _Path:
    """The positions and rotations of a device in its first frame, integrated from its motion."""

    def __init__(self, poses: Poses) -> None:
        self._time, self._turning = poses.time, poses.turning
        steps = np.diff(poses.time) / _SECOND
        turns = [np.eye(3)]
        middle = (poses.turning[1:] + poses.turning[:-1]) / 2
        for step in rotation_from_vector(middle * steps[:, None]):
            turns.append(turns[-1] @ step)
        self._turn = np.stack(turns)
        self._velocity = _turned(self._turn, poses.velocity)
        gone = (self._velocity[1:] + self._velocity[:-1]) / 2 * steps[:, None]
        self._place = np.concatenate([np.zeros((1, 3)), np.cumsum(gone, axis=0)])
        seconds = (poses.time - poses.time[0]) / _SECOND
        self._acceleration = np.gradient(self._velocity, seconds, axis=0)
        bad = (steps > _LONGEST_GAP) | ~poses.valid[1:] | ~poses.valid[:-1]
        self._bad_before = np.concatenate([[0], np.cumsum(bad)])

    def covers(self, start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether the motion is known without a gap between moments (n,)."""
        first = np.searchsorted(self._time, start, "right") - 1
        last = np.searchsorted(self._time, end, "left")
        inside = (first >= 0) & (last < len(self._time))
        first, last = np.clip(first, 0, None), np.clip(last, None, len(self._time) - 1)
        return inside & (self._bad_before[last] == self._bad_before[first])

    def at(self, times: NDArray[np.int64]) -> dict[str, Array]:
        """Interpolate the motion at times (...,), which must be covered."""
        left = np.clip(np.searchsorted(self._time, times, "right") - 1, 0, len(self._time) - 2)
        step = self._time[left + 1] - self._time[left]
        part = ((times - self._time[left]) / step)[..., None]

        def between(values: Array) -> Array:
            return values[left] * (1 - part) + values[left + 1] * part

        passed = ((times - self._time[left]) / _SECOND)[..., None]
        middle = (self._turning[left] + self._turning[left + 1]) / 2
        return {
            "turn": self._turn[left] @ rotation_from_vector(middle * passed),
            "place": between(self._place),
            "velocity": between(self._velocity),
            "acceleration": between(self._acceleration),
            "turning": between(self._turning),
        }


def rotation_from_vector(vectors: Array) -> Array:
    """Return matrices (..., 3, 3) that turn about vectors (..., 3) by their lengths (Rodrigues)."""
    angle = np.linalg.norm(vectors, axis=-1)[..., None, None]
    x, y, z = np.moveaxis(vectors, -1, 0)
    zero = np.zeros_like(x)
    cross = np.stack(
        [np.stack(row, -1) for row in ([zero, -z, y], [z, zero, -x], [-y, x, zero])], -2
    )
    # sin(a)/a and (1-cos(a))/a^2, defined at 0, too.
    first = np.sinc(angle / np.pi)
    second = 0.5 * np.sinc(angle / (2 * np.pi)) ** 2
    return np.eye(3) + first * cross + second * (cross @ cross)


def _turned(matrices: Array, vectors: Array) -> Array:
    return (matrices @ vectors[..., None])[..., 0]


def _inverse(matrices: Array) -> Array:
    return np.swapaxes(matrices, -1, -2)
