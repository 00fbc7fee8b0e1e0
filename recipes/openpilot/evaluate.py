"""Metrics that compare driving models: errors in metres and metres per second, and accuracies.

Everything works on the results of `outputs.parse` and on labels of a training set, both in numpy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.openpilot.constants import T_IDXS, X_IDXS
from tpuport.foundation.errors import MissingExtraError, UsageError
from tpuport.foundation.files import replacing_file

Arrays = Mapping[str, NDArray[Any]]
HORIZONS = (1.0, 2.0, 3.0, 5.0, 10.0)  # s
LANE_REACH = 50.0  # m ahead, up to which lines are compared
_SURE = 0.5  # probability from which a label counts as present


@dataclass
class Figures:
    """Means of the metrics over all frames that were added.

    Attributes:
        sums: Sums by name.
        counts: Number of summed values by name.
    """

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, parsed: Arrays, labels: Arrays) -> None:
        """Compare the predictions for some frames with their labels.

        Args:
            parsed: Result of `outputs.parse`, each (T, ...). Heads that a model lacks are left out.
            labels: Labels of a training set, each (T, ...), with `NAME_valid`.

        Raises:
            UsageError: Prediction and label differ in the number of frames or in shape.
        """
        for name, compare in _COMPARE.items():
            if name in parsed and name in labels:
                known = np.asarray(labels[f"{name}_valid"], bool)
                truth = np.asarray(labels[name], np.float64)[known]
                if len(parsed[name]) != len(known):
                    raise UsageError(
                        f"{name}: {len(parsed[name])} frames are predicted and {len(known)}"
                        " labelled: expected the same ones"
                    )
                given = {n: np.asarray(parsed[n], np.float64)[known] for n in _needed(name, parsed)}
                for figure, values in compare(given, truth).items():
                    self._add(figure, values)
        self._add_leads(parsed, labels)

    def _add(self, name: str, values: NDArray[Any]) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + float(np.sum(values))
        self.counts[name] = self.counts.get(name, 0) + int(np.size(values))

    def _add_leads(self, parsed: Arrays, labels: Arrays) -> None:
        """Compare the cars ahead, where there are any."""
        if not {"lead", "lead_prob"} <= parsed.keys() & labels.keys():
            return
        known = np.asarray(labels["lead_valid"] & labels["lead_prob_valid"], bool)
        there = labels["lead_prob"][known] > _SURE
        said = parsed["lead_prob"][known] > _SURE
        self._add("lead_found", there[:, 0] == said[:, 0])
        now = there[:, 0]
        lead, truth = parsed["lead"][known][now, 0, 0], labels["lead"][known][now, 0, 0]
        self._add("lead_distance_error_m", np.hypot(*(lead - truth)[:, :2].T))
        self._add("lead_speed_error_mps", np.abs(lead - truth)[:, 2])

    def means(self) -> dict[str, float]:
        """Return the means by name, without those that have no values."""
        return {n: self.sums[n] / count for n, count in self.counts.items() if count}


def _needed(name: str, parsed: Arrays) -> list[str]:
    return [n for n in (name, f"{name}_hypotheses", f"{name}_weights") if n in parsed]


def _paths(parsed: Arrays, truth: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Compare paths by the distance between the predicted and the true place at the same time."""
    _same_shape("plan", parsed["plan"], truth)
    away = np.linalg.norm(parsed["plan"][..., :2] - truth[..., :2], axis=-1)
    found = {f"path_error_m@{h:g}s": _at(away, h) for h in HORIZONS}
    found["path_error_m"] = np.trapezoid(away, T_IDXS, axis=-1) / T_IDXS[-1]
    found["path_lateral_error_m"] = np.mean(np.abs((parsed["plan"] - truth)[..., 1]), axis=-1)
    found["speed_error_mps"] = np.mean(np.abs((parsed["plan"] - truth)[..., 3]), axis=-1)
    if "plan_hypotheses" in parsed:
        each = np.linalg.norm(
            parsed["plan_hypotheses"][..., :2] - truth[:, None, :, :2], axis=-1
        ).mean(-1)
        weights = parsed["plan_weights"].reshape(len(truth), -1)
        found["best_hypothesis_error_m"] = each.min(axis=1)
        found["hypothesis_accuracy"] = each.argmin(axis=1) == weights.argmax(axis=1)
    return found


def _at(away: NDArray[Any], horizon: float) -> NDArray[Any]:
    """Interpolate between the two nearest times of a plan."""
    after = int(np.searchsorted(T_IDXS, horizon))
    before = max(0, after - 1)
    step = T_IDXS[after] - T_IDXS[before]
    part = (horizon - T_IDXS[before]) / step if step else 0.0
    return away[:, before] * (1 - part) + away[:, after] * part


def _lines(figure: str) -> Any:
    near = np.array(X_IDXS) <= LANE_REACH

    def compare(parsed: Arrays, truth: NDArray[Any]) -> dict[str, NDArray[Any]]:
        name = figure.removesuffix("_error_m") + "s"
        _same_shape(name, parsed[name], truth)
        aside = np.abs(parsed[name] - truth)[..., 0][..., near]
        return {figure: aside.mean(axis=(1, 2))}

    return compare


def _lines_found(parsed: Arrays, truth: NDArray[Any]) -> dict[str, NDArray[Any]]:
    said = parsed["lane_lines_prob"]
    # Models give two numbers for each line, the second of which is its probability.
    said = said[:, 1::2] if said.shape[-1] == 2 * truth.shape[-1] else said
    _same_shape("lane_lines_prob", said, truth)
    return {"lane_lines_found": (said > _SURE) == (truth > _SURE)}


def _desires(parsed: Arrays, truth: NDArray[Any]) -> dict[str, NDArray[Any]]:
    _same_shape("desire_state", parsed["desire_state"], truth)
    return {"desire_accuracy": parsed["desire_state"].argmax(-1) == truth.argmax(-1)}


def _poses(parsed: Arrays, truth: NDArray[Any]) -> dict[str, NDArray[Any]]:
    _same_shape("pose", parsed["pose"], truth)
    away = parsed["pose"] - truth
    return {
        "pose_speed_error_mps": np.linalg.norm(away[:, :3], axis=-1),
        "pose_turn_error_radps": np.linalg.norm(away[:, 3:], axis=-1),
    }


_COMPARE = {
    "plan": _paths,
    "lane_lines": _lines("lane_line_error_m"),
    "road_edges": _lines("road_edge_error_m"),
    "lane_lines_prob": _lines_found,
    "desire_state": _desires,
    "pose": _poses,
}


def _same_shape(name: str, given: NDArray[Any], truth: NDArray[Any]) -> None:
    if given.shape != truth.shape:
        raise UsageError(f"{name}: predicted {given.shape}, labelled {truth.shape}")


def table(found: Mapping[str, Mapping[str, float]]) -> str:
    """Return the metrics of several models side by side, as text.

    Args:
        found: Results of `Figures.means` by model, in the order of the columns.
    """
    names = list(dict.fromkeys(name for figures in found.values() for name in figures))
    width = max([len(name) for name in names] + [6])
    lines = [" ".join([" " * width, *(f"{who:>12}" for who in found)])]
    for name in names:
        cells = (f"{f[name]:12.4g}" if name in f else f"{'-':>12}" for f in found.values())
        lines.append(" ".join([f"{name:<{width}}", *cells]))
    return "\n".join(lines)


def plot_path_errors(path: str | Path, found: Mapping[str, Mapping[str, float]]) -> None:
    """Plot the path errors by horizon.

    Args:
        path: File of the image, whose suffix is the format.
        found: Results of `Figures.means` by model.

    Raises:
        MissingExtraError: matplotlib is not installed.
        CheckpointError: The disk is full.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingExtraError("plots of path errors", "matplotlib", "docs") from error
    path = Path(path)
    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for who, means in found.items():
        axes.plot(HORIZONS, _by_horizon(means), marker="o", label=who)
    axes.set(xlabel="horizon (s)", ylabel="path error (m)", ylim=(0, None))
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing_file(path) as temporary:
        figure.savefig(temporary, format=path.suffix.removeprefix(".") or "png")


def _by_horizon(means: Mapping[str, float]) -> Sequence[float]:
    return [means.get(f"path_error_m@{horizon:g}s", float("nan")) for horizon in HORIZONS]
