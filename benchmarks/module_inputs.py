"""Modules built with guessed arguments, and inputs that they take.

Arguments are guessed from names and annotations. An input is searched: first the shapes that the
first layers of the module ask for, then what the messages of failed calls ask for, then shapes that
are usual.
"""

import copy
import dataclasses
import inspect
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import Any

import numpy as np
import torch
from torch import nn

MOST_WEIGHTS = 30_000_000
# Widths to build with, one after the other, until an input is found.
WIDTHS = (16, 64, 3, 1, 128)
_TRIES = 150
_SECONDS = 8.0
# Values by the beginning of a word in the name of a parameter; the first that fits counts.
_VALUES: dict[str, Any] = {
    "n?class": 10, "kernel": 3, "ksize": 3, "n?head": 4, "stride": 1, "pad": 1, "dilation": 1,
    "groups": 1, "group": 4, "p$|drop": 0.0, "reduc": 4, "ratio|factor": 4, "scale": 2,
    "window": 4, "(img|image)_size": 32, "resolution": 16, "input_size": 16,
    "(seq|context|max|block)_?(len|size)": 32, "max_seq": 32, "pred_len": 8, "length": 32,
    "patch": 4, "depth": 2, "n?layers?$": 2, "blocks?$": 2, "n?vocab": 50, "n?token": 50,
    "units$": [1, 1, 1], "num_embeddings": 50, "codebook_size": 16, "bias": True,
    "norm_layer": nn.LayerNorm,
    "eps|norm_eps": 1e-5, "norm$": None, "act": nn.ReLU, "alpha|beta": 0.5, "gamma": 1.0,
    "growth": 8,
    "expan": 2, "mult": 2, "temp": 1.0, "field_dims": [10, 10, 10], "axis": 1, "shape": [-1, 16],
    "file|path|dir|url|root": "not_there",
}  # fmt: skip
_CONFIG = re.compile(r"^(config|cfg|conf|args|opts?|options|hps|hparams|params|configs)$")
_MODULE = re.compile(
    r"^(fn|f|net|module|layer|model|encoder|decoder|backbone|unet|sublayer|sub_?net)$"
)
_SIZES = {1: (2,), 2: (2, 16), 3: (2, 16, 16), 4: (2, 16, 16, 16), 5: (2, 16, 4, 16, 16)}
_USUAL = [
    (2, 16, 16, 16), (2, 3, 32, 32), (2, 3, 64, 64), (2, 32, 16), (2, 16), (2, 16, 32),
    (2, 1, 64, 64), (2, 3, 224, 224), (2, 16, 4, 16, 16), (2, 1, 1024), (2, 64, 16, 16),
    (2, 512, 16, 16), (2, 512, 7, 7), (2, 49, 512), (2, 64, 16), (2, 50, 512),
    (2,), (2, 8, 8, 16), (2, 8, 8, 3),
]  # fmt: skip


# -- building --------------------------------------------------------------------------------------


class Settings:
    """Stand for a configuration: each attribute is guessed from its name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return value_for(name, 16)

    def __getitem__(self, name: str) -> Any:
        """Return the value of a setting by its name."""
        return value_for(str(name), 16)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value that is asked for if there is none."""
        return default


def value_for(name: str, width: int) -> Any:
    """Return a value by the name of a parameter; `width` if the name says nothing."""
    lower = name.lower()
    for part, value in _VALUES.items():
        if re.search(rf"(^|_)(num_?|n_)?({part})", lower):
            return value
    return width


def guessed(parameter: inspect.Parameter, width: int, names: dict[str, Any]) -> Any:
    """Return a value for a parameter by its name and annotation.

    Args:
        parameter: The parameter.
        width: What a number is of which the name says nothing.
        names: The names of the file, for configurations and blocks that it defines.
    """
    name, annotation = parameter.name, str(parameter.annotation)
    if _CONFIG.match(name):
        return _configuration(names)
    if _MODULE.match(name):
        networks = (v for k, v in names.items() if "unet" in k.lower() and isinstance(v, type))
        network = next(networks, None) if name in ("model", "net", "unet") else None
        return nn.Linear(width, width) if network is None else built(network, width, True)
    if name == "block":
        blocks = (v for k, v in names.items() if re.search("block|bottleneck", k.lower()))
        return next((one for one in blocks if isinstance(one, type)), nn.Identity)
    value = value_for(name, width)
    if re.search(r"\b(list|tuple|sequence)\b", annotation.lower()) and not isinstance(value, list):
        return [value, value]
    if "bool" in annotation and not isinstance(value, bool):
        return False
    return 0.1 if "float" in annotation and isinstance(value, int) else value


def _configuration(names: dict[str, Any]) -> Any:
    """Return a configuration that the file defines, or one that answers by names."""
    for name, value in names.items():
        if isinstance(value, dict) and value and "config" in name.lower():
            chosen = (one for one in value if re.search("test|tiny|small|debug", str(one).lower()))
            return value[next(chosen, next(iter(value)))]
        if re.search("config|args", name.lower()) and dataclasses.is_dataclass(value):
            missing = [f.name for f in dataclasses.fields(value) if _is_required(f)]
            made: Any = value
            return made(**{one: value_for(one, 16) for one in missing})
    return Settings()


def _is_required(field: Any) -> bool:
    has_none = field.default is dataclasses.MISSING or field.default is None
    return has_none and field.default_factory is dataclasses.MISSING


def parameters_of(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function or class; of a base class if it hands them all on."""
    of_bases = (base.__init__ for base in make.__mro__[:-1]) if isinstance(make, type) else ()
    for one in of_bases:
        found = dict(list(inspect.signature(one).parameters.items())[1:])
        if any(
            p.kind is not p.VAR_POSITIONAL and p.kind is not p.VAR_KEYWORD for p in found.values()
        ):
            return found
    return dict(inspect.signature(make).parameters)


def built(make: Callable[..., Any], width: int, small: bool = False) -> nn.Module | None:
    """Call a class or function with guessed arguments; return what it gives if it is a module.

    Args:
        make: The class or function.
        width: What a number is of which the name says nothing.
        small: Whether large numbers that are defaults are made small as well.
    """
    names = vars(sys.modules[make.__module__])
    given: dict[str, Any] = {}
    for name, parameter in parameters_of(make).items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is parameter.empty:
            given[name] = guessed(parameter, width, names)
        elif small and type(parameter.default) is int and parameter.default > 4:
            given[name] = value_for(name, min(parameter.default, 32))
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    # With gradients, the weight that the old `weight_norm` computes could not be copied.
    with torch.no_grad():
        module = make(**given)
    if not isinstance(module, nn.Module):
        return None
    for one in module.modules():
        if isinstance(one, nn.modules.dropout._DropoutNd):
            one.p = 0.0
    return module


def modules_of(make: Callable[..., Any]) -> Iterator[nn.Module]:
    """Yield modules that a class or function builds, of one width after the other."""
    error: Exception | None = None
    count = 0
    for width in WIDTHS:
        for small in (False, True):
            try:
                module = built(make, width, small)
            except Exception as raised:  # code of others may raise anything
                error = error or raised
                continue
            if module is None:
                return
            if sum(p.numel() for p in module.parameters()) <= MOST_WEIGHTS:
                count += 1
                yield module.eval()
                break
            error = ValueError("too many weights")
    if error is not None and not count:
        raise error


# -- inputs ----------------------------------------------------------------------------------------


def _floats(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3 + len(shape)))


def _integers(shape: tuple[int, ...], most: int = 10) -> torch.Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(3))


def _of_layer(layer: nn.Module) -> list[torch.Tensor]:
    """Return tensors that one layer of torch takes."""
    shapes: list[tuple[int, ...]] = []
    if isinstance(layer, nn.Embedding):
        return [_integers((2, 16), min(layer.num_embeddings, 10))]
    if isinstance(layer, nn.modules.conv._ConvNd):
        sizes = {1: ((32,), (256,)), 2: ((16, 16), (32, 32), (64, 64)), 3: ((8, 16, 16),)}
        shapes = [(2, layer.in_channels, *size) for size in sizes[len(layer.kernel_size)]]
    elif isinstance(layer, nn.Linear):
        shapes = [(2, 16, layer.in_features), (2, layer.in_features), (2, 8, 8, layer.in_features)]
    elif isinstance(layer, nn.LayerNorm):
        shapes = [(2, 16, *layer.normalized_shape), (2, *layer.normalized_shape)]
    elif isinstance(layer, nn.modules.batchnorm._BatchNorm):
        sizes_of = {nn.BatchNorm1d: ((32,), ()), nn.BatchNorm3d: ((4, 16, 16),)}
        shapes = [(2, layer.num_features, *s) for s in sizes_of.get(type(layer), ((16, 16),))]
    elif isinstance(layer, nn.RNNBase):
        shapes = [(2, 8, layer.input_size)]
    return [_floats(shape) for shape in shapes]


def first_arguments(module: nn.Module) -> list[torch.Tensor]:
    """Return tensors for the first argument, by the layers of a module and by its sizes."""
    made: dict[Any, torch.Tensor] = {}
    for layer in islice(module.modules(), 40):
        for name in ("img_size", "image_size", "input_size", "input_resolution", "resolution"):
            size = layer.__dict__.get(name)
            pair = (size, size) if type(size) is int else size
            if isinstance(pair, list | tuple) and len(pair) == 2 and max(pair) <= 256:
                channels = [p.shape[1] for p in module.parameters() if p.dim() == 4][:1] or [3]
                made.setdefault(("size", *pair), _floats((2, channels[0], *pair)))
        for one in _of_layer(layer):
            made.setdefault((one.dtype, one.shape), one)
        if len(made) > 12:
            break
    return list(made.values())


def other_arguments(name: str, first: torch.Tensor) -> list[Any]:
    """Return values for an argument behind the first, by its name."""
    batch, width = first.shape[0] if first.dim() else 1, first.shape[-1] if first.dim() else 16
    row = first.shape[1] if first.dim() > 1 else 16
    numbers = [torch.tensor([0.3, 0.7])[:batch], _integers((batch,))]
    choices: list[tuple[str, list[Any]]] = [
        (r"mask", [torch.ones(batch, row, dtype=torch.bool), None, torch.ones(batch, row)]),
        (r"^t$|time|sigma|step|noise|level|^r$|angle", [*numbers]),
        (r"len", [torch.tensor([row, row - 1])[:batch], row]),
        (r"^y$|label|target|class|^gt", [_integers((batch,)), first, _integers((batch, row))]),
        (r"^[hw]$|height|width|^H|^W", [16, 8, 4]),
        (r"size|shape|resolution", [(16, 16), (8, 8), 16]),
        (r"ids|tok|idx|ind|edge", [_integers((batch, row)), _integers((batch,))]),
        (r"emb|cond|style|latent|^[czsg]$|context", [_floats((batch, width)), first]),
        (r"flag|use|return|is_|training", [False, True]),
        (r"mode", ["norm"]),
    ]
    fits = next((made for part, made in choices if re.search(part, name)), [])
    return [*fits, first, _floats((batch, row)), *numbers, width]


def _combined(names: list[str], first: torch.Tensor) -> list[list[Any]]:
    others = [list(enumerate(other_arguments(name, first))) for name in names[1:]]
    ranked = sorted(product(*others), key=lambda chosen: sum(place for place, _ in chosen))
    # One tensor for two arguments would have one gradient.
    return [[first, *(copy.deepcopy(value) for _, value in chosen)] for chosen in ranked[:12]]


def usual_inputs(names: list[str]) -> Iterator[list[Any]]:
    """Yield arguments of the usual shapes."""
    for shape in _USUAL:
        yield from _combined(names, _floats(shape))[:3]
        yield [_floats(shape) for _ in names]
    for shape in ((2, 16), (2, 3)):
        yield [_integers(shape) for _ in names]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in re.findall(r"\d+", text))


def _reshaped(given: list[Any], fits: Callable[[torch.Tensor], Any]) -> Iterator[list[Any]]:
    """Yield the arguments with one tensor of another shape, for each that has a shape to become."""
    for place, one in enumerate(given):
        shape = fits(one) if isinstance(one, torch.Tensor) else None
        if shape and max(shape) <= 4096 and len(shape) < 6:
            changed = _floats(shape) if one.is_floating_point() else _integers(shape)
            yield [*given[:place], changed, *given[place + 1 :]]


def _with_rank(one: torch.Tensor, rank: int) -> tuple[int, ...] | None:
    if one.dim() == rank or rank not in _SIZES:
        return None
    if rank == 1:
        return _SIZES[1]
    channels = one.shape[1] if one.dim() in (4, 5) else one.shape[-1] if one.dim() else 16
    usual = _SIZES[rank]
    return (*usual[:-1], channels) if rank in (2, 3) else (2, channels, *usual[2:])


def _of_product(one: torch.Tensor, had: int, wanted: int) -> tuple[int, ...] | None:
    """Return the shape with another last size, or with other sides of an image."""
    if one.dim() and one.shape[-1] == had:
        return (*one.shape[:-1], wanted)
    if one.dim() == 4 and one.shape[1] and wanted % one.shape[1] == 0:
        side = round((wanted // one.shape[1]) ** 0.5)
        if side * side * one.shape[1] == wanted:
            return (*one.shape[:2], side, side)
    return None


def _one_size(one: torch.Tensor, had: int, wanted: int) -> tuple[int, ...] | None:
    """Return the shape with the last of the sizes `had` become `wanted`."""
    places = [place for place, size in enumerate(one.shape) if size == had and place]
    return (*one.shape[: places[-1]], wanted, *one.shape[places[-1] + 1 :]) if places else None


def repaired(given: list[Any], message: str) -> Iterator[list[Any]]:
    """Yield arguments that the message of a failed call asks for."""
    if found := re.search(r"expected input\[([\d, ]+)\] to have (\d+) channels", message):
        had, channels = _numbers(found[1]), int(found[2])
        yield from _reshaped(
            given, lambda a: (a.shape[0], channels, *a.shape[2:]) if a.shape == had else None
        )
        yield from _reshaped(given, lambda a: _one_size(a, had[1], channels))
    if found := re.search(r"multiplied \((\d+)x(\d+) and (\d+)x", message):
        inner, rows = int(found[2]), int(found[3])
        yield from _reshaped(given, lambda a: _of_product(a, inner, rows))
    if found := re.search(r"normalized_shape=\[([\d, ]+)\].*of size\s*\[([\d, ]+)\]", message):
        tail = _numbers(found[1])
        yield from _reshaped(given, lambda a: (*a.shape[: -len(tail)], *tail))
    ranks = re.search(
        r"unpack \(expected (\d)|[Ee]xpected (\d)\s?-?[dD]|expected (\d) dims", message
    )
    if ranks:
        rank = int(next(filter(None, ranks.groups())))
        yield from _reshaped(given, lambda a: _with_rank(a, rank))
    if found := re.search(r"tensor a \((\d+)\).* tensor b \((\d+)\)", message):
        a_size, b_size = int(found[1]), int(found[2])
        yield from _reshaped(given, lambda a: _one_size(a, a_size, b_size))
        yield from _reshaped(given, lambda a: _one_size(a, b_size, a_size))
    if re.search(r"Long|Int|indices|integer|index", message):
        for place, one in enumerate(given):
            if isinstance(one, torch.Tensor) and one.is_floating_point():
                yield [*given[:place], _integers(tuple(one.shape)), *given[place + 1 :]]


def _named(given: list[Any]) -> str:
    """Return a name for arguments that are tried once."""
    tensors = [a for a in given if isinstance(a, torch.Tensor)]
    return repr([(a.dtype, tuple(a.shape)) if any(a is t for t in tensors) else a for a in given])


def first_input(module: nn.Module, gives: Callable[[Any], bool]) -> tuple[list[Any] | None, str]:
    """Return the first input that a module takes, or None and what the first one raised.

    Args:
        module: The module.
        gives: Whether a result is one to compare.
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    names = [p.name for p in parameters if p.default is p.empty and p.kind in kinds]
    if not names and any(p.kind is p.VAR_POSITIONAL for p in parameters):
        names = ["x"]
    if not names and parameters:
        names = [next(iter(parameters)).name]
    if not 0 < len(names) < 7:
        return None, f"forward asks for {len(names)} arguments"
    combined = [_combined(names, first) for first in first_arguments(module)]
    waiting = [one for start in (0, 3, 6) for some in combined for one in some[start : start + 3]]
    waiting += usual_inputs(names)
    seen: set[str] = set()
    why, ends = "", time.monotonic() + _SECONDS
    while waiting and len(seen) < _TRIES and time.monotonic() < ends:
        given = waiting.pop(0)
        if _named(given) in seen:
            continue
        seen.add(_named(given))
        try:
            with torch.no_grad():
                out = copy.deepcopy(module)(*copy.deepcopy(given))
        except Exception as error:  # code of others may raise anything
            why = why or f"{type(error).__name__}: {error}"
            waiting[:0] = [one for one in repaired(given, str(error)) if _named(one) not in seen]
            continue
        if gives(out):
            return given, ""
        why = why or "no tensor among the results"
    return None, why
