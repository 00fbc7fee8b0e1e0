"""Configurations of MAE-DiT, read as they are, and the modules that they name."""

import dataclasses
import difflib
import importlib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from tpuport.foundation.errors import UsageError

# Keys that upstream adds to the configuration of a finished run.
_OF_A_RUN = frozenset({"runtime", "result_path", "load_path"})
_NO_EMA = 0.114514  # upstream's sign for no average


@dataclass(frozen=True)
class Transforms:
    """The transform of images, by upstream's name, such as "imagenetMAE256x256"."""

    type: str


@dataclass(frozen=True)
class Dataset:
    """The images.

    Attributes:
        type: Upstream's name of the data set.
        transforms: How images are cropped.
        root: Folder of the images.
    """

    type: str
    transforms: Transforms
    root: str | None = None


@dataclass(frozen=True)
class Target:
    """A module: the dotted path of its class, its arguments, and its weights."""

    target: str
    params: Mapping[str, Any] = field(default_factory=dict)
    ckpt_path: str | None = None
    checkpointing: bool = False


@dataclass(frozen=True)
class Arch:
    """The models: stage 1, what connects it to stage 2, and stage 2."""

    stage_1: Target
    connector: Target | None = None
    stage_2: Target | None = None
    stage: int = 1
    ema: float = _NO_EMA
    checkpointing: bool = False
    do_normalize: bool = False
    ckpt_path: str | None = None

    @property
    def ema_decay(self) -> float | None:
        """Return the decay of the averaged weights, or None for no average."""
        return None if self.ema == _NO_EMA else self.ema


@dataclass(frozen=True)
class Warmup:
    """The schedule of a learning rate, in epochs; `decay_schel` is in updates."""

    epoch: float
    multiplier: float
    min_lr: float
    buffer_epoch: float = 0.0
    mode: str = "linear"
    start_from_zero: bool = True
    decay_mode: str = "linear"
    decay_end_epoch: float | None = None
    decay_schel: tuple[int, ...] = ()
    gamma: float = 0.1


@dataclass(frozen=True)
class Optimizer:
    """An optimizer. Upstream reads no `max_gn`: `clip_grad_norm` limits gradients."""

    type: str
    init_lr: float
    warmup: Warmup
    weight_decay: float = 0.0
    betas: tuple[float, ...] = (0.9, 0.999)
    max_gn: str | float | None = None
    amp: bool = False
    clip_grad_norm: float = 0.0
    grad_accm_steps: int | None = None


@dataclass(frozen=True)
class Experiment:
    """Batches, epochs, and how often to save and to evaluate."""

    batch_size: int
    epochs: int
    accu_step: int = 1
    save_ckpt_freq: int = 1
    test_freq: int = 1
    amp: bool = False
    actual_batch_size: int | None = None
    total_batch_size: int | None = None


@dataclass(frozen=True)
class DiscriminatorArch:
    """A PatchGAN, or heads on a frozen DINO (`use_dino`)."""

    in_channels: int = 3
    num_layers: int = 3
    use_actnorm: bool = False
    ndf: int = 64
    spectral_norm: bool = False
    amp: bool = False
    use_dino: bool = False
    use_vit: bool = False
    dino_ckpt_path: str | None = None
    ks: int = 9
    norm_type: str = "bn"
    recipe: str = "S_16"


@dataclass(frozen=True)
class DiscriminatorExperiment:
    """Settings that upstream's files have, and no code reads."""

    test_freq: int = 1
    amp: bool = False


@dataclass(frozen=True)
class Discriminator:
    """A discriminator and its optimizer."""

    arch: DiscriminatorArch
    optimizer: Optimizer | None = None
    experiment: DiscriminatorExperiment = field(default_factory=DiscriminatorExperiment)


@dataclass(frozen=True)
class GanLoss:
    """The losses, and the epochs from which they count."""

    disc_weight: float
    perceptual_weight: float
    disc_start: int
    disc_loss: str = "hinge"
    gen_loss: str = "vanilla"
    lpips_start: int = 0
    disc_upd_start: int | None = None


@dataclass(frozen=True)
class Gan:
    """The discriminator and the losses of stage 1."""

    disc: Discriminator
    loss: GanLoss


@dataclass(frozen=True)
class Config:
    """A configuration of stage 1 or stage 2."""

    dataset: Dataset
    arch: Arch
    optimizer: Optimizer
    experiment: Experiment
    gan: Gan | None = None
    seed: int = 0


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration.

    Args:
        path: A YAML file of upstream or in its form.
        overrides: Values by dotted path, such as "experiment.batch_size=8".

    Raises:
        UsageError: The file cannot be read, a key is not known, or a value is of another type.
    """
    path = Path(path)
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path}: expected sections by name, got {type(found).__name__}")
    for given in overrides:
        _override(found, given)
    known = {name: value for name, value in found.items() if name not in _OF_A_RUN}
    return _Reader(str(path)).section(Config, known, "")


def _override(found: dict[str, Any], given: str) -> None:
    name, equals, text = given.partition("=")
    if not equals or not name:
        raise UsageError(f"--set {given}: expected NAME=VALUE, such as experiment.batch_size=8")
    *outer, last = name.split(".")
    inside: Any = found
    for part in outer:
        inside = inside.setdefault(part, {})
        if not isinstance(inside, dict):
            raise UsageError(f"--set {given}: {part} is a value, not a section")
    try:
        inside[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"--set {given}: {text!r} is no YAML") from error


@dataclass(frozen=True)
class _Reader:
    """Reads the sections of one file, whose name is in errors."""

    file: str

    def section(self, kind: Any, given: Any, place: str) -> Any:
        if not isinstance(given, Mapping):
            raise UsageError(f"{self.file}: {place}: expected keys with values, got {given!r}")
        hints = typing.get_type_hints(kind)
        for name in given:
            if name not in hints:
                near = difflib.get_close_matches(str(name), hints, 1, 0.0)
                raise UsageError(
                    f"{self.file}: {_join(place, name)} is not known; the nearest known one is"
                    f" {_join(place, near[0])}"
                )
        values = {n: self.value(hints[n], v, _join(place, n)) for n, v in given.items()}
        for one in dataclasses.fields(kind):
            required = one.default is one.default_factory is dataclasses.MISSING
            if required and one.name not in values:
                raise UsageError(f"{self.file}: {_join(place, one.name)} is missing")
        return kind(**values)

    def value(self, hint: Any, given: Any, place: str) -> Any:
        origin = typing.get_origin(hint)
        if origin is types.UnionType:
            options = [one for one in typing.get_args(hint) if one is not types.NoneType]
            if given is None:
                return None
            return given if len(options) > 1 else self.value(options[0], given, place)
        if dataclasses.is_dataclass(hint):
            return self.section(hint, given, place)
        if origin is tuple:
            if not isinstance(given, (list, tuple)):
                raise self.wrong(place, "a list", given)
            return tuple(self.value(typing.get_args(hint)[0], one, place) for one in given)
        if origin is Mapping:
            if not isinstance(given, dict):
                raise self.wrong(place, "keys with values", given)
            return given
        return self.plain(hint, given, place)

    def plain(self, kind: type, given: Any, place: str) -> Any:
        if kind is float and not isinstance(given, bool):
            try:
                return float(given)  # YAML 1.1 reads 1e-3 as a string
            except (TypeError, ValueError):
                raise self.wrong(place, "a number", given) from None
        if kind is int and isinstance(given, float) and given.is_integer():
            return int(given)
        if not isinstance(given, kind) or (kind is int and isinstance(given, bool)):
            raise self.wrong(place, kind.__name__, given)
        return given

    def wrong(self, place: str, expected: str, given: Any) -> UsageError:
        return UsageError(f"{self.file}: {place}: expected {expected}, got {given!r}")


def _join(place: str, name: Any) -> str:
    return f"{place}.{name}" if place else str(name)


def instantiate(
    target: str, params: Mapping[str, Any], upstream: Path | None = None
) -> torch.nn.Module:
    """Make a module of a class by its dotted path.

    Args:
        target: Dotted path, such as "recipes.mae_dit.models.MAE".
        params: Arguments of the class.
        upstream: Checkout with upstream's classes (`rqvae...`).

    Raises:
        UsageError: There is no such class, it needs a checkout, or its arguments differ.
    """
    module_name, _, name = target.rpartition(".")
    if target.startswith("rqvae.") and upstream is None:
        raise UsageError(
            f"{target} is a class of upstream. What to do: give --upstream and a checkout of"
            " tsb0601/projectt, or a class of recipes.mae_dit.models"
        )
    try:
        if upstream is not None and target.startswith("rqvae."):
            from recipes.mae_dit.upstream import import_module

            module = import_module(upstream, module_name)
        else:
            module = importlib.import_module(module_name)
        made = getattr(module, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{target} cannot be imported: {error}") from error
    try:
        return made(**params)
    except TypeError as error:
        raise UsageError(f"{target}({', '.join(params)}): {error}") from error
