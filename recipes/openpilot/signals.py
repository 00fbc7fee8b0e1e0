"""Inputs of a model besides pictures, at the time of each frame."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from recipes.openpilot.constants import DESIRE_LEN, DT_MDL, TRAFFIC_CONVENTION_LEN
from recipes.openpilot.joining import FrameTable, latest
from recipes.openpilot.logs import Log, Table
from recipes.openpilot.shards import Arrays

_NEAR = 500_000_000  # ns between a frame and its speed
# Upstream's guesses of delays beyond the actuator's: of steering, and of smoothing.
_MORE_LATERAL, _MORE_LONGITUDINAL = 0.2, 0.3  # s
_DELAYS = (0.1, 0.15)  # s, for a car that logs none
# From the end of a frame to the effect of an action: modeld.py's frame_delay and action_delay.
_FRAME_DELAY = 1.5 * DT_MDL


@dataclass(frozen=True)
class Signals:
    """The values at frames (T,).

    Attributes:
        arrays: desire, traffic_convention, v_ego, action_t, rpy_calib; each (T, ...).
        missing: (T,) by reason, whether a frame cannot be used.
        notes: Assumptions that were made.
    """

    arrays: Arrays
    missing: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def signals_at(log: Log, frames: FrameTable) -> Signals:
    """Return the values of a log at the times of frames."""
    notes: list[str] = []
    rpy, uncalibrated = _calibrations(log.tables["liveCalibration"], frames.eof, notes)
    speed, unknown = _speeds(log.tables["carState"], frames.eof)
    arrays: Arrays = {
        "rpy_calib": rpy,
        "v_ego": speed,
        "traffic_convention": _conventions(log, frames, notes),
        "desire": _desires(log, frames),
        "action_t": _delays(log, frames, notes),
    }
    missing = {"without liveCalibration": uncalibrated, "without carState": unknown}
    return Signals({n: a.astype(np.float32) for n, a in arrays.items()}, missing, notes)


def _calibrations(table: Table, times: NDArray[np.int64], notes: list[str]):
    count = len(times)
    if not len(table):
        return np.zeros((count, 3)), np.ones(count, bool)
    row = latest(table, times)
    if (row < 0).any():
        notes.append(f"{(row < 0).sum()} frames come before liveCalibration: its first is used")
    row = np.clip(row, 0, None)
    if not table["calibrated"][row].all():
        uncertain = (~table["calibrated"][row]).sum()
        notes.append(f"{uncertain} frames are from before the device was calibrated")
    return table["rpy"][row], np.zeros(count, bool)


def _speeds(table: Table, times: NDArray[np.int64]):
    if not len(table):
        return np.zeros(len(times)), np.ones(len(times), bool)
    after = np.clip(np.searchsorted(table["time"], times), 0, len(table) - 1)
    near = np.minimum(
        np.abs(table["time"][after] - times),
        np.abs(table["time"][np.clip(after - 1, 0, None)] - times),
    )
    # Relative to the first time, since nanoseconds of a long uptime exceed a float's exact
    # integers.
    start = table["time"][0]
    speed = np.interp(times - start, table["time"] - start, table["v_ego"])
    return np.maximum(speed, 0), near > _NEAR


def _conventions(log: Log, frames: FrameTable, notes: list[str]) -> NDArray[np.float64]:
    table = log.tables["driverMonitoringState"]
    if not len(table):
        notes.append("without driverMonitoringState: traffic on the right is assumed")
        on_left = np.zeros(len(frames), int)
    else:
        on_left = table["right_hand_drive"][np.clip(latest(table, frames.eof), 0, None)].astype(int)
    return np.eye(TRAFFIC_CONVENTION_LEN)[on_left]


def _desires(log: Log, frames: FrameTable) -> NDArray[np.float64]:
    """Return desires as modeld has them: from the lane change state after the previous frame."""
    plans, models = log.tables["lateralPlan"], log.tables["modelV2"]
    wanted = np.zeros(len(frames), int)
    if len(plans):
        row = latest(plans, frames.eof)
        wanted = np.where(row >= 0, plans["desire"][np.clip(row, 0, None)], 0)
    elif len(models):
        by_id = models[np.argsort(models["frame_id"], kind="stable")]
        row = np.searchsorted(by_id["frame_id"], frames.frame_id) - 1
        wanted = np.where(row >= 0, by_id["desire"][np.clip(row, 0, None)], 0)
    return np.eye(DESIRE_LEN)[np.clip(wanted, 0, DESIRE_LEN - 1)]


def _delays(log: Log, frames: FrameTable, notes: list[str]) -> NDArray[np.float64]:
    """Return action_t of modeld.py: the delays of steering and acceleration after a frame."""
    if log.delays is None:
        notes.append(f"without carParams: delays of {_DELAYS[0]} s and {_DELAYS[1]} s are assumed")
    steering, acceleration = log.delays or _DELAYS
    lateral = np.full(len(frames), steering + _MORE_LATERAL)
    learnt = log.tables["liveDelay"]
    if len(learnt):
        row = np.clip(latest(learnt, frames.eof), 0, None)
        lateral = learnt["lateral"][row]
    longitudinal = np.full(len(frames), acceleration + _MORE_LONGITUDINAL)
    return np.stack([lateral, longitudinal], axis=1) + _FRAME_DELAY
