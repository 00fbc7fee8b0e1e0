"""Statistics of the inputs of layers: how they are found, merged and kept."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from tpuport.foundation.errors import UsageError
from tpuport.quantization import exact_sums
from tpuport.quantization.scheme import QuantizationScheme

# Bins of absolute values: 32 an octave, from 2**-40 to 2**24.
_AN_OCTAVE, _LOWEST, NUM_BINS = 32, -40, 2048
_NUM_ROWS = 64
_CANDIDATES = 64
_LEAST_STEP = 1e-6

_SUMS: Callable[..., Any] = np.add
_MERGED: dict[str, Callable[..., Any]] = {
    "low": np.minimum, "high": np.maximum, "quantile": np.maximum,
    "histogram": _SUMS, "calls": _SUMS, "gram": _SUMS, "sizes": _SUMS,
}  # fmt: skip


class Observer(torch.nn.Module):
    """Collects statistics of a layer's input, in buffers.

    The buffers are results of the program: a call writes no state of Python.
    """

    def __init__(
        self, size: int, transforms: torch.nn.Module, scheme: QuantizationScheme, dim: int = -1
    ) -> None:
        super().__init__()
        self.transforms, self.scheme, self.dim = transforms, scheme, dim
        self.register_buffer("calls", torch.zeros((), dtype=torch.int32))
        self.register_buffer("low", torch.full((size,), torch.inf))
        self.register_buffer("high", torch.full((size,), -torch.inf))
        self.register_buffer("quantile", torch.zeros(size))
        self.register_buffer("histogram", torch.zeros(NUM_BINS, dtype=torch.int32))
        self.register_buffer("rows", torch.zeros(_NUM_ROWS, size))
        if scheme.takes_outputs:
            for name, shape in (("gram", (size, size)), ("sizes", (size,))):
                self.register_buffer(name, torch.zeros(shape))
                self.register_buffer(name + exact_sums.REST, torch.zeros(shape))

    def forward(self, args: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
        """Take in the rows of a call."""
        del y
        x = args[0].detach().float().movedim(self.dim, -1)
        x = self.transforms(x)
        rows = x.reshape(-1, x.shape[-1])
        self.calls = self.calls + 1
        self.low = torch.minimum(self.low, rows.amin(0))
        self.high = torch.maximum(self.high, rows.amax(0))
        if self.scheme.takes_outputs:
            scaled, scale = exact_sums.scaled_columns(rows)
            self._add("gram", exact_sums.products(scaled), scale[:, None] * scale)
            self._add("sizes", exact_sums.sums(scaled.abs()), scale)
        if self.scheme.is_static and self.scheme.activations == "channel":
            found = torch.quantile(rows.abs(), self.scheme.percentile / 100, dim=0)
            self.quantile = torch.maximum(self.quantile, found)
        elif self.scheme.is_static and self.scheme.estimator != "max":
            bins = (torch.log2(rows.abs().flatten()) - _LOWEST) * _AN_OCTAVE
            bins = bins.clamp(0, NUM_BINS - 1).to(torch.int64)
            ones = torch.ones(bins.shape[0], dtype=torch.int32)
            self.histogram = self.histogram.index_add(0, bins, ones)
        elif self.scheme.method == "duquant" and self.scheme.basis == "greedy":
            known = torch.cat([self.rows, rows])
            self.rows = known[torch.topk(known.abs().amax(-1), _NUM_ROWS).indices]

    def _add(self, name: str, terms: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
        total, rest = getattr(self, name), getattr(self, name + exact_sums.REST)
        for term in terms:
            total, rest = exact_sums.add(total, rest, term * factor)
        setattr(self, name, total)
        setattr(self, name + exact_sums.REST, rest)


@dataclass(frozen=True)
class Statistics:
    """What calibration found, by layer: `low`, `high`, `calls`, and what the scheme asked for.

    They can be saved, resumed and merged in any order: the results are equal.
    """

    layers: Mapping[str, Mapping[str, np.ndarray]]

    def merge(self, other: "Statistics") -> "Statistics":
        """Return the statistics of the batches of both.

        Raises:
            UsageError: They are of other layers.
        """
        if set(self.layers) != set(other.layers):
            odd = sorted(set(self.layers) ^ set(other.layers))
            raise UsageError(f"the statistics are of other layers: {', '.join(odd[:4])}")
        return Statistics(
            {
                name: {
                    key: _merge(key, value, other.layers[name][key]) for key, value in mine.items()
                }
                for name, mine in self.layers.items()
            }
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write them to a safetensors file, named `layer/statistic`."""
        flat = {f"{name}/{k}": v for name, one in self.layers.items() for k, v in one.items()}
        save_file({name: np.array(value, order="C") for name, value in flat.items()}, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Statistics":
        """Read what `save` wrote."""
        layers: dict[str, dict[str, np.ndarray]] = {}
        for name, value in load_file(path).items():
            layer, _, key = name.rpartition("/")
            layers.setdefault(layer, {})[key] = value
        return cls(layers)


def _merge(key: str, mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    if key == "rows":
        known = np.concatenate([mine, theirs])
        order = np.argsort(-np.abs(known).max(-1), kind="stable")
        return known[order[:_NUM_ROWS]]
    return np.asarray(_MERGED[key](mine, theirs), mine.dtype)


def input_scale(found: Mapping[str, np.ndarray], scheme: QuantizationScheme) -> torch.Tensor:
    """Return the scale of a layer's input that statistics give: `[]`, or `[in]` by channel."""
    peaks = np.maximum(np.abs(found["low"]), np.abs(found["high"]))
    peak = float(peaks.max())
    # As in the openpi fork, but for inputs that are small throughout.
    least = _LEAST_STEP * min(peak or 1.0, 1.0)
    if scheme.activations == "channel":
        peaks = found["quantile"] if scheme.estimator == "percentile" else peaks
        return torch.from_numpy(peaks / scheme.input_limit).float().clamp_min(least)
    if scheme.estimator == "max":
        return torch.tensor(max(peak / scheme.input_limit, least))
    counts = found["histogram"].astype(np.float64)
    edges = 2.0 ** ((np.arange(NUM_BINS) + 1) / _AN_OCTAVE + _LOWEST)
    if scheme.estimator == "percentile":
        wanted = counts.sum() * scheme.percentile / 100
        limit = edges[int(np.searchsorted(np.cumsum(counts), wanted))]
    else:
        limit = _least_error(counts, edges, peak)
    return torch.tensor(max(min(limit, peak) / scheme.input_limit, least))


def _least_error(counts: np.ndarray, edges: np.ndarray, peak: float) -> float:
    """Return the limit with the least square error of rounding to eight bits."""
    values = edges * 2 ** (-0.5 / _AN_OCTAVE)
    tried = peak * np.linspace(0.05, 1.0, _CANDIDATES)
    scale = tried[:, None] / 127
    # Inside the limit the error is that of an even distribution over a step; beyond, the distance.
    step = np.minimum(scale**2 / 12, values**2)
    error = np.where(values > tried[:, None], (values - tried[:, None]) ** 2, step)
    return float(tried[int((error * counts).sum(-1).argmin())])
