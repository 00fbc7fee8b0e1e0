"""A drive along a winding road with known geometry, which `make_data` draws and logs.

The road is level, in world coordinates x and y with y to the right of x, so that a positive
curvature turns right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recipes.openpilot.constants import (
    IDX_N,
    LEAD_T_IDXS,
    LEAD_T_OFFSETS,
    LEAD_WIDTH,
    MODEL_CAMERA_HEIGHT,
    NUM_LANE_LINES,
    NUM_LEADS,
    NUM_ROAD_EDGES,
    PLAN_WIDTH,
    T_IDXS,
    X_IDXS,
)

Array = NDArray[np.floating[Any]]
LANE = 3.5  # m
_SHOULDER = 0.75  # m
_STEP = 0.5  # m along the road
_FINE = 0.01  # s
_MARGIN = 12.0  # s of driving before the first and after the last frame
_LANE_CHANGE = 4.0  # s
_SALT = 20_261


@dataclass(frozen=True)
class DriveOptions:
    """The settings of a drive.

    Attributes:
        seconds: Length of the drive.
        seed: Random seed of the road and everything on it.
        speeds: Range from which the mean speed is drawn, in m/s.
        curvature: Largest curvature of a bend, in 1/m.
        lead: Probability of a car ahead.
        lane_change: Whether to change one lane halfway, with the desire set.
        lane: Width of a lane in m.
        height: Height of the camera above the road in m.
        sway: Distance in m by which the car drifts to both sides of its lane's middle.
    """

    seconds: float
    seed: int = 0
    speeds: tuple[float, float] = (14.0, 16.0)
    curvature: float = 0.008
    lead: float = 0.5
    lane_change: bool = False
    lane: float = LANE
    height: float = MODEL_CAMERA_HEIGHT
    sway: float = 0.15

    @property
    def lane_lines(self) -> tuple[float, ...]:
        """Return how far the lines are to the right of the lane's middle, in m."""
        return tuple(number * self.lane for number in (-1.5, -0.5, 0.5, 1.5))

    @property
    def road_edges(self) -> tuple[float, float]:
        """Return how far the road's edges are to the right of the lane's middle, in m."""
        half = 1.5 * self.lane + _SHOULDER
        return -half, half


class Drive:
    """The positions of the car, the road and the car ahead at any time.

    Args:
        options: Settings of the drive.
    """

    def __init__(self, options: DriveOptions) -> None:
        self.options = options
        generator = np.random.default_rng((_SALT, options.seed))
        self.speed = generator.uniform(*options.speeds)
        self._sway_phase, self._pace_phase, self._gap_phase = generator.uniform(0, 2 * np.pi, 3)
        self._waves = generator.uniform((0.5, 130, 0), (1, 330, 2 * np.pi), (3, 3))
        self._waves[:, 0] *= options.curvature / self._waves[:, 0].sum()
        self.has_lead = bool(generator.uniform() < options.lead)
        self._gap = generator.uniform(18, 45)
        self._side = 1 if generator.uniform() < 0.5 else -1

    def _curvature(self, way: Array) -> Array:
        """Return the curvature of the lane's middle in 1/m."""
        height, length, phase = self._waves.T[:, :, None]
        return (height * np.sin(2 * np.pi * way / length + phase)).sum(0)

    @cached_property
    def _road(self) -> tuple[Array, Array, Array, Array]:
        """Return distance, heading, x and y of the lane's middle, every half metre."""
        longest = (self.options.speeds[1] + 2) * (self.options.seconds + 2 * _MARGIN) + 400
        way = np.arange(-150, longest, _STEP)
        heading = _integral(self._curvature(way), _STEP)
        return (
            way,
            heading,
            _integral(np.cos(heading), _STEP),
            _integral(np.sin(heading), _STEP),
        )

    @cached_property
    def _car(self) -> dict[str, Array]:
        """Return the car's values every hundredth of a second."""
        times = np.arange(-_MARGIN, self.options.seconds + 2 * _MARGIN, _FINE)
        speed = self.speed + 0.4 * np.sin(0.6 * times + self._pace_phase)
        way = _integral(speed, _FINE) + 20
        # Integrated along the road itself. Interpolation in the road's table would have corners,
        # which would show in derivatives.
        heading, x, y = (np.interp(way[0], self._road[0], column) for column in self._road[1:])
        heading = heading + _integral(self._curvature(way) * speed, _FINE)
        aside = self.options.sway * np.sin(0.5 * times + self._sway_phase) + self._changed(times)
        x = x + _integral(np.cos(heading) * speed, _FINE) - aside * np.sin(heading)
        y = y + _integral(np.sin(heading) * speed, _FINE) + aside * np.cos(heading)
        dx, dy = np.gradient(x, _FINE), np.gradient(y, _FINE)
        direction = np.unwrap(np.arctan2(dy, dx))
        return {
            "time": times,
            "way": way,
            "x": x,
            "y": y,
            "heading": direction,
            "turning": np.gradient(direction, _FINE),
            "vx": dx,
            "vy": dy,
            "ax": np.gradient(dx, _FINE),
            "ay": np.gradient(dy, _FINE),
        }

    def _changed(self, times: Array) -> Array:
        if not self.options.lane_change:
            return np.zeros_like(times)
        done = np.clip((times - self.lane_change_start) / _LANE_CHANGE, 0, 1)
        return self._side * self.options.lane * (1 - np.cos(np.pi * done)) / 2

    @property
    def lane_change_start(self) -> float:
        """Return the time in s at which a lane change begins."""
        return (self.options.seconds - _LANE_CHANGE) / 2

    def desire(self, time: float) -> int:
        """Return the index of the desire in `constants.DESIRES`."""
        passed = time - self.lane_change_start
        if not self.options.lane_change or not 0 <= passed < _LANE_CHANGE:
            return 0
        return 4 if self._side > 0 else 3

    def _place(self, way: Array, aside: ArrayLike) -> tuple[Array, Array]:
        """Return world coordinates of places by the road."""
        s, heading, x, y = self._road
        turned = np.interp(way, s, heading)
        aside = np.asarray(aside)
        return (
            np.interp(way, s, x) - aside * np.sin(turned),
            np.interp(way, s, y) + aside * np.cos(turned),
        )

    def at(self, name: str, times: ArrayLike) -> Array:
        """Interpolate a value of the car at times in s: "way", "heading", "turning", "vx" ..."""
        return np.interp(np.asarray(times), self._car["time"], self._car[name])

    def to_car(self, time: float, x: Array, y: Array) -> tuple[Array, Array]:
        """Return coordinates in the car's frame at a time: forward and to the right."""
        return self._turned(time, x - self.at("x", time), y - self.at("y", time))

    def _turned(self, time: float, x: Array, y: Array) -> tuple[Array, Array]:
        cos, sin = (f(self.at("heading", time)) for f in (np.cos, np.sin))
        return cos * x + sin * y, cos * y - sin * x

    def speed_at(self, times: ArrayLike) -> Array:
        """Return the speed in m/s."""
        return np.hypot(self.at("vx", times), self.at("vy", times))

    def lines(self, time: float, forward: ArrayLike, asides: ArrayLike) -> Array:
        """Return how far to the right lines along the road are.

        Args:
            time: Time in s.
            forward: (n,) m ahead of the car.
            asides: (m,) m, how far to the right of the lane's middle each line is.

        Returns:
            (m, n) m to the right of the car.
        """
        way = self.at("way", time) + np.arange(-30, 300, _STEP)
        found = []
        for aside in np.asarray(asides):
            x, y = self.to_car(time, *self._place(way, aside))
            found.append(np.interp(np.asarray(forward), x, y))
        return np.stack(found)

    def way_along(self, time: float, forward: ArrayLike) -> Array:
        """Return the distance in m along the road of places ahead, for marks painted on it."""
        way = self.at("way", time) + np.arange(-30, 300, _STEP)
        x, _ = self.to_car(time, *self._place(way, 0.0))
        return np.interp(np.asarray(forward), x, way)

    def lead(self, now: float, times: ArrayLike) -> Array:
        """Return x, y, speed and acceleration (n, 4) of the car ahead at times, seen from now."""
        times = np.asarray(times, np.float64)
        ahead = [self._lead_way(times + d) for d in (-_FINE, 0.0, _FINE)]
        x, y = self.to_car(now, *self._place(ahead[1], 0.0))
        speed = (ahead[2] - ahead[0]) / (2 * _FINE)
        gained = (ahead[2] - 2 * ahead[1] + ahead[0]) / _FINE**2
        return np.stack([x, y, speed, gained], axis=-1)

    def _lead_way(self, times: Array) -> Array:
        swing = 6 * np.sin(0.25 * times + self._gap_phase)
        return self.at("way", 0.0) + self.speed * times + self._gap + swing

    def labels(self, time: float) -> dict[str, NDArray[np.float32]]:
        """Return the true labels at a time, by the names of the training set.

        Args:
            time: Time in s.

        Returns:
            plan (33, 15), lane_lines (4, 33, 2), lane_lines_prob (4,), road_edges (2, 33, 2),
            lead (3, 6, 4), lead_prob (3,), desire_state (8,), pose (6,).
        """
        lead = np.zeros((NUM_LEADS, len(LEAD_T_IDXS), LEAD_WIDTH))
        if self.has_lead:
            for number, offset in enumerate(LEAD_T_OFFSETS):
                lead[number] = self.lead(time, time + offset + np.array(LEAD_T_IDXS))
        made = {
            "plan": self.plan(time),
            "lane_lines": self._edges(time, self.options.lane_lines, NUM_LANE_LINES),
            "lane_lines_prob": np.ones(NUM_LANE_LINES),
            "road_edges": self._edges(time, self.options.road_edges, NUM_ROAD_EDGES),
            "lead": lead,
            "lead_prob": np.full(NUM_LEADS, float(self.has_lead)),
            "desire_state": np.eye(8)[self.desire(time)],
            "pose": np.array([self.speed_at(time), 0, 0, 0, 0, self.at("turning", time)]),
        }
        return {name: value.astype(np.float32) for name, value in made.items()}

    def plan(self, time: float) -> Array:
        """Return the future path and its derivatives (33, 15) in the frame of the car now."""
        future = time + np.array(T_IDXS)
        made = np.zeros((IDX_N, PLAN_WIDTH))
        made[:, 0], made[:, 1] = self.to_car(time, self.at("x", future), self.at("y", future))
        made[:, 3], made[:, 4] = self._turned(time, self.at("vx", future), self.at("vy", future))
        made[:, 6], made[:, 7] = self._turned(time, self.at("ax", future), self.at("ay", future))
        made[:, 11] = self.at("heading", future) - self.at("heading", time)
        made[:, 14] = self.at("turning", future)
        return made

    def _edges(self, time: float, asides: Sequence[float], count: int) -> Array:
        made = np.full((count, IDX_N, 2), self.options.height)
        made[:, :, 0] = self.lines(time, np.array(X_IDXS), asides)
        return made


def _integral(values: Array, step: float) -> Array:
    """Integrate by trapezoids, from zero."""
    parts = (values[1:] + values[:-1]) * (step / 2)
    return np.concatenate([[0.0], np.cumsum(parts)])
