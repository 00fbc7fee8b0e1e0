"""Figures against numbers worked out by hand."""

from pathlib import Path

import numpy as np
import pytest

from recipes.openpilot.constants import T_IDXS, X_IDXS
from recipes.openpilot.evaluate import HORIZONS, Figures, plot_path_errors, table
from recipes.openpilot.labels import LABEL_SHAPES
from recipes.openpilot.scene import Drive, DriveOptions
from tpuport.foundation.errors import UsageError

COUNT = 4


def truth() -> dict[str, np.ndarray]:
    drive = Drive(DriveOptions(10, seed=1, lead=1.0))
    rows = [drive.labels(0.5 * n) for n in range(COUNT)]
    made = {name: np.stack([row[name] for row in rows]) for name in LABEL_SHAPES}
    return made | {f"{name}_valid": np.ones(COUNT, bool) for name in LABEL_SHAPES}


def predicted(labels: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As `outputs.parse` gives it: two numbers for each line's probability."""
    made = {name: labels[name].astype(float) for name in LABEL_SHAPES}
    twice = np.zeros((COUNT, 8))
    twice[:, 1::2] = made["lane_lines_prob"]
    return made | {"lane_lines_prob": twice}


def means(parsed: dict, labels: dict) -> dict[str, float]:
    figures = Figures()
    figures.add(parsed, labels)
    return figures.means()


def test_what_is_true_has_no_error():
    labels = truth()
    found = means(predicted(labels), labels)
    right = {"lane_lines_found", "lead_found", "desire_accuracy"}
    assert {name for name, value in found.items() if value == 1} == right
    assert {value for name, value in found.items() if name not in right} == {0.0}
    assert f"path_error_m@{HORIZONS[-1]:g}s" in found


def test_errors_are_metres_at_a_time():
    """Off by a tenth of a metre a second forward, and three times that aside."""
    labels = truth()
    parsed = predicted(labels)
    times = np.array(T_IDXS)
    parsed["plan"][:, :, 0] += 0.1 * times
    parsed["plan"][:, :, 1] -= 0.3 * times
    parsed["plan"][:, :, 3] += 2.0
    found = means(parsed, labels)
    for horizon in HORIZONS:
        assert found[f"path_error_m@{horizon:g}s"] == pytest.approx(
            np.sqrt(0.1) * horizon, rel=1e-4
        )
    assert found["path_error_m"] == pytest.approx(np.sqrt(0.1) * 5, rel=1e-3)
    assert found["path_lateral_error_m"] == pytest.approx(0.3 * times.mean(), rel=1e-4)
    assert found["speed_error_mps"] == pytest.approx(2)


def test_lines_are_compared_up_to_where_they_are_seen():
    labels = truth()
    parsed = predicted(labels)
    far = np.array(X_IDXS) > 50
    parsed["lane_lines"][:, :, far, 0] += 100
    parsed["lane_lines"][:, 1, ~far, 0] += 0.4
    parsed["lane_lines"][..., 1] += 9  # how high they are does not count
    parsed["road_edges"][:, :, ~far, 0] -= 0.2
    parsed["lane_lines_prob"][:2, 1] = 0.1
    found = means(parsed, labels)
    assert found["lane_line_error_m"] == pytest.approx(0.1)
    assert found["road_edge_error_m"] == pytest.approx(0.2)
    assert found["lane_lines_found"] == pytest.approx(14 / 16)


def test_leads_count_where_there_is_one():
    labels = truth()
    parsed = predicted(labels)
    labels["lead_prob"][0] = 0
    parsed["lead"][0] += 1000
    parsed["lead"][1:, 0, 0, :3] += (3, 4, -2)
    parsed["lead_prob"][3] = 0.2
    found = means(parsed, labels)
    assert found["lead_distance_error_m"] == pytest.approx(5)
    assert found["lead_speed_error_mps"] == pytest.approx(2)
    assert found["lead_found"] == 0.5
    labels["lead_prob"][:] = 0
    assert "lead_distance_error_m" not in means(parsed, labels)


def test_the_best_of_several_paths_and_whether_it_was_chosen():
    labels = truth()
    parsed = predicted(labels)
    offsets = np.array([3.0, 1.0, 2.0])
    parsed["plan_hypotheses"] = np.stack([parsed["plan"]] * 3, axis=1)
    parsed["plan_hypotheses"][..., 1] += offsets[None, :, None]
    weights = np.array([[0.2, 0.7, 0.1], [0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]])
    parsed["plan_weights"] = weights[:, :, None]
    found = means(parsed, labels)
    assert found["best_hypothesis_error_m"] == pytest.approx(1, rel=1e-4)
    assert found["hypothesis_accuracy"] == 0.5


def test_only_what_is_labelled_counts_and_parts_add_up():
    labels = truth()
    parsed = predicted(labels)
    parsed["plan"][2] += 50
    parsed["plan"][1, :, 1] += 1
    labels["plan_valid"][2] = False
    whole, parts = Figures(), Figures()
    whole.add(parsed, labels)
    for part in (slice(0, 1), slice(1, 4)):
        parts.add({n: a[part] for n, a in parsed.items()}, {n: a[part] for n, a in labels.items()})
    assert whole.means() == pytest.approx(parts.means())
    assert whole.means()["path_error_m"] == pytest.approx(1 / 3, rel=1e-4)
    assert "path_error_m" not in means({"pose": parsed["pose"]}, labels)


def test_what_does_not_fit_is_refused():
    labels = truth()
    parsed = predicted(labels)
    with pytest.raises(UsageError, match="plan: 3 frames are predicted and 4 labelled"):
        means(parsed | {"plan": parsed["plan"][:3]}, labels)
    with pytest.raises(UsageError, match=r"plan: predicted \(4, 33, 5\), labelled \(4, 33, 15\)"):
        means(parsed | {"plan": parsed["plan"][..., :5]}, labels)


def test_models_are_shown_side_by_side(tmp_path: Path):
    labels = truth()
    good = means(predicted(labels), labels)
    bad = {**good, "path_error_m@2s": 1.25}
    del bad["pose_speed_error_mps"]
    lines = table({"base": bad, "student": good}).splitlines()
    assert lines[0].split() == ["base", "student"]
    (row,) = (line for line in lines if line.startswith("path_error_m@2s"))
    assert row.split() == ["path_error_m@2s", "1.25", "0"]
    (row,) = (line for line in lines if line.startswith("pose_speed_error_mps"))
    assert row.split()[1] == "-"
    pytest.importorskip("matplotlib")
    plot_path_errors(tmp_path / "deep" / "errors.png", {"base": bad, "student": good})
    assert (tmp_path / "deep" / "errors.png").read_bytes()[:4] == b"\x89PNG"
