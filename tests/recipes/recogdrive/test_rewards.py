"""Rewards: what the simple one prefers, the pool, and that no code of a metric cache runs."""

import collections
import datetime
import lzma
import os
import pickle
import sys
import types
from pathlib import PurePosixPath

import numpy as np
import pytest

from recipes.recogdrive import make_data, rewards
from recipes.recogdrive.grpo import advantages, make_scorer
from tpuport.foundation.errors import CheckpointError, UsageError


def driven() -> np.ndarray:
    scene = make_data.Scene("log", "0" * 16, 8.0, 0.2, 0.01)
    return scene.trajectory().numpy()


def scored(*trajectories: np.ndarray) -> list[float]:
    return rewards.SimpleScorer()("token", np.stack(trajectories), driven())


def test_what_was_driven_has_the_whole_reward():
    assert scored(driven()) == [pytest.approx(1.0)]


def test_each_way_of_driving_worse_costs():
    true = driven()
    off, short, jerky = true.copy(), true.copy(), true.copy()
    off[:, 1] += 2.0
    short *= 0.5
    jerky[::2, 0] += 3.0
    standing = np.zeros_like(true)
    found = scored(true, off, short, jerky, standing)
    assert all(one < found[0] - 0.05 for one in found[1:])
    assert min(found) == found[-1]
    assert all(0 <= one <= 1 for one in found)


def test_the_terms_are_those_that_are_documented():
    off = driven()
    off[:, 1] += (
        2.0  # 2 m off all the way: closeness is 1/e, progress a little above what was asked
    )
    rest = (10 * 1.0 + 5 * np.exp(-1.0) + 2 * 1.0) / 17
    assert scored(off) == [pytest.approx(rest)]


def test_standing_where_the_drive_stood_is_progress():
    still = np.zeros((8, 3))
    assert rewards.SimpleScorer()("token", still[None], still) == [pytest.approx(1.0)]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_pool_gives_each_scene_its_rewards(workers):
    scenes = make_data.make_scenes(3)
    true = np.stack([scene.trajectory().numpy() for scene in scenes])
    samples = np.repeat(true[:, None], 2, axis=1)
    samples[:, 1, :, 1] += 1.0
    with rewards.RewardPool(rewards.SimpleScorer(), workers) as pool:
        found = pool.submit([s.token for s in scenes], samples, true).result()
    assert found.shape == (3, 2)
    np.testing.assert_allclose(found[:, 0], 1.0, rtol=1e-6)
    assert (found[:, 1] < 0.95).all()


class Counted:
    """Scores a scene by how often its process has been given a scorer."""

    given = 0

    def __setstate__(self, state):
        Counted.given += 1

    def __getstate__(self):
        return {"some": "state"}

    def __call__(self, token, trajectories, true):
        return [float(Counted.given)]


def test_a_process_gets_its_scorer_once():
    true = np.stack([driven()] * 3)
    with rewards.RewardPool(Counted(), 1) as pool:
        found = [pool.submit(["a", "b", "c"], true[:, None], true).result() for _ in range(2)]
    np.testing.assert_array_equal(found, np.ones((2, 3, 1)))


def test_a_reward_that_is_no_number_names_its_scene():
    true = driven()[None]
    with rewards.RewardPool(rewards.SimpleScorer(), 0) as pool:
        pending = pool.submit(["scene7"], np.full((1, 2, 8, 3), np.nan), true)
        with pytest.raises(UsageError, match=r"the rewards of scene 'scene7' are \[nan, nan\]"):
            pending.result()


def test_advantages_are_in_standard_deviations_of_a_scene():
    found = advantages(np.array([[0.0, 1.0, 2.0], [5.0, 5.0, 5.0]]))
    np.testing.assert_allclose(found, [[-1, 0, 1], [0, 0, 0]], atol=1e-6)


class Shell:
    def __reduce__(self):
        return os.system, ("exit 1",)


@pytest.mark.parametrize(
    ("value", "named"), [(Shell(), "posix.system"), (np.memmap, "numpy.memmap")]
)
def test_a_metric_cache_runs_no_code(tmp_path, value, named):
    path = tmp_path / "metric_cache.pkl"
    path.write_bytes(lzma.compress(pickle.dumps({"x": value})))
    with pytest.raises(CheckpointError, match=f"names {named}, which is no class of navsim"):
        rewards.read_metric_cache(path)


# Pickles that ask by two steps for a function: pathlib has `attrgetter`, by which a method leads to
# the builtins of its module, and collections has `_itemgetter`.
REACHING = (
    b"cpathlib\nattrgetter\n(V__init__.__globals__\ntR(ccollections\nCounter\ntRp0\n"
    b"0ccollections\n_itemgetter\n(V__builtins__\ntR(g0\ntRp1\n"
    b"0ccollections\n_itemgetter\n(Vexec\ntR(g1\ntR(Vraise SystemExit('code ran')\ntR."
)


@pytest.mark.parametrize(
    ("payload", "named"),
    [
        (REACHING, "pathlib.attrgetter"),
        (b"ccollections\n_itemgetter\n(V0\ntR.", "collections._itemgetter"),
        (b"cshapely\nCallable\n.", "shapely.Callable"),
    ],
)
def test_what_a_module_has_imported_is_not_reached_through_it(
    tmp_path, monkeypatch, payload, named
):
    module = types.ModuleType("shapely")
    vars(module)["Callable"] = types.FunctionType  # a class, but none of shapely's
    monkeypatch.setitem(sys.modules, "shapely", module)
    path = tmp_path / "metric_cache.pkl"
    path.write_bytes(lzma.compress(payload))
    with pytest.raises(CheckpointError, match=f"names {named}, which is no class of navsim"):
        rewards.read_metric_cache(path)


@pytest.mark.parametrize(
    "payload", [b"cpathlib\nnothing\n.", b"cnavsim.no\nA\n.", b"garbage", b"0."]
)
def test_a_damaged_metric_cache_is_named(tmp_path, payload):
    path = tmp_path / "metric_cache.pkl"
    path.write_bytes(lzma.compress(payload))
    with pytest.raises(CheckpointError, match=r"metric_cache\.pkl was not read|names pathlib"):
        rewards.read_metric_cache(path)


def test_classes_of_the_simulator_are_read(tmp_path, monkeypatch):
    module = types.ModuleType("navsim.cached")
    cached = type("Cached", (), {"__module__": "navsim.cached"})
    vars(module)["Cached"] = cached
    monkeypatch.setitem(sys.modules, "navsim", types.ModuleType("navsim"))
    monkeypatch.setitem(sys.modules, "navsim.cached", module)
    one = cached()
    when = datetime.datetime(2024, 5, 1, tzinfo=datetime.UTC)
    vars(one).update(when=when, lanes=collections.OrderedDict(a=[1.0]))
    path = tmp_path / "metric_cache.pkl"
    path.write_bytes(lzma.compress(pickle.dumps(one)))
    found = rewards.read_metric_cache(path)
    assert type(found) is cached
    assert vars(found) == vars(one)


def test_a_metric_cache_of_arrays_and_paths_is_read(tmp_path):
    path = tmp_path / "metric_cache.pkl"
    given = {"poses": np.arange(6.0), "name": PurePosixPath("a/b"), "seen": {1, 2}}
    path.write_bytes(lzma.compress(pickle.dumps(given)))
    found = rewards.read_metric_cache(path)
    np.testing.assert_array_equal(found.pop("poses"), given.pop("poses"))
    assert found == given


def test_the_simulator_needs_navsim(tmp_path):
    with pytest.raises(UsageError, match="reward='pdm' needs packages that are not installed: "):
        make_scorer("pdm", tmp_path)
    with pytest.raises(UsageError, match="needs metric_cache="):
        make_scorer("pdm", None)
    with pytest.raises(UsageError, match="reward='fast': expected 'simple' or 'pdm'"):
        make_scorer("fast", None)  # type: ignore[arg-type]


def test_the_simulator_is_called_as_upstream_calls_it(tmp_path, monkeypatch):
    """With stand-ins for navsim and nuplan, which are not installed where this runs."""
    calls = []
    cached = tmp_path / "scene.pkl"
    cached.write_bytes(lzma.compress(pickle.dumps({"map": 1})))
    simulator = lambda sampling: types.SimpleNamespace(proposal_sampling=sampling)  # noqa: E731
    loader = lambda path: types.SimpleNamespace(metric_cache_paths={"token": cached})  # noqa: E731

    def score(**given):
        calls.append(given)
        return types.SimpleNamespace(score=0.25 * len(calls))

    root = "navsim.planning.simulation.planner.pdm_planner"
    parts = {
        f"{root}.scoring.pdm_scorer": {"PDMScorerConfig": dict, "PDMScorer": lambda *a: a},
        f"{root}.simulation.pdm_simulator": {"PDMSimulator": simulator},
        "nuplan.planning.simulation.trajectory.trajectory_sampling": {"TrajectorySampling": dict},
        "navsim.common.dataloader": {"MetricCacheLoader": loader},
        "navsim.common.dataclasses": {"Trajectory": lambda poses: poses},
        "navsim.evaluate.pdm_score": {"pdm_score": score},
    }
    for name, attributes in parts.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(rewards.importlib.util, "find_spec", lambda name: object())
    scorer = make_scorer("pdm", tmp_path)
    poses = np.zeros((2, 8, 3))
    assert scorer("token", poses, poses[0]) == [0.25, 0.5]
    weights = {"progress_weight": 10.0, "ttc_weight": 5.0, "comfortable_weight": 2.0}
    sampling = {"time_horizon": 4, "interval_length": 0.1}
    assert calls[0]["scorer"] == (sampling, weights)
    assert calls[0]["future_sampling"] == sampling
    assert calls[0]["metric_cache"] == {"map": 1}
    assert calls[0]["model_trajectory"].dtype == np.float32
    with pytest.raises(UsageError, match="has no scene 'other'"):
        scorer("other", poses, poses[0])
