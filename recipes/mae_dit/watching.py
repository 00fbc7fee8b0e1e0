"""What stage 2 shows while it trains: pictures of samples, and their distance to images."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from recipes.mae_dit.devices import on_one
from recipes.mae_dit.evaluation.measuring import Measures, Reference, in_batches
from recipes.mae_dit.reconstructions import SHOWN, write_picture
from recipes.mae_dit.stage2.sampling import Sampler
from tpuport.foundation.files import replacing_file
from tpuport.foundation.reporting.markup import Markup, tag

_PICTURES = 32
_NAME = "evaluate/FID"
_WIDTH, _HEIGHT, _EDGE = 640, 320, 48  # pixels of a curve

Watcher = Callable[[Any, int, Mapping[str, jax.Array]], Mapping[str, Any]]


@dataclass(frozen=True)
class Watch:
    """Watchers, each with its own number of updates between two looks.

    Args:
        watchers: Pairs of that number and a function of the sampler, the step's number and weights.
        sampler: Samples images.
        averaged: Whether the averaged weights are looked at.
        last: The last update, after which all of them look.
    """

    watchers: list[tuple[int, Watcher]]
    sampler: Sampler
    averaged: bool
    last: int

    @property
    def every(self) -> int:
        """Return the number of updates between two calls."""
        return math.gcd(*(every for every, _ in self.watchers))

    def __call__(self, step: Any, state: Any) -> dict[str, Any]:
        """Look at a state, and return numbers and pictures by name."""
        number, found = int(state.step), {}
        due = [look for every, look in self.watchers if number % every == 0 or number == self.last]
        if due:
            weights = on_one(step.load_state(state, ema=self.averaged).params)
            for look in due:
                found |= look(self.sampler, number, weights)
        return found


@dataclass(frozen=True)
class Grids:
    """Pictures of samples, of the same noise each time.

    Args:
        folder: Where to write them.
        seed: Random seed.
        batch_size: Images of a batch.
    """

    folder: Path
    seed: int
    batch_size: int

    def __call__(
        self, sampler: Sampler, number: int, weights: Mapping[str, jax.Array]
    ) -> dict[str, np.ndarray]:
        """Write and return the picture of some weights."""
        size = min(self.batch_size, _PICTURES)
        made = sampler.images(_PICTURES, self.seed, size, weights)
        picture = as_grid(made[0])
        write_picture(self.folder / f"step-{number:06d}.png", picture)
        return {"samples": picture}


@dataclass(frozen=True)
class Distances:
    """FID and its kin of samples, of the same noise each time, and their curve in OUT/fid.svg.

    Args:
        measures: The network of FID, over all devices.
        reference: The statistics of images.
        out: Folder of the run, whose log has earlier numbers.
        count: Samples.
        seed: Random seed.
        batch_size: Images of a batch.
    """

    measures: Measures
    reference: Reference
    out: Path
    count: int
    seed: int
    batch_size: int

    def __call__(
        self, sampler: Sampler, number: int, weights: Mapping[str, jax.Array]
    ) -> dict[str, float]:
        """Return the measures of some weights."""
        size = min(self.batch_size, self.count)
        images, _ = sampler.images(self.count, self.seed, size, weights)
        features = self.measures.features(in_batches(images, size))
        found = {**self.reference.distances(features), "IS": features.score()}
        known = read_log(self.out / "log.jsonl").values.get(_NAME, {})
        points = {step: value for step, value in known.items() if step < number}
        write_curve(self.out / "fid.svg", {**points, number: found["FID"]})
        return found


@dataclass(frozen=True)
class Log:
    """The numbers of a run's log.

    Attributes:
        values: Finite values by name and step. Of a step that was done again, the last.
        odd: Values that are not finite.
        broken: Lines that are no JSON objects with a step, such as one cut off by a kill.
    """

    values: dict[str, dict[int, float]]
    odd: int = 0
    broken: int = 0

    @property
    def last(self) -> int:
        """Return the last step of which there is a number."""
        return max((step for points in self.values.values() for step in points), default=0)


def read_log(path: Path) -> Log:
    """Read the log of a run, which a kill may have cut off; a missing one is empty."""
    values: dict[str, dict[int, float]] = {}
    odd = broken = 0
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        entry = _object(line)
        step = entry.pop("step", None)
        if not isinstance(step, int) or step < 0:
            broken += 1
            continue
        for name, value in entry.items():
            if value is None:  # NaN and infinity, as the log has them
                odd += 1
            elif isinstance(value, int | float) and math.isfinite(value):
                values.setdefault(name, {})[step] = float(value)
    return Log(values, odd, broken)


def _object(line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def write_curve(path: Path, points: Mapping[int, float]) -> None:
    """Draw FIDs over steps, from zero on, as SVG."""
    with replacing_file(path) as temporary:
        temporary.write_text(curve("FID", points) + "\n", encoding="utf-8")


def curve(name: str, points: Mapping[int, float]) -> Markup:
    """Draw finite values over steps, from zero on or up to it, as SVG.

    Args:
        name: What the values are.
        points: The values by step; at least one.
    """
    right = max(*points, 1)
    low, high = min(*points.values(), 0.0), max(*points.values(), 0.0)
    scale = (_HEIGHT - 2 * _EDGE) / (high - low or 1.0)
    places = [
        (
            f"{_EDGE + (_WIDTH - 2 * _EDGE) * step / right:.1f}",
            f"{_HEIGHT - _EDGE - scale * (value - low):.1f}",
            f"step {step}: {name} {value:.4g}",
        )
        for step, value in sorted(points.items())
    ]
    bottom, far = _HEIGHT - _EDGE, _WIDTH - _EDGE
    line = " ".join(f"{x},{y}" for x, y, _ in places)
    return tag(
        "svg",
        tag("path", d=f"M{_EDGE},{_EDGE}V{bottom}H{far}", fill="none", stroke="gray"),
        tag("polyline", points=line, fill="none", stroke="currentColor"),
        *(tag("circle", tag("title", text), cx=x, cy=y, r=3) for x, y, text in places),
        tag("text", f"{name}, {low:.4g} to {high:.4g}", x=_EDGE, y=_EDGE - 12),
        tag("text", f"step {right}", x=far, y=bottom + 20, text_anchor="end"),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        font_family="sans-serif",
        font_size=12,
        fill="currentColor",
        role="img",
    )


def as_grid(images: np.ndarray) -> np.ndarray:
    """Return images (N, H, W, 3) of 8 bits as one picture of rows."""
    rows = -(-len(images) // SHOWN)
    filled = np.full((rows * SHOWN, *images.shape[1:]), 255, np.uint8)
    filled[: len(images)] = images
    height, width = images.shape[1:3]
    lines = filled.reshape(rows, SHOWN, height, width, 3).transpose(0, 2, 1, 3, 4)
    return lines.reshape(rows * height, SHOWN * width, 3)


def write_grid(path: Path, images: np.ndarray) -> None:
    """Write images (N, H, W, 3) of 8 bits as one picture of rows."""
    write_picture(path, as_grid(images))
