"""Fine-tuning over time: adapters are trained on windows of drives and merged into the model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import optax
import torch
from jax.sharding import PartitionSpec as P

import tpuport
from recipes.openpilot.contract import Kind
from recipes.openpilot.driving import FRAME_INPUTS, Driver, Tensors, load_driver
from recipes.openpilot.losses import (
    LABEL_OF,
    LossWeights,
    distillation_terms,
    driving_terms,
    total_of,
)
from recipes.openpilot.outputs import predictions
from recipes.openpilot.student import DoraOptions, add_dora, choose_layers, merge
from recipes.openpilot.windows import LABELS, SEEN, TEACHER, Windows, teacher_slices, write_seen
from recipes.records import check_run, digest_of
from tpuport.foundation.errors import UsageError
from tpuport.sharding import ShardingRules, SpecRule, make_mesh
from tpuport.training import Batches, Checkpoints, JsonLines, TrainStep, fit, make_train_step

RECORD = "run.json"
# Options that may change when a run is resumed.
_FREE = ("save_every", "log_every", "devices")


@dataclass(frozen=True)
class TrainOptions:
    """The settings with which a driving model is fine-tuned.

    Attributes:
        dora: Adapters and their layers.
        losses: Weights of the losses. The path has the largest by default, as a likelihood pulls
            hardest at what is known best already.
        warmup: Frames before those in the loss, in which queues fill without gradients. 100 fill
            all queues, as in the car.
        length: Frames in the loss.
        every: Frames from one window to the next; by default `length`.
        truncate: Number of frames after which gradients stop, or None for all of `length`.
        steps: Training steps.
        batch_size: Windows per step, over all devices.
        devices: Number of devices over which windows are sharded, each with all weights; -1 for all
            devices.
        learning_rate: Highest learning rate, which decays to 0 as a cosine.
        clip_norm: Largest global norm of the gradients.
        remat: Whether to recompute frames in the backward pass instead of keeping them.
        see_once: Whether to compute the frozen layers' outputs for images once and store them.
        seed: Random seed of adapters and of the order of windows.
        save_every: Steps between checkpoints.
        log_every: Steps between lines of the log.
    """

    dora: DoraOptions = field(default_factory=DoraOptions)
    losses: LossWeights = field(default_factory=lambda: LossWeights(plan=0.1, path=1.0))
    warmup: int = 100
    length: int = 20
    every: int | None = None
    truncate: int | None = None
    steps: int = 200
    batch_size: int = 8
    devices: int = 1
    learning_rate: float = 1e-3
    clip_norm: float = 1.0
    remat: bool = False
    see_once: bool = True
    seed: int = 0
    save_every: int = 100
    log_every: int = 10

    def __post_init__(self) -> None:
        for name in ("length", "steps", "batch_size", "every", "truncate", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}={value}: expected 1 or more")
        if self.devices < 1 and self.devices != -1:
            raise UsageError(f"devices={self.devices}: expected 1 or more, or -1 for all there are")
        if self.warmup < 0 or self.learning_rate <= 0:
            raise UsageError(
                f"warmup={self.warmup}, learning_rate={self.learning_rate}: expected 0 or more, and"
                " a number above 0"
            )


@dataclass(frozen=True)
class SequenceLoss:
    """The loss of windows, called with a `Driver` and a batch (n, t, ...).

    Attributes:
        losses: Weights of the losses.
        warmup: Number of frames that are not in the loss.
        truncate: See `TrainOptions`.
        slices: Slices of a teacher's outputs, or None.
    """

    losses: LossWeights
    warmup: int
    truncate: int | None = None
    slices: Mapping[str, slice] | None = None

    def __call__(self, driver: Driver, batch: Tensors) -> tuple[torch.Tensor, Tensors]:
        """Return the loss, and each of its terms."""
        outputs = self.outputs(driver, batch)
        late = {n: v[:, self.warmup :].transpose(0, 1) for n, v in batch.items()}
        found = predictions(outputs, driver.slices)
        mask = torch.ones(outputs.shape[:2])
        terms = driving_terms(found, late, mask, self.losses) if labels_of(self.losses) else {}
        if self.slices is not None:
            teacher = predictions(late[TEACHER], self.slices)
            terms |= distillation_terms(found, teacher, mask, self.losses)
        return total_of(terms, self.losses), terms

    def outputs(self, driver: Driver, batch: Tensors) -> torch.Tensor:
        """Return the outputs (t, n, all heads) of the frames in the loss."""
        first = batch["desire"]
        rows, count = first.shape[:2]
        frames = {n: batch[n].transpose(0, 1) for n in FRAME_INPUTS if n in batch}
        seen = {n.removeprefix(SEEN): v.transpose(0, 1) for n, v in batch.items() if SEEN in n}
        state = driver.begin(rows)
        if self.warmup:
            with torch.no_grad():
                state, _ = driver(state, *_part(frames, seen, slice(0, self.warmup)))
            state = {name: value.detach() for name, value in state.items()}
        places = torch.arange(count - self.warmup)
        stops = (places % (self.truncate or count)) == 0
        rest = _part(frames, seen, slice(self.warmup, None))
        return driver(state, *rest, stops)[1]


def _part(frames: Tensors, seen: Tensors, part: slice) -> tuple[Tensors, Tensors | None]:
    late = {name: value[part] for name, value in seen.items()}
    return {name: value[part] for name, value in frames.items()}, late or None


def labels_of(losses: LossWeights) -> list[str]:
    """Return the labels that losses with a weight need."""
    wanted = {LABEL_OF.get(name, name) for name, weight in asdict(losses).items() if weight}
    return [name for name in LABELS if name in wanted]


def make_student(model: Sequence[str | Path], dora: DoraOptions) -> Driver:
    """Return a driver with adapters on the chosen layers and all else frozen.

    Args:
        model: Files of the model.
        dora: Adapters and their layers. A file in which no pattern matches is left frozen.

    Raises:
        UsageError: A pattern matches no layer in any file.
        CheckpointError: A file is damaged.
    """
    driver = load_driver(model)
    driver.requires_grad_(False)
    refused: list[UsageError] = []
    for graph in driver.graphs:
        try:
            choose_layers(graph, dora.layers, dora.rank)
        except UsageError as error:
            refused.append(error)
            continue
        add_dora(graph, dora)
    if len(refused) == len(driver.graphs):
        raise refused[-1]
    return driver


def make_step(driver: Driver, loss: Callable[..., Any], options: TrainOptions) -> TrainStep:
    """Return the training step of a student, on `options.devices`.

    Raises:
        UsageError: There are not so many devices.
    """
    driver.remat = options.remat
    ported = tpuport.convert(driver, verify=False)
    if (count := num_devices(options)) > 1:
        mesh = make_mesh({"data": count}, jax.devices()[:count])
        tpuport.shard(ported, mesh, by_window())
    rate = optax.cosine_decay_schedule(options.learning_rate, options.steps)
    return make_train_step(ported, loss, optax.adam(rate), clip_norm=options.clip_norm)


def num_devices(options: TrainOptions) -> int:
    """Return the number of devices over which windows are sharded.

    Raises:
        UsageError: There are not so many.
    """
    found = jax.device_count()
    if options.devices > found:
        raise UsageError(
            f"devices={options.devices}: there are {found}. What to do: give fewer, or -1 for all"
        )
    return found if options.devices == -1 else options.devices


def by_window() -> ShardingRules:
    """Return rules for a step: windows sharded along data, weights replicated."""
    return ShardingRules(
        [SpecRule("**", P(), "replicated")], name="by window", inputs={"**": P("data")}
    )


def check_spread(count: int, devices: int, what: str = "windows of a step") -> None:
    """Raise an error unless devices share windows, or other items, equally.

    Raises:
        UsageError: The devices do not divide the count.
    """
    if count % devices:
        raise UsageError(
            f"{count} {what} over {devices} devices: expected a multiple of {devices}. What to do:"
            " give another number of them, or of devices"
        )


def make_loss(options: TrainOptions, teacher: Sequence[Path] | None) -> SequenceLoss:
    """Return the loss of a run, with its teacher if the loss has a weight for one.

    Raises:
        UsageError: It has such a weight, and there is no teacher.
    """
    slices = None
    if options.losses.distill or options.losses.feature:
        if teacher is None:
            raise UsageError("the loss has a weight for a teacher, and none is given")
        slices = teacher_slices(teacher)
    return SequenceLoss(options.losses, options.warmup, options.truncate, slices)


def train(
    model: Sequence[str | Path],
    shards: Sequence[Path],
    out: str | Path,
    options: TrainOptions | None = None,
    *,
    teacher: Sequence[Path] | None = None,
) -> Driver:
    """Fine-tune a model, or resume if started again with the same arguments.

    It writes OUT/states, OUT/log.jsonl and, with `see_once`, OUT/seen.

    Args:
        model: Files of the model.
        shards: Segments of a training set.
        out: Folder of the run.
        options: Settings of training.
        teacher: A file of `teacher.label` for each segment, to distill from.

    Returns:
        The trained driver, with its adapters merged. Each of its `graphs` can be exported.

    Raises:
        UsageError: An argument does not fit, or the folder is of another run.
        CheckpointError: A file is damaged, or the disk is full.
    """
    options, out = options or TrainOptions(), Path(out)
    loss = make_loss(options, teacher)
    paths = [Path(path) for path in model]
    driver = make_student(paths, options.dora)
    _check_run(out, paths, shards, options)
    seen = None
    if options.see_once and driver.kind is not Kind.STATEFUL:
        seen = write_seen(driver, paths, shards, out / "seen")
    windows = Windows(
        shards,
        options.warmup + options.length,
        options.every or options.length,
        labels_of(options.losses),
        seen=seen,
        teacher=teacher,
    )
    batch_size = min(options.batch_size, len(windows))
    check_spread(batch_size, num_devices(options))
    step = make_step(driver, loss, options)
    batches = Batches(windows, batch_size=batch_size, shuffle=True, seed=options.seed)
    with Checkpoints(out / "states") as saved:
        state = fit(
            step,
            batches,
            steps=options.steps,
            checkpoints=saved,
            save_every=options.save_every,
            log_every=options.log_every,
            sinks=[JsonLines(out / "log.jsonl")],
        )
    trained: Any = step.load_state(state).to_torch()
    for graph in trained.graphs:
        merge(graph)
    return trained


def _check_run(
    out: Path, paths: Sequence[Path], shards: Sequence[Path], options: TrainOptions
) -> None:
    """Raise an error if the run was begun with other arguments."""
    check_run(
        out / RECORD,
        {"model": digest_of([*paths]), "shards": digest_of(list(shards)), **_told(options)},
        "give what the run was begun with, or another folder",
    )


def _told(options: TrainOptions) -> dict[str, Any]:
    """Return the options that a resumed run must have: all except those in `_FREE`."""
    said = asdict(options)
    said["dora"]["layers"] = list(options.dora.layers)
    return {name: said[name] for name in said if name not in _FREE}
