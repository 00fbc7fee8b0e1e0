"""Evaluation of complete models on a training set: metrics, pictures, and real inputs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.openpilot import pictures
from recipes.openpilot.contract import read_contract
from recipes.openpilot.driving import FRAME_INPUTS, Driver, Tensors, load_driver
from recipes.openpilot.evaluate import Figures
from recipes.openpilot.outputs import parse
from recipes.openpilot.shards import read_shard
from recipes.openpilot.teacher import drive_all, on_accelerator, onnx_driver

Arrays = dict[str, np.ndarray]


def evaluate_models(
    models: Mapping[str, Sequence[str | Path]],
    shards: Sequence[Path],
    *,
    warmup: int = 0,
    film: str | Path | None = None,
) -> dict[str, dict[str, float]]:
    """Evaluate models on the labels of a training set.

    Args:
        models: Files of each model, by name.
        shards: Segments, such as those of held-out routes.
        warmup: Number of frames at the start of a segment that are left out, while queues fill.
        film: An .mp4 or .png that shows the first two models on the first segment, side by side.

    Returns:
        The mean of each metric, by the names of the model and of the metric, see
        `evaluate.Figures`.

    Raises:
        UsageError: A model or a segment does not fit.
        CheckpointError: A file is damaged, or the disk is full.
    """
    drivers = {name: load_driver([Path(p) for p in paths]) for name, paths in models.items()}
    drives = {name: on_accelerator(driver) for name, driver in drivers.items()}
    figures = {name: Figures() for name in models}
    for number, shard in enumerate(shards):
        arrays = read_shard(shard)
        labels = {name: value[warmup:] for name, value in arrays.items()}
        parsed = {}
        for name, driver in drivers.items():
            outputs = drive_all(driver, drives[name], arrays)
            parsed[name] = parse(outputs[warmup:], driver.slices)
            figures[name].add(parsed[name], labels)
        if film is not None and number == 0:
            before, after = (list(parsed.values()) * 2)[:2]
            images = pictures.model_images(labels["img"])
            frames = pictures.before_and_after(images, labels, before, after)
            pictures.save(film, frames, about={"models": list(models)[:2], "segment": shard.name})
    return {name: found.means() for name, found in figures.items()}


class _Recording:
    """A graph that records its inputs.

    Args:
        graph: The graph that computes.
        names: Names of all its inputs.
    """

    def __init__(self, graph: Any, names: Sequence[str]) -> None:
        self._graph, self._names = graph, set(names)
        self.rows: list[Tensors] = []

    def compute(self, given: Tensors, wanted: Sequence[str]) -> Tensors:
        """Compute as the graph does, and record calls that have all inputs."""
        if {*given} >= self._names:
            self.rows.append({name: given[name] for name in self._names})
        return self._graph.compute(given, wanted)

    def frozen_frontier(self, given: Any) -> tuple[str, ...]:
        """Return the graph's own frontier."""
        return self._graph.frozen_frontier(given)


def real_rows(
    model: Sequence[str | Path], shard: str | Path, *, frames: int = 24, keep: int = 4
) -> list[list[Arrays]]:
    """Return the inputs of each file of a model during a drive.

    Args:
        model: Files of the model.
        shard: The segment.
        frames: Number of frames to drive, so that queues are not empty.
        keep: Number of rows to return, the last ones.

    Returns:
        For each file, in the order of `model`, rows for `exporting.export`.
    """
    driver: Driver = onnx_driver(model)
    driver.graphs = [
        _Recording(graph, [spec.name for spec in contract.inputs])
        for graph, contract in zip(driver.graphs, driver.contracts, strict=True)
    ]
    arrays = read_shard(shard, [*FRAME_INPUTS, "run"])
    drive_all(driver, driver, {n: v[:frames] for n, v in arrays.items()}, batch=1)
    by_kind = {
        contract.kind: [
            {
                spec.name: torch.as_tensor(row[spec.name]).numpy().reshape(spec.shape)
                for spec in contract.inputs
            }
            for row in graph.rows[-keep:]
        ]
        for contract, graph in zip(driver.contracts, driver.graphs, strict=True)
    }
    return [by_kind[read_contract(path).kind] for path in model]
