"""Training of the model of size `pretrained` from scratch, on roads that are drawn while it learns.

Pictures are drawn as a camera as coarse as `make_data`'s sees them and warped to the model's image,
but not encoded. Only the road camera is: the model learns to drive by it alone, in half the time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optax
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import Dataset

import tpuport
from recipes.openpilot import geometry
from recipes.openpilot.constants import (
    DT_MDL,
    MODEL_CAMERA_HEIGHT,
    MODEL_HEIGHT,
    MODEL_INTRINSICS,
    MODEL_WIDTH,
    PLAN_WIDTH,
    TEMPORAL_SKIP,
)
from recipes.openpilot.drawing import Bytes, Painter
from recipes.openpilot.frames import prepare_frames
from recipes.openpilot.generations import FEATURE_LEN, GENERATIONS
from recipes.openpilot.losses import LossWeights, driving_terms, total_of
from recipes.openpilot.outputs import Mdn, predictions
from recipes.openpilot.scene import Drive, DriveOptions
from recipes.openpilot.small_model import PRETRAINED, DrivingModel, build
from tpuport.training import Batches, JsonLines, fit, make_train_step

GENERATION = "2026-07"
LOSSES = LossWeights(plan=1.0, path=0.3, lane_lines=1.0, road_edges=1.0, lead=0.2,
                     desire_state=0.1, pose=0.3)  # fmt: skip
_SALT = 20_263
# A camera that sees what is in the model's image, as coarse as a mici's at half its size.
_SIZE, _LEVEL = (320, 160), (0.0, 0.0, 0.0)
PATCHES, _PATCH = "patches", 4
MOMENTS = (0.0, 1.6, 3.2, 4.8)  # s, at which a drive is seen
_ENTRY = TEMPORAL_SKIP * DT_MDL  # s between two entries of the buffer of features


@dataclass(frozen=True)
class PretrainOptions:
    """The settings with which the model is trained.

    Attributes:
        steps: Training steps.
        drives: Drives to draw.
        batch_size: Drives per step, each seen at four moments.
        learning_rate: Highest learning rate, which decays to 0 as a cosine.
        seed: Random seed of the weights and the roads.
    """

    steps: int = 1400
    drives: int = 2000
    batch_size: int = 8
    learning_rate: float = 2.5e-3
    seed: int = 0


class Roads(Dataset[dict[str, Any]]):
    """Drives on roads of all kinds, each seen at a few moments, and each once more in a mirror.

    A drive is drawn when it is first read, and kept: that takes 0.4 MB for each of its moments.

    Args:
        count: Number of drives.
        seed: Random seed.
    """

    def __init__(self, count: int, seed: int = 0) -> None:
        self.count, self.seed = count, seed
        self._drawn: dict[int, dict[str, NDArray[Any]]] = {}

    def __len__(self) -> int:
        return 2 * self.count

    def drive(self, number: int) -> Drive:
        """Return a drive."""
        draw = np.random.default_rng((_SALT, self.seed, number)).uniform
        speed = draw(12, 18)
        return Drive(
            DriveOptions(
                seconds=MOMENTS[-1],
                seed=int(draw(0, 2**31)),
                speeds=(speed, speed),
                curvature=draw(0.001, 0.012),
                lane=draw(2.6, 4.0),
                height=MODEL_CAMERA_HEIGHT * draw(0.97, 1.03),
                sway=draw(0.0, 0.4),
            )
        )

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, mirror = divmod(index, 2)
        if number not in self._drawn:
            light = _Light(np.random.default_rng((_SALT, self.seed, number, 1)))
            self._drawn[number] = sample(self.drive(number), light)
        return mirrored(self._drawn[number]) if mirror else self._drawn[number]


def labels_of(drive: Drive) -> dict[str, NDArray[np.float32]]:
    """Return the labels of a drive's moments, each (4, ...)."""
    each = [drive.labels(time) for time in MOMENTS]
    return {name: np.stack([one[name] for one in each]) for name in each[0]}


def sample(drive: Drive, light: "_Light | None" = None) -> dict[str, NDArray[Any]]:
    """Return pictures, labels and other inputs of a drive's moments, each (4, ...).

    Args:
        drive: The drive.
        light: Changes the pictures.
    """
    labels = labels_of(drive)
    known = {f"{name}_valid": np.ones(len(MOMENTS), bool) for name in labels}
    given = {
        "traffic_convention": np.tile(np.array([1, 0], np.float32), (len(MOMENTS), 1)),
        "action_t": np.full((len(MOMENTS), 2), 0.2, np.float32),
    }
    return {PATCHES: patches(pictures(drive, MOMENTS, light)), **labels, **known, **given}


def patches(images: Bytes) -> Bytes:
    """Return what each step of the first convolution sees: (n, 12, 4 h, 4 w) to (n, h, w, 192)."""
    count, channels, high, wide = images.shape
    parts = images.reshape(count, channels, high // _PATCH, _PATCH, wide // _PATCH, _PATCH)
    moved = np.ascontiguousarray(parts.transpose(0, 2, 4, 1, 3, 5))
    return moved.reshape(count, high // _PATCH, wide // _PATCH, -1)


def mirrored(seen: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return a sample with left and right exchanged."""
    found = dict(seen)
    found[PATCHES] = seen[PATCHES][:, :, ::-1].take(_MIRRORED, axis=-1)
    found["traffic_convention"] = seen["traffic_convention"][:, ::-1].copy()
    found["plan"] = seen["plan"] * _SIDEWAYS
    # y is the first number of a place on a line, and the second of one of a lead.
    for name in ("lane_lines", "road_edges"):
        found[name] = seen[name][:, ::-1] * np.array([-1, 1], np.float32)
    found["lead"] = seen["lead"] * np.array([1, -1, 1, 1], np.float32)
    found["pose"] = seen["pose"] * np.array([1, -1, 1, -1, 1, -1], np.float32)
    return found


def _mirrored_places() -> NDArray[np.intp]:
    """Return where the numbers of a patch come from in a mirror.

    Even columns of Y become odd ones: the first two of a frame's six planes change places with the
    next two.
    """
    places = np.arange(2 * 6 * _PATCH * _PATCH).reshape(2, 6, _PATCH, _PATCH)
    return places[:, [2, 3, 0, 1, 4, 5], :, ::-1].ravel()


_MIRRORED = _mirrored_places()
# y and its derivatives, and turning about the other two axes.
_SIDEWAYS = np.where(np.isin(np.arange(PLAN_WIDTH), (1, 4, 7, 9, 11, 12, 14)), -1, 1).astype("f4")


class _Light:
    """The brightness and the noise of a drive's pictures."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator
        gain, lift = generator.uniform(0.7, 1.1), generator.uniform(-10, 10)
        self._table = np.clip(np.arange(256) * gain + lift, 0, 255).astype(np.float32)
        self._noise = generator.normal(0, generator.uniform(0, 5), 1 << 16).astype(np.float32)

    def __call__(self, image: Bytes) -> Bytes:
        """Return a picture as it is in this light."""
        luma = _SIZE[0] * _SIZE[1]
        start = self._generator.integers(0, len(self._noise))
        lit = image.astype(np.float32)
        lit[:luma] = self._table[image[:luma]]
        lit += np.resize(np.roll(self._noise, start), len(lit))
        return np.clip(np.round(lit), 0, 255).astype(np.uint8)


def pictures(drive: Drive, times: Sequence[float], light: _Light | None = None) -> Bytes:
    """Return `img` at times in s (n, 12, 128, 256): the older frame, then the newer."""
    camera = geometry.scaled_intrinsics(MODEL_INTRINSICS, (MODEL_WIDTH, MODEL_HEIGHT), _SIZE)
    painter = Painter(camera, _SIZE, _LEVEL, height=drive.options.height)
    painted = [painter.paint(drive, t - back) for t in times for back in (_ENTRY, 0.0)]
    if light is not None:
        painted = [light(one) for one in painted]
    matrices = np.stack([geometry.warp_matrix(_LEVEL, camera)] * len(painted))
    packed = np.asarray(prepare_frames(np.stack(painted), matrices, _SIZE))
    return packed.reshape(len(times), -1, *packed.shape[2:])


def history(entries: int) -> NDArray[np.int64]:
    """Return which moment's feature is in each entry of the buffer (4, entries), -1 for none.

    The moments are further apart than the entries, each of which has the newest one before it.
    """
    moments = np.array(MOMENTS)
    times = moments[:, None] - _ENTRY * np.arange(entries, 0, -1)
    return np.searchsorted(moments, times + 1e-6, "right") - 1


class Moments(nn.Module):
    """The model at several moments of drives, whose buffers have the features of earlier ones.

    Args:
        model: The model.
        center: (all heads,), what is added to the outputs.
        scale: (all heads,), by what the outputs are multiplied before.
    """

    center: torch.Tensor
    scale: torch.Tensor
    earlier: torch.Tensor

    def __init__(self, model: DrivingModel, center: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("center", center)
        self.register_buffer("scale", scale)
        entries = model.kind.buffers["features_buffer"][1]
        self.register_buffer("earlier", torch.from_numpy(history(entries)))

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Map drives, each (n, 4, ...), to their outputs (n, 4, all heads)."""
        rows, moments = batch[PATCHES].shape[:2]
        road = self.model.road(batch[PATCHES].flatten(0, 1).float())
        feature = self.model.summarizer(road, torch.zeros_like(road))
        each = feature.unflatten(0, (rows, moments))
        # One more, of zeros, is what -1 takes.
        known = torch.cat([each, torch.zeros(rows, 1, FEATURE_LEN)], dim=1)
        count = rows * moments
        buffers = {
            "features_buffer": known[:, self.earlier].flatten(0, 1),
            "desire_pulse": torch.zeros(count, *self.model.kind.buffers["desire_pulse"][1:]),
            **{name: batch[name].flatten(0, 1) for name in ("traffic_convention", "action_t")},
        }
        outputs = self.model.say(feature, buffers) * self.scale + self.center
        return outputs.unflatten(0, (rows, moments))


class Product(nn.Module):
    """A convolution that is computed as another product while the model is trained.

    Args:
        conv: The convolution.
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv


class Patches(Product):
    """A convolution whose stride is its kernel, as one product over patches that are given.

    Of this and of `Dense`, XLA computes the gradient on a CPU several times as fast as of the
    convolutions themselves.

    Args:
        conv: The convolution.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `patches` (n, h, w, in) to (n, out, h, w)."""
        return F.linear(x, self.conv.weight.flatten(1), self.conv.bias).permute(0, 3, 1, 2)


class Dense(Product):
    """A depthwise convolution, computed as a dense one that has zeros between channels.

    Args:
        conv: The convolution.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (n, c, h, w) to (n, c, h / stride, w / stride)."""
        alone = torch.eye(self.conv.out_channels)[:, :, None, None]
        conv = self.conv
        return F.conv2d(x, alone * conv.weight, conv.bias, conv.stride, conv.padding)


def as_products(model: nn.Module) -> None:
    """Replace convolutions by `Patches` and `Dense`, in place."""
    for parent in list(model.modules()):
        for name, conv in list(parent.named_children()):
            if not isinstance(conv, nn.Conv2d):
                continue
            if conv.groups > 1:
                setattr(parent, name, Dense(conv))
            elif conv.stride == conv.kernel_size != (1, 1):
                setattr(parent, name, Patches(conv))


def as_convolutions(model: nn.Module) -> None:
    """Undo `as_products`."""
    for parent in list(model.modules()):
        for name, one in list(parent.named_children()):
            if isinstance(one, Product):
                setattr(parent, name, one.conv)


def loss(moments: Moments, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
    """Return the loss of drives, and each of its terms."""
    outputs = moments(batch)
    found = predictions(outputs, moments.model.kind.slices)
    terms = driving_terms(found, batch, torch.ones(outputs.shape[:2]), LOSSES)
    with torch.no_grad():
        plan = found["plan"]
        assert isinstance(plan, Mdn)
        aside = (plan.mean - batch["plan"])[..., 1].abs().mean()
    return total_of(terms, LOSSES), {**terms, "aside_m": aside}


def spread(roads: Roads, slices: Mapping[str, slice], drives: int = 400) -> tuple[Any, Any]:
    """Return mean and deviation of each number of the output over drives' labels.

    A head that begins with them learns metres and tens of metres at the same rate.
    """
    width = max(part.stop for part in slices.values())
    center, scale = torch.zeros(width), torch.ones(width)
    each = [labels_of(roads.drive(index)) for index in range(drives)]
    for name in ("plan", "lane_lines", "road_edges", "lead", "pose"):
        values = np.concatenate([one[name] for one in each])
        if name == "lead":
            values = values[np.concatenate([one["lead_prob"][:, 0] for one in each]) > 0]
        flat = torch.from_numpy(values.reshape(len(values), -1))
        start, size = slices[name].start, flat.shape[1]
        deviation = flat.std(0).clamp(min=1e-2)
        center[start : start + size], scale[start : start + size] = flat.mean(0), deviation
        # The other half are logarithms of deviations, whose first guess is the same.
        center[start + size : start + 2 * size] = deviation.log()
    return center, scale


def fold(moments: Moments) -> DrivingModel:
    """Return the model as it computes without `Moments`, changed in place.

    Center and scale go into the last layers of the heads. The wide camera and desires, which were
    not there, count as nothing.
    """
    model = moments.model
    as_convolutions(model)
    with torch.no_grad():
        join = model.summarizer.join.weight
        join[:, join.shape[1] // 2 :] = 0
        model.policy.context.weight[:, : math.prod(model.kind.buffers["desire_pulse"])] = 0
    for hydra in (model.hydra, model.policy.temporal_hydra):
        for name in hydra.names:
            last, part = hydra.get_submodule(f"{name}.2"), model.kind.slices[name]
            assert isinstance(last, nn.Linear)
            with torch.no_grad():
                last.weight.mul_(moments.scale[part, None])
                last.bias.mul_(moments.scale[part]).add_(moments.center[part])
    return model


def pretrain(out: str | Path, options: PretrainOptions | None = None) -> DrivingModel:
    """Train the model from random weights and write them to OUT, in float16.

    Args:
        out: A file that ends in .safetensors. The log of the training is beside it.
        options: Settings of the training.

    Returns:
        The trained model.
    """
    options, out = options or PretrainOptions(), Path(out)
    model = build(GENERATIONS[GENERATION][0], options.seed, PRETRAINED, trained=False)
    assert isinstance(model, DrivingModel)
    roads = Roads(options.drives, options.seed)
    as_products(model)
    moments = Moments(model, *spread(roads, model.kind.slices))
    rate = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, options.steps // 20, options.steps
    )
    ported = tpuport.convert(moments, verify=False)
    step = make_train_step(ported, loss, optax.adam(rate), clip_norm=5.0)
    batches = Batches(roads, batch_size=options.batch_size, seed=options.seed)
    log = JsonLines(out.with_suffix(".jsonl"))
    state = fit(step, batches, steps=options.steps, log_every=20, sinks=[log])
    trained: Any = step.load_state(state).to_torch()
    found = fold(trained)
    weights = {name: value.half() for name, value in found.state_dict().items()}
    made = {"made_by": "python -m recipes.openpilot pretrain", **asdict(options)}
    tpuport.save_checkpoint(out, weights, metadata={n: str(value) for n, value in made.items()})
    return found
