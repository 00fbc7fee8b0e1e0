"""What quantization did to a model, and what it cost in precision."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tpuport.foundation.reporting.markup import plural
from tpuport.foundation.reporting.saved_report import SavedReport
from tpuport.quantization.report_html import to_html
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
        outliers: Of these inputs, before and after the transforms: the largest value of a row over
            its root mean square, mean of all rows. A scale by row leaves the more of its codes
            unused the larger that is.
    """

    name: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    deviation: Deviation | None = None
    outliers: tuple[float, float] | None = None


@dataclass(frozen=True)
class QuantizationReport(SavedReport):
    """What is quantized and what is not, with errors and bytes.

    Attributes:
        scheme: The scheme's fields.
        layers: The quantized layers.
        kept: Why each other module with weights is in float.
        outputs: How the model's results on the calibration differ from float's.
        folded: Layers that make the channels of a layer's input in its order, by that layer.
    """

    scheme: dict[str, Any]
    layers: tuple[LayerReport, ...]
    kept: dict[str, str] = field(default_factory=dict)
    outputs: Deviation | None = None
    folded: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def bytes(self) -> tuple[int, int]:
        """Return the bytes of the quantized layers' weights before and after."""
        before = sum(one.bytes_before for one in self.layers)
        return before, sum(one.bytes_after for one in self.layers)

    @property
    def by_error(self) -> list[LayerReport]:
        """Return the layers, the one with the largest error first."""
        return sorted(self.layers, key=_error, reverse=True)

    @property
    def headline(self) -> str:
        """Return in one line what became of the layers."""
        before, after = self.bytes
        name = QuantizationScheme(**self.scheme).name
        return (
            f"{plural(len(self.layers), 'layer')} in {name} ({self.scheme['method']}):"
            f" {before:,} bytes to {after:,}, {before / after:.2f} times less"
        )

    def shown(self, one: Deviation | None) -> str:
        """Return a deviation in words."""
        if one is None:
            return "not measured (no batches were given)"
        return f"error {one.relative:.2e}, cosine {one.cosine:.6f}"

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self), indent=2)

    def to_html(self) -> str:
        """Return the report as a page with plots."""
        return to_html(self)

    def __str__(self) -> str:
        lines = [self.headline, f"outputs: {self.shown(self.outputs)}"]
        for one in self.by_error:
            spread = (
                ""
                if one.outliers is None
                else (f", outliers {one.outliers[0]:.1f} to {one.outliers[1]:.1f}")
            )
            lines.append(f"  {one.name:40} {one.shape!s:14} {self.shown(one.deviation)}{spread}")
        lines += [f"  {key or 'the model':40} in float: {why}" for key, why in self.kept.items()]
        lines += [
            f"  {key:40} its order is made by {', '.join(of)}" for key, of in self.folded.items()
        ]
        return "\n".join(lines)


def report_of(fields: Mapping[str, Any]) -> QuantizationReport:
    """Return a report, given what its JSON says."""

    def error(said: Mapping[str, float] | None) -> Deviation | None:
        return None if said is None else Deviation(**said)

    layers = tuple(
        LayerReport(
            **{
                **one,
                "shape": tuple(one["shape"]),
                "deviation": error(one["deviation"]),
                "outliers": one["outliers"] and tuple(one["outliers"]),
            }
        )
        for one in fields["layers"]
    )
    folded = {name: tuple(of) for name, of in fields.get("folded", {}).items()}
    given = {"layers": layers, "outputs": error(fields["outputs"]), "folded": folded}
    return QuantizationReport(**{**fields, **given})


def _error(layer: LayerReport) -> float:
    return 0.0 if layer.deviation is None else layer.deviation.relative
