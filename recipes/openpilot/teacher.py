"""A model's outputs for every frame of a training set, stored on disk for distillation."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tpuport
from recipes.openpilot.contract import Kind, ModelContract, load_onnx, read_contract
from recipes.openpilot.driving import FRAME_INPUTS, Driver, Tensors, load_driver
from recipes.openpilot.outputs import parse
from recipes.openpilot.shards import open_arrays, open_shard
from recipes.records import check_record, digest_of
from tpuport.foundation.errors import CheckpointError, UsageError

FORMAT = "openpilot-teacher-1"
OUTPUTS = "outputs"
BATCH = 64


class OnnxGraph:
    """A file that onnxruntime computes on the host, row by row.

    Args:
        path: The file.
    """

    def __init__(self, path: str | Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(str(path), options)
        self.inputs = read_contract(path).inputs

    def compute(self, given: Mapping[str, torch.Tensor], wanted: Sequence[str]) -> Tensors:
        """Compute outputs from inputs, each (n, *its shape in the graph)."""
        if all(name in given for name in wanted):
            return {name: given[name] for name in wanted}
        rows = len(next(iter(given.values())))
        found: list[Any] = []
        for row in range(rows):
            values = {s.name: given[s.name][row].numpy().astype(s.dtype) for s in self.inputs}
            found.append(self.session.run(list(wanted), values))
        stacked = [torch.from_numpy(np.stack(each)) for each in zip(*found, strict=True)]
        floats = [v.float() if v.dtype.is_floating_point else v for v in stacked]
        return dict(zip(wanted, floats, strict=True))

    def frozen_frontier(self, given: Any) -> tuple[str, ...]:
        """Return the inputs themselves, since no part of this graph can be computed alone."""
        return tuple(given)


def onnx_driver(paths: Sequence[str | Path]) -> Driver:
    """Return a driver whose files onnxruntime computes, without torch or jax.

    Raises:
        UsageError: They are not the files of one model.
        CheckpointError: A file is damaged.
    """
    contracts: list[ModelContract] = [read_contract(load_onnx(path)) for path in paths]
    order = sorted(range(len(paths)), key=lambda i: contracts[i].kind is Kind.POLICY)
    return Driver([contracts[i] for i in order], [OnnxGraph(paths[i]) for i in order])


# Maps a state and frames to the state after them and outputs (t, n, all heads).
Drive = Callable[[Tensors, Tensors], tuple[Any, Any]]


def on_accelerator(driver: Driver) -> Drive:
    """Return a driver frozen and ported.

    The camera layers take all its frames in one batch.
    """
    driver.requires_grad_(False)
    return tpuport.convert(driver, verify=False)


def runs_of(run: np.ndarray) -> Iterator[slice]:
    """Yield the unbroken runs of frames, in order.

    Args:
        run: (t,) the number of each frame's run.
    """
    ends = np.flatnonzero(np.diff(run)) + 1
    edges = [0, *ends.tolist(), len(run)]
    yield from (slice(a, b) for a, b in itertools.pairwise(edges) if b > a)


def drive_all(
    driver: Driver, drive: Drive, arrays: Mapping[str, np.ndarray], *, batch: int = BATCH
) -> np.ndarray:
    """Compute the outputs of all frames of a segment, each run from an empty state.

    Args:
        driver: Driver that makes the states.
        drive: The driver itself, or the result of `on_accelerator`.
        arrays: `FRAME_INPUTS` and `run`, each (t, ...).
        batch: Number of frames per call. The last call is padded.

    Returns:
        (t, all heads), float32.
    """
    found = []
    for part in runs_of(arrays["run"]):
        state = driver.begin(1)
        for start in range(part.start, part.stop, batch):
            places = np.minimum(np.arange(start, start + batch), part.stop - 1)
            frames = {n: torch.from_numpy(arrays[n][places][:, None]) for n in FRAME_INPUTS}
            with torch.no_grad():
                state, outputs = drive(state, frames)
            found.append(tpuport.to_numpy(outputs)[: part.stop - start, 0])
    return np.concatenate(found).astype(np.float32)


def label(
    model: Sequence[str | Path],
    shards: Sequence[Path],
    out: str | Path,
    *,
    host: bool = False,
    batch: int = BATCH,
    done: Callable[[Path, int], None] | None = None,
) -> list[Path]:
    """Write a teacher's outputs for each segment. Outputs that exist are kept.

    Args:
        model: Files of the teacher.
        shards: Segments of a training set.
        out: Folder for this teacher's files.
        host: Whether to use onnxruntime instead of the accelerator.
        batch: See `drive_all`.
        done: Called with each segment that was written, and its number of frames.

    Returns:
        The files, one for each segment.

    Raises:
        UsageError: The folder is of another teacher, or a segment lacks an input of the model.
        CheckpointError: A file is damaged, or the disk is full.
    """
    out, paths = Path(out), [Path(path) for path in model]
    teacher = {"format": FORMAT, "model": digest_of(paths), "host": host}
    files = {shard: out / shard.name for shard in shards}
    check_record(
        out / "teacher.json",
        teacher,
        begun=any(path.is_file() for path in files.values()),
        what_to_do="give the model that it was begun with, or another folder",
    )
    driver = onnx_driver(paths) if host else load_driver(paths)
    drive: Drive = driver if host else on_accelerator(driver)
    table = {n: [part.start or 0, part.stop] for n, part in driver.slices.items()}
    for shard, path in files.items():
        digest = digest_of([shard])
        if path.is_file() and _metadata(path).get("shard") == digest:
            continue
        arrays = _frames(shard)
        outputs = drive_all(driver, drive, arrays, batch=1 if host else batch)
        said = {"format": FORMAT, "model": teacher["model"], "shard": digest}
        tpuport.save_checkpoint(
            path, {OUTPUTS: outputs}, metadata={**said, "slices": json.dumps(table)}
        )
        if done is not None:
            done(shard, len(outputs))
    return list(files.values())


def _frames(shard: Path) -> dict[str, np.ndarray]:
    wanted = (*FRAME_INPUTS, "run")
    with open_shard(shard) as file:
        missing = sorted(set(wanted) - set(file.keys()))
        if missing:
            raise UsageError(f"{shard} has no {', '.join(missing)}. What to do: prepare it again")
        return {name: file.get_tensor(name) for name in wanted}


def _metadata(path: Path) -> dict[str, str]:
    with open_arrays(path) as file:
        return dict(file.metadata() or {})


def read_outputs(path: str | Path) -> tuple[np.ndarray, dict[str, slice]]:
    """Read a teacher's outputs for a segment, and the slices of its heads.

    Args:
        path: A file that `label` wrote.

    Returns:
        The outputs (t, all heads), and the slices.

    Raises:
        CheckpointError: It is damaged, or something else.
    """
    with open_arrays(path) as file:
        said = dict(file.metadata() or {})
        if said.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} is of format {said.get('format')!r}: expected {FORMAT!r}, what `label`"
                " writes"
            )
        outputs = file.get_tensor(OUTPUTS)
    table: dict[str, list[int]] = json.loads(said["slices"])
    return outputs, {name: slice(*ends) for name, ends in table.items()}


def pseudo_labels(
    outputs: np.ndarray, slices: Mapping[str, slice], run: np.ndarray, warmup: int = 0
) -> dict[str, np.ndarray]:
    """Convert a teacher's outputs to labels of a training set.

    Args:
        outputs: (t, all heads).
        slices: Slices of the heads.
        run: (t,) of the training set.
        warmup: Number of frames at the start of a run that are no labels, while queues fill.

    Returns:
        `plan` (t, 33, 15), `lane_lines` (t, 4, 33, 2), ... and `NAME_valid` (t,).
    """
    heads = ("plan", "lane_lines", "lane_lines_prob", "road_edges", "lead", "lead_prob")
    parsed = parse(outputs, slices)
    found = {n: parsed[n] for n in (*heads, "desire_state", "pose") if n in parsed}
    if "lane_lines_prob" in found:
        found["lane_lines_prob"] = found["lane_lines_prob"][:, 1::2]
    valid = np.ones(len(outputs), bool)
    for part in runs_of(run):
        valid[part.start : min(part.start + warmup, part.stop)] = False
    return {**found, **{f"{name}_valid": valid.copy() for name in found}}
