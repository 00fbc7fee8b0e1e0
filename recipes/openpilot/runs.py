"""Runs from the command line: their arguments and their model files."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.openpilot.contract import Kind, read_contract
from recipes.openpilot.exporting import ExportReport, export
from recipes.openpilot.losses import LossWeights
from recipes.openpilot.scoring import real_rows
from recipes.openpilot.shards import find_shards
from recipes.openpilot.student import DoraOptions
from recipes.openpilot.train import TrainOptions, train
from tpuport.foundation.errors import UsageError
from tpuport.foundation.files import replacing_file

ARGUMENTS = "arguments.json"


@dataclass(frozen=True)
class Run:
    """The arguments of a run.

    Attributes:
        model: Files that are fine-tuned.
        data: Folder of a training set.
        teacher: Folder that `label` wrote, or None.
        options: Settings of training.
    """

    model: tuple[str, ...]
    data: str
    teacher: str | None = None
    options: TrainOptions = dataclasses.field(default_factory=TrainOptions)

    def begin(self, folder: str | Path) -> Any:
        """Train or resume training, and return the trained driver.

        Raises:
            UsageError: An argument does not fit, or the folder is of another run.
            CheckpointError: A file is damaged, or the disk is full.
        """
        shards = find_shards(self.data)
        teacher = None
        if self.teacher is not None:
            teacher = [Path(self.teacher) / shard.name for shard in shards]
        folder = Path(folder)
        trained = train(self.model, shards, folder, self.options, teacher=teacher)
        with replacing_file(folder / ARGUMENTS) as temporary:
            text = json.dumps(dataclasses.asdict(self), indent=1) + "\n"
            temporary.write_text(text, encoding="utf-8")
        return trained


def open_run(folder: str | Path) -> Run:
    """Return the run that a folder has.

    Raises:
        UsageError: There is none.
    """
    path = Path(folder) / ARGUMENTS
    try:
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        given = dict(found["options"])
        given["dora"] = DoraOptions(**{**given["dora"], "layers": tuple(given["dora"]["layers"])})
        given["losses"] = LossWeights(**given["losses"])
        options = TrainOptions(**given)
        return Run(tuple(found["model"]), found["data"], found["teacher"], options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is no run that can be read: {error!r}. What to do: begin with `train`"
        ) from error


def export_run(folder: str | Path, out: str | Path) -> list[ExportReport]:
    """Write the model files of a run, under the names of the original files.

    Each is compared with the trained module on frames of the training set.

    Args:
        folder: Folder of the run. Missing steps are trained first, on one device.
        out: Folder to write to, other than that of the original files.

    Raises:
        UsageError: There is no such run.
        CheckpointError: The contract of a file would change, a file computes something else than
            the module, or the disk is full.
    """
    run, out = open_run(folder), Path(out)
    paths = [Path(path) for path in run.model]
    if out.resolve() in {path.resolve().parent for path in paths}:
        raise UsageError(
            f"out={out}: the original files are there. What to do: give another folder"
        )
    alone = dataclasses.replace(run.options, devices=1)
    driver = dataclasses.replace(run, options=alone).begin(folder)
    rows = real_rows(paths, find_shards(run.data)[0])
    order = _in_order(paths)
    return [
        export(driver.graphs[order.index(path)], path, out / path.name, rows=given)
        for path, given in zip(paths, rows, strict=True)
    ]


def _in_order(paths: Sequence[Path]) -> list[Path]:
    """Return the files in the order of a driver's graphs: vision before policy."""
    return sorted(paths, key=lambda path: read_contract(path).kind is Kind.POLICY)
