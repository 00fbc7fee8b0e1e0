"""Compilation of the programs from a model's files and shapes alone, without a TPU."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import torch
from jax.sharding import PartitionSpec as P

import tpuport
from recipes.openpilot.constants import DEVICE_CAMERAS, Camera
from recipes.openpilot.contract import Kind
from recipes.openpilot.driving import FRAME_INPUTS, Driver, load_driver
from recipes.openpilot.frames import prepare_traced
from recipes.openpilot.geometry import Sampling
from recipes.openpilot.make_model import make_model
from recipes.openpilot.shards import FRAME_ARRAYS, LABEL_ARRAYS
from recipes.openpilot.teacher import BATCH, on_accelerator
from recipes.openpilot.train import (
    TrainOptions,
    by_window,
    check_spread,
    labels_of,
    make_loss,
    make_step,
    make_student,
)
from recipes.openpilot.windows import IMAGES, PROBABILITIES, SEEN
from tpuport.aot.report import CompileReport
from tpuport.foundation.errors import UsageError
from tpuport.sharding import ShardingRules, SpecRule, make_mesh

Shapes = dict[str, jax.ShapeDtypeStruct]
# The axis of drives or frames is sharded: the first axis of a state, the second of frames, whose
# first is time.
_BY_DRIVE = {"0.**": P("data"), "1.**": P(None, "data")}


def chips_of(topology: str) -> int:
    """Return the number of chips in a slice.

    Raises:
        UsageError: There is no such slice.
        MissingExtraError: libtpu is not installed.
    """
    return make_mesh({"data": -1}, topology).size


class Cameras(torch.nn.Identity):
    """A module without weights, which names the warp in a report."""


def compile_warp(
    camera: Camera,
    topology: str = "v6e-1",
    frames: int = BATCH,
    *,
    sampling: Sampling = "bilinear",
    **how: Any,
) -> CompileReport:
    """Compile the warp of camera frames to model images.

    Args:
        camera: Camera that the frames are from.
        topology: TPU slice, such as "v6e-1".
        frames: Frames in the batch, over all chips.
        sampling: See `frames.prepare_frames`.
        **how: Further arguments of `tpuport.compile_for`.

    Raises:
        UsageError: There is no such slice, or its chips do not divide the frames.
        MissingExtraError: libtpu is not installed.
    """
    check_spread(frames, chips_of(topology), "frames")
    size = (camera.width, camera.height)

    def warp(ported: Any, params: Any, buffers: Any, key: Any, *given: jax.Array) -> jax.Array:
        del ported, params, buffers, key
        return prepare_traced(*given, size=size, sampling=sampling)

    matrices = jax.ShapeDtypeStruct((frames, 3, 3), "float32")
    pixels = jax.ShapeDtypeStruct((frames, size[0] * size[1] * 3 // 2), "uint8")
    cameras = tpuport.convert(Cameras(), verify=False)
    rules = ShardingRules([], name="by frame", inputs={"**": P("data")})
    return _compiled(cameras, topology, (pixels, matrices, matrices), rules, method=warp, **how)


def compile_drive(
    model: Sequence[str | Path],
    topology: str = "v6e-1",
    batch_size: int = 8,
    frames: int = BATCH,
    **how: Any,
) -> CompileReport:
    """Compile a frozen model over frames, as for a teacher, with queues as inputs and outputs.

    Args:
        model: Files of the model.
        topology: TPU slice, such as "v6e-1".
        batch_size: Drives in the batch, over all chips.
        frames: Frames of each drive.
        **how: Further arguments of `tpuport.compile_for`.

    Raises:
        UsageError: The files are not those of one model, there is no such slice, or its chips do
            not divide the drives.
        CheckpointError: A file is damaged.
        MissingExtraError: libtpu is not installed.
    """
    check_spread(batch_size, chips_of(topology), "drives")
    driver = load_driver(model)
    drive = on_accelerator(driver.to("meta"))
    with torch.device("meta"):
        state = driver.begin(batch_size)
    given = {name: _shape(FRAME_ARRAYS[name], frames, batch_size) for name in FRAME_INPUTS}
    whole = SpecRule("**", P(), "replicated")
    rules = ShardingRules([whole], name="by drive", inputs=_BY_DRIVE)
    return _compiled(drive, topology, (state, given), rules, **how)


def compile_train(
    model: Sequence[str | Path],
    topology: str = "v6e-1",
    options: TrainOptions | None = None,
    **how: Any,
) -> CompileReport:
    """Compile the step of `train`, its windows sharded over the chips.

    `options.devices` is ignored.

    Args:
        model: Files of the model.
        topology: TPU slice, such as "v6e-1".
        options: Options of training, without a loss that needs a teacher.
        **how: Further arguments of `tpuport.compile_for`.

    Raises:
        UsageError: An argument does not fit, there is no such slice, or its chips do not divide the
            windows.
        CheckpointError: A file is damaged.
        MissingExtraError: libtpu is not installed.
    """
    options = options or TrainOptions()
    check_spread(options.batch_size, chips_of(topology))
    loss = make_loss(options, None)
    student = make_student(model, options.dora).to("meta")
    step = make_step(student, loss, replace(options, devices=1))
    return _compiled(step, topology, (window_shapes(student, options),), by_window(), **how)


def compile_program(
    program: str,
    model: Sequence[Path],
    topology: str,
    options: TrainOptions,
    frames: int = BATCH,
    **how: Any,
) -> CompileReport:
    """Compile one of the programs.

    Args:
        program: "warp" (of a tici's camera, which has as many pixels as any), "drive" or "train".
        model: Files of the model.
        topology: TPU slice, such as "v6e-1".
        options: Options of training. `batch_size` is also the number of drives.
        frames: Frames of each drive, or of each chip's cameras.
        **how: Further arguments of `tpuport.compile_for`.

    Raises:
        UsageError: An argument does not fit.
        CheckpointError: A file is damaged.
        MissingExtraError: libtpu is not installed.
    """
    match program:
        case "warp":
            camera = DEVICE_CAMERAS["tici", "unknown"].road
            return compile_warp(camera, topology, frames * chips_of(topology), **how)
        case "drive":
            return compile_drive(model, topology, options.batch_size, frames, **how)
        case "train":
            return compile_train(model, topology, options, **how)
    raise UsageError(f"program={program!r}: expected warp, drive or train")


@contextlib.contextmanager
def files_of(model: Sequence[Path] | None, generation: str, size: str) -> Iterator[Sequence[Path]]:
    """Yield a model's files, or temporary ones of a model with random weights."""
    if model:
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        yield make_model(folder, generation, size=size, fp16=True)


def window_shapes(student: Driver, options: TrainOptions) -> Shapes:
    """Return the shapes of a step's batch, (n, t, ...), as `windows.Windows` makes it."""
    lead = options.batch_size, options.warmup + options.length
    is_seen = options.see_once and student.kind is not Kind.STATEFUL
    names = [name for name in FRAME_INPUTS if not (is_seen and name in IMAGES)]
    found = {name: _shape(FRAME_ARRAYS[name], *lead) for name in names}
    for name in labels_of(options.losses):
        for one in (name, PROBABILITIES.get(name, name), f"{name}_valid"):
            found[one] = _shape(LABEL_ARRAYS[one], *lead)
    if is_seen:
        found |= {f"{SEEN}{name}": value for name, value in _seen_shapes(student, *lead).items()}
    return found


def _seen_shapes(student: Driver, *lead: int) -> Shapes:
    specs = [spec for spec in student.contracts[0].inputs if spec.name in student.image_inputs]
    with torch.device("meta"):
        images = {
            spec.name: torch.empty(*lead, *spec.shape, dtype=getattr(torch, spec.dtype))
            for spec in specs
        }
    return tpuport.convert(student, verify=False, methods=("see",)).eval_shape(images, method="see")


def _shape(array: tuple[str, tuple[int, ...]], *lead: int) -> jax.ShapeDtypeStruct:
    dtype, shape = array
    return jax.ShapeDtypeStruct((*lead, *shape), dtype)


def _compiled(
    program: Any, topology: str, inputs: tuple[Any, ...], rules: ShardingRules, **how: Any
) -> CompileReport:
    return tpuport.compile_for(
        program, topology, inputs=inputs, mesh={"data": -1}, rules=rules, **how
    )
