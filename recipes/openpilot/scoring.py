"""Whole models on a training set: their figures, their pictures, and what enters their files."""

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
    """The figures of models on the labels of a training set.

    Args:
        models: by name, the files of each.
        shards: segments, such as those of held-out routes.
        warmup: frames at the beginning of a segment that do not count, while queues fill.
        film: an .mp4 or .png to draw the first two models into, side by side, on the first segment.

    Returns:
        By name of the model and of the figure its mean, see `evaluate.Figures`.

    Raises:
        UsageError: a model or a segment does not fit.
        CheckpointError: a file is damaged, or the disk is full.
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
    """A graph that keeps what it is given.

    Args:
        graph: computes.
        names: of all its inputs.
    """

    def __init__(self, graph: Any, names: Sequence[str]) -> None:
        self._graph, self._names = graph, set(names)
        self.rows: list[Tensors] = []

    def compute(self, given: Tensors, wanted: Sequence[str]) -> Tensors:
        """As the graph, which sees whole rows only."""
        if {*given} >= self._names:
            self.rows.append({name: given[name] for name in self._names})
        return self._graph.compute(given, wanted)

    def frozen_frontier(self, given: Any) -> tuple[str, ...]:
        """As the graph."""
        return self._graph.frozen_frontier(given)


def real_rows(
    model: Sequence[str | Path], shard: str | Path, *, frames: int = 24, keep: int = 4
) -> list[list[Arrays]]:
    """What enters each file of a model on a drive.

    Args:
        model: its files.
        shard: a segment.
        frames: that are driven, so that queues are not empty.
        keep: how many rows, the last ones.

    Returns:
        For each file, in the order of `model`, rows as `exporting.export` takes them.
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
