"""Rewards of trajectories, computed on the host by a pool of processes.

This module does not import torch or jax, so that the processes start fast and need little memory.
"""

import importlib
import importlib.util
import lzma
import math
import multiprocessing
import os
import pickle
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from tpuport.foundation.errors import CheckpointError, UsageError

INTERVAL = 0.5  # s between poses
# Weights of the simulator's terms in upstream's training.
PROGRESS_WEIGHT, SAFETY_WEIGHT, COMFORT_WEIGHT = 10.0, 5.0, 2.0
# Distance from the driven path in metres at which closeness is 1/e.
CLOSENESS = 2.0
# nuPlan's comfort limits of accelerations (m/s^2) and of the yaw rate (rad/s).
MIN_ACCELERATION, MAX_ACCELERATION, MAX_SIDEWAYS, MAX_YAW_RATE = -4.05, 2.40, 4.89, 0.95


class Scorer(Protocol):
    """A function that rewards a scene's trajectories. It is pickled to other processes."""

    def __call__(self, token: str, trajectories: np.ndarray, true: np.ndarray) -> list[float]:
        """Return the rewards of trajectories (n, 8, 3), in metres and radians.

        Args:
            token: Name of the scene.
            trajectories: Trajectories to score.
            true: (8, 3), the driven trajectory.
        """
        ...


@dataclass(frozen=True)
class SimpleScorer:
    """A replacement of the simulator that knows only the drive, no road and no other car.

    (10 * progress + 5 * closeness + 2 * comfort) / 17, each from 0 to 1:
    - progress: distance of the end along the driven direction, relative to the drive's;
    - closeness: exp(-d / 2 m), d the mean distance to the driven poses;
    - comfort: the share of steps within nuPlan's limits of acceleration, along and sideways, and of
    yaw rate.
    """

    def __call__(self, token: str, trajectories: np.ndarray, true: np.ndarray) -> list[float]:
        """Return the rewards of trajectories (n, 8, 3)."""
        del token
        total = PROGRESS_WEIGHT + SAFETY_WEIGHT + COMFORT_WEIGHT
        found = (
            PROGRESS_WEIGHT * _progress(trajectories, true)
            + SAFETY_WEIGHT * _closeness(trajectories, true)
            + COMFORT_WEIGHT * _comfort(trajectories)
        )
        return (found / total).tolist()


def _progress(trajectories: np.ndarray, true: np.ndarray) -> np.ndarray:
    end = true[-1, :2]
    far = float(np.linalg.norm(end))
    if far < 0.5:  # the driven car stands still
        return np.ones(len(trajectories))
    return np.clip(trajectories[:, -1, :2] @ end / far**2, 0.0, 1.0)


def _closeness(trajectories: np.ndarray, true: np.ndarray) -> np.ndarray:
    distance = np.linalg.norm(trajectories[..., :2] - true[:, :2], axis=-1).mean(1)
    return np.exp(-distance / CLOSENESS)


def _comfort(trajectories: np.ndarray) -> np.ndarray:
    start = np.zeros_like(trajectories[:, :1])
    poses = np.concatenate([start, trajectories], axis=1)
    speed = np.linalg.norm(np.diff(poses[..., :2], axis=1), axis=-1) / INTERVAL
    yaw_rate = np.diff(np.unwrap(poses[..., 2], axis=1), axis=1) / INTERVAL
    along = np.diff(speed, axis=1) / INTERVAL
    sideways = (speed * yaw_rate)[:, 1:]
    good = (along >= MIN_ACCELERATION) & (along <= MAX_ACCELERATION)
    good &= (np.abs(sideways) <= MAX_SIDEWAYS) & (np.abs(yaw_rate[:, 1:]) <= MAX_YAW_RATE)
    return good.mean(1)


# -- navsim's simulator ----------------------------------------------------------------------------

# A metric cache may contain classes of these packages, and the listed names that rebuild paths,
# times, arrays and geometry. Names of the standard library are listed one by one, since its modules
# import functions by which a file reaches everything (`attrgetter` in pathlib is one).
_CLASSES_OF = {"navsim", "nuplan", "shapely"}
_LISTED = {
    *(("numpy.core.multiarray", name) for name in ("_reconstruct", "scalar")),
    *(("numpy._core.multiarray", name) for name in ("_reconstruct", "scalar")),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy._core.numeric", "_frombuffer"),
    *((module, "from_wkb") for module in ("shapely", "shapely.io", "shapely.lib")),
    ("shapely.wkb", "loads"),
    ("copyreg", "_reconstructor"),
    *(("numpy", name) for name in ("ndarray", "dtype")),
    *(("builtins", name) for name in ("object", "set", "frozenset", "slice", "complex", "range")),
    *(
        (module, name)
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath")
    ),
    *(("datetime", name) for name in ("date", "datetime", "time", "timedelta", "timezone")),
    *(("collections", name) for name in ("Counter", "OrderedDict", "defaultdict", "deque")),
}


class _CacheUnpickler(pickle.Unpickler):
    """An unpickler of the simulator's classes, which calls only what rebuilds them."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _LISTED:
            return super().find_class(module, name)
        if module.partition(".")[0] in _CLASSES_OF and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and _is_own(found, name):
                return found
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which is no class of navsim or nuplan"
        )


def _is_own(found: type, name: str) -> bool:
    """Return whether a class is defined by the simulator, not imported by one of its modules."""
    return found.__module__.partition(".")[0] in _CLASSES_OF and found.__name__ == name


# Errors that a damaged or foreign pickle causes in the unpickler.
_UNREADABLE = (
    *(OSError, EOFError, lzma.LZMAError, pickle.UnpicklingError, ImportError, AttributeError),
    *(ValueError, TypeError, IndexError, KeyError),
)


def read_metric_cache(path: str | Path) -> Any:
    """Read a scene's input of navsim's simulator from a file of run_metric_caching.py.

    Raises:
        CheckpointError: It is damaged, or names something else than the simulator's classes.
    """
    try:
        with lzma.open(path, "rb") as file:
            return _CacheUnpickler(file).load()
    except _UNREADABLE as error:
        raise CheckpointError(f"{path} was not read: {type(error).__name__}: {error}") from error


class PdmScorer:
    """navsim's PDM score, with the weights of upstream's training.

    Args:
        metric_cache: Folder that navsim's run_metric_caching.py wrote.

    Raises:
        UsageError: navsim is not installed, or there is no such folder.
    """

    def __init__(self, metric_cache: str | Path) -> None:
        missing = [n for n in ("navsim", "nuplan") if importlib.util.find_spec(n) is None]
        if missing:
            raise UsageError(
                f"reward='pdm' needs packages that are not installed: {', '.join(missing)}. What to"
                " do: install navsim (https://github.com/autonomousvision/navsim), or take"
                " reward='simple'"
            )
        self.metric_cache = Path(metric_cache)
        if not self.metric_cache.is_dir():
            raise UsageError(f"metric_cache={str(metric_cache)!r} is no folder")
        self._made: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}  # each process makes its own

    def __call__(self, token: str, trajectories: np.ndarray, true: np.ndarray) -> list[float]:
        """Return the PDM scores of trajectories (n, 8, 3)."""
        del true
        if self._made is None:
            self._made = self._make()
        paths, simulator, scorer, score, trajectory = self._made
        if token not in paths:
            raise UsageError(
                f"{self.metric_cache} has no scene {token!r}. What to do: cache the metrics of the"
                " same split"
            )
        cache = read_metric_cache(paths[token])
        results = [
            score(
                metric_cache=cache,
                model_trajectory=trajectory(poses),
                future_sampling=simulator.proposal_sampling,
                simulator=simulator,
                scorer=scorer,
            )
            for poses in trajectories.astype(np.float32)
        ]
        return [float(result.score) for result in results]

    def _make(self) -> Any:
        root = "navsim.planning.simulation.planner.pdm_planner"
        scoring = importlib.import_module(f"{root}.scoring.pdm_scorer")
        sampling = importlib.import_module(
            "nuplan.planning.simulation.trajectory.trajectory_sampling"
        ).TrajectorySampling(time_horizon=4, interval_length=0.1)
        weights = scoring.PDMScorerConfig(
            progress_weight=PROGRESS_WEIGHT,
            ttc_weight=SAFETY_WEIGHT,
            comfortable_weight=COMFORT_WEIGHT,
        )
        loader = importlib.import_module("navsim.common.dataloader")
        simulation = importlib.import_module(f"{root}.simulation.pdm_simulator")
        return (
            loader.MetricCacheLoader(self.metric_cache).metric_cache_paths,
            simulation.PDMSimulator(sampling),
            scoring.PDMScorer(sampling, weights),
            importlib.import_module("navsim.evaluate.pdm_score").pdm_score,
            importlib.import_module("navsim.common.dataclasses").Trajectory,
        )


# -- the pool --------------------------------------------------------------------------------------


# The scorer of this process of the pool, made once, since a simulator takes long to start.
_scorer: Scorer | None = None


def _keep(scorer: Scorer) -> None:
    global _scorer
    _scorer = scorer


def _score(token: str, trajectories: np.ndarray, true: np.ndarray) -> list[float]:
    assert _scorer is not None, "the pool has not started this process"
    return _scorer(token, trajectories, true)


class RewardPool:
    """A pool of processes that score scenes while this process continues.

        with RewardPool(SimpleScorer(), workers=4) as pool:
            pending = pool.submit(tokens, trajectories, true)
            ...
            rewards = pending.result()  # (scenes, samples)

    Args:
        scorer: Scores a scene. Each process gets it once, and keeps it.
        workers: Number of spawned processes; 0 scores in a thread of this one; None for one per
            core, at most 8.
    """

    def __init__(self, scorer: Scorer, workers: int | None = None) -> None:
        self._score = _score if workers != 0 else scorer
        workers = min(os.cpu_count() or 1, 8) if workers is None else workers
        self._pool: ProcessPoolExecutor | ThreadPoolExecutor
        if workers:
            # spawn, since a forked process may inherit a lock that jax holds.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                workers, mp_context=context, initializer=_keep, initargs=(scorer,)
            )
        else:
            self._pool = ThreadPoolExecutor(1)

    def submit(
        self, tokens: Sequence[str], trajectories: np.ndarray, true: np.ndarray
    ) -> "Pending":
        """Start scoring.

        Args:
            tokens: Names of the scenes.
            trajectories: (scenes, samples, 8, 3), metres and radians.
            true: (scenes, 8, 3), the driven trajectories.
        """
        trajectories, true = np.asarray(trajectories), np.asarray(true)
        given = zip(tokens, trajectories, true, strict=True)
        return Pending(list(tokens), [self._pool.submit(self._score, *one) for one in given])

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True)
class Pending:
    """Rewards that are being computed."""

    tokens: list[str]
    futures: list[Future[list[float]]]

    def result(self) -> np.ndarray:
        """Wait for the rewards, (scenes, samples) float32.

        Raises:
            UsageError: A reward is not finite.
            Exception: Raised by scoring.
        """
        rewards = [future.result() for future in self.futures]
        for token, found in zip(self.tokens, rewards, strict=True):
            if not all(map(math.isfinite, found)):
                raise UsageError(f"the rewards of scene {token!r} are {found}: expected numbers")
        return np.asarray(rewards, np.float32)
