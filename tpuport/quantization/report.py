"""What quantization did to a model, and what it cost in precision."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tpuport.foundation.reporting.markup import plural
from tpuport.quantization.scheme import QuantizationScheme


@dataclass(frozen=True)
class Deviation:
    """How a result differs from float's: the norm of the difference over float's, and the cosine.

    None where nothing was measured.
    """

    relative: float
    cosine: float


@dataclass(frozen=True)
class LayerReport:
    """One quantized layer.

    Attributes:
        name: The layer.
        shape: Of its weight: output and input features of a linear layer.
        bytes_before: Of its weight in float.
        bytes_after: Of all its buffers but the bias.
        deviation: On the calibration's inputs as the float model has them.
    """

    name: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    deviation: Deviation | None = None


@dataclass(frozen=True)
class QuantizationReport:
    """What is quantized and what is not, with errors and bytes.

    Attributes:
        scheme: The scheme's fields.
        layers: The quantized layers.
        kept: Why each other module with weights is in float.
        outputs: How the model's results on the calibration differ from float's.
    """

    scheme: dict[str, Any]
    layers: tuple[LayerReport, ...]
    kept: dict[str, str] = field(default_factory=dict)
    outputs: Deviation | None = None

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        before = sum(one.bytes_before for one in self.layers)
        after = sum(one.bytes_after for one in self.layers)
        name = QuantizationScheme(**self.scheme).name
        lines = [
            f"{plural(len(self.layers), 'layer')} in {name} ({self.scheme['method']}):"
            f" {before:,} bytes to {after:,}, {before / after:.2f} times less",
            f"outputs: {_shown(self.outputs)}",
        ]
        for one in sorted(self.layers, key=_error, reverse=True):
            lines.append(f"  {one.name:40} {one.shape!s:14} {_shown(one.deviation)}")
        lines += [f"  {key or 'the model':40} in float: {why}" for key, why in self.kept.items()]
        return "\n".join(lines)


def report_of(fields: Mapping[str, Any]) -> QuantizationReport:
    """Return a report, given what its JSON says."""

    def error(said: Mapping[str, float] | None) -> Deviation | None:
        return None if said is None else Deviation(**said)

    layers = tuple(
        LayerReport(**{**one, "shape": tuple(one["shape"]), "deviation": error(one["deviation"])})
        for one in fields["layers"]
    )
    given = {**fields, "layers": layers, "outputs": error(fields["outputs"])}
    return QuantizationReport(**given)


def _error(layer: LayerReport) -> float:
    return 0.0 if layer.deviation is None else layer.deviation.relative


def _shown(one: Deviation | None) -> str:
    if one is None:
        return "not measured (no batches were given)"
    return f"error {one.relative:.2e}, cosine {one.cosine:.6f}"
