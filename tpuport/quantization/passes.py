"""Passes over batches: a model whose layers collect numbers, as one jitted program."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tpuport.foundation import pytree
from tpuport.foundation.errors import UsageError
from tpuport.model.convert import convert
from tpuport.model.ported_model import PortedModel
from tpuport.quantization.convolution import QuantizedConv
from tpuport.quantization.exact_sums import joined
from tpuport.quantization.freeze import inputs_of, select, transforms_of, with_layers
from tpuport.quantization.report import Deviation
from tpuport.quantization.scheme import QuantizationScheme, as_scheme
from tpuport.quantization.statistics import Observer, Statistics
from tpuport.quantization.watched import gathered, watched
from tpuport.sharding.shard import shard_like
from tpuport.tracing.core.export import to_torch


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as the arguments of a call: a tuple, a dict of named ones, or the only one."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def observe(
    model: torch.nn.Module,
    watchers: Mapping[str, torch.nn.Module],
    batches: Iterable[Any],
    like: Any = None,
) -> tuple[dict[str, dict[str, np.ndarray]], list[Any]]:
    """Run batches through a model with watched layers; return the watchers' buffers, and results.

    It runs on the mesh of `like`, if that is a port on one.

    Raises:
        UsageError: There are no batches.
    """
    layers = {name: watched(model.get_submodule(name), one) for name, one in watchers.items()}
    ported = convert(with_layers(model, layers), verify=False)
    shard_like(ported, like, gathered)
    results = []
    for batch in batches:
        args, kwargs = arguments_of(batch)
        results.append(to_torch(ported(*args, **kwargs)))
    if not results:
        raise UsageError("calibration has no batches; each is the arguments of a call")
    values = ported.buffers
    own = {name: dict(one.named_buffers(recurse=False)) for name, one in watchers.items()}
    found = {
        name: {key: np.asarray(values[f"{name}.watcher.{key}"]) for key in keys}
        for name, keys in own.items()
    }
    return found, results


def calibrate(
    model: torch.nn.Module | PortedModel,
    scheme: QuantizationScheme | str,
    batches: Iterable[Any],
    *,
    keep: Iterable[str] = (),
) -> Statistics:
    """Collect statistics of the inputs of all layers that a scheme quantizes.

    They are results of one jitted program, and nothing is written to the model. Those of several
    processes are merged by `Statistics.merge`, and given to `tpuport.quantize` as `calibration`.

    Args:
        model: a module, or the result of `tpuport.convert`; one on a mesh is calibrated there.
        scheme: as for `tpuport.quantize`.
        batches: the arguments of each call: a tuple, a dict of named ones, or one argument.
        keep: as for `tpuport.quantize`.

    Raises:
        UsageError: There are no batches, or there is nothing to quantize.
    """
    scheme, given, model = as_scheme(scheme), model, as_module(model)
    layers, _ = select(model, scheme, keep)
    observers = {}
    with torch.no_grad():
        for name, layer in layers.items():
            transforms = transforms_of(layer, scheme, None)
            size, dim = inputs_of(layer)
            observers[name] = Observer(size, torch.nn.Sequential(*transforms), scheme, dim)
    found, _ = observe(model, observers, batches, given)
    return Statistics({name: joined(values) for name, values in found.items()})


def as_module(model: Any) -> torch.nn.Module:
    """Return a module, given itself or its port.

    Raises:
        UsageError: It is neither.
    """
    if isinstance(model, PortedModel):
        return model.to_torch()
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"Expected a module or a ported one, got a {type(model).__name__}")
    return model


class LayerComparison(torch.nn.Module):
    """Sums how a layer's frozen form differs from it on the same input."""

    def __init__(self, frozen: torch.nn.Module) -> None:
        super().__init__()
        self.frozen = frozen
        self.register_buffer("sums", torch.zeros(4))
        self.register_buffer("peaks", torch.zeros(3))

    def forward(self, args: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
        """Take in the float layer's output."""
        want, got = y.detach().float(), self.frozen(*args).float()
        products = ((got - want) ** 2, want * want, got * got, want * got)
        self.sums = self.sums + torch.stack([one.sum() for one in products])
        x = args[0].detach().float()
        x = x.flatten(1) if isinstance(self.frozen, QuantizedConv) else x
        before = _peaks(x)
        moved = getattr(self.frozen, "inputs", None)
        after = _peaks(moved(x)) if moved else before
        count = torch.tensor(float(before.numel()))
        self.peaks = self.peaks + torch.stack([before.sum(), after.sum(), count])


def _peaks(x: torch.Tensor) -> torch.Tensor:
    """Return of each row the largest value over the root mean square."""
    size = (x * x).mean(-1).sqrt()
    return x.abs().amax(-1) / size.clamp_min(torch.finfo(torch.float32).tiny)


def deviation(sums: np.ndarray) -> Deviation:
    """Return what four sums of squares and products say."""
    difference, want, got, both = (float(one) for one in sums)
    tiny = 1e-30
    return Deviation((difference / max(want, tiny)) ** 0.5, both / max((want * got) ** 0.5, tiny))


def deviation_of(wanted: list[Any], got: list[Any]) -> Deviation:
    """Compare all floating results of two models."""
    sums = np.zeros(4)
    for want, one in zip(_floats(wanted), _floats(got), strict=True):
        sums += [np.sum((one - want) ** 2), np.sum(want**2), np.sum(one**2), np.sum(want * one)]
    return deviation(sums)


def _floats(results: Any) -> list[np.ndarray]:
    leaves = pytree.flatten(results, shared=False)[0]
    floating = (x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point())
    return [leaf.double().numpy() for leaf in floating]


@dataclass(frozen=True)
class LayerMeasures:
    """How a frozen layer differs from its float form, and the outliers of its input.

    `outliers` are the mean of all rows' largest value over their root mean square, before and
    after the transforms.
    """

    deviation: Deviation
    outliers: tuple[float, float]


def compare_layers(
    model: torch.nn.Module,
    frozen: Mapping[str, torch.nn.Module],
    batches: Iterable[Any],
    like: Any,
) -> tuple[dict[str, LayerMeasures], list[Any]]:
    """Compare each frozen layer on float inputs; return that, and the float model's results."""
    watchers = {name: LayerComparison(one) for name, one in frozen.items()}
    found, results = observe(model, watchers, batches, like)
    compared = {}
    for name, one in found.items():
        before, after, count = (float(x) for x in one["peaks"])
        count = max(count, 1.0)
        compared[name] = LayerMeasures(deviation(one["sums"]), (before / count, after / count))
    return compared, results


def results_of(ported: PortedModel, batches: Iterable[Any]) -> list[Any]:
    """Return a ported model's results on batches."""
    found = []
    for batch in batches:
        args, kwargs = arguments_of(batch)
        found.append(to_torch(ported(*args, **kwargs)))
    return found
