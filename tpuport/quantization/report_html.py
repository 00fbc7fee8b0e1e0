"""A quantization report as one HTML page: no script, nothing loaded."""

from typing import TYPE_CHECKING

from tpuport.foundation.reporting.templates import render
from tpuport.reports import plots
from tpuport.reports import wording as fmt
from tpuport.reports.plots import Bar

if TYPE_CHECKING:
    from tpuport.quantization.report import QuantizationReport

_NUM_OPEN = 24


def to_html(report: "QuantizationReport") -> str:
    """Render the report as a page to open from disk; its policy forbids it to load anything."""
    measured = [one for one in report.by_error if one.deviation is not None]
    spread = sorted(
        ((*one.outliers[::-1], one.name) for one in report.layers if one.outliers), reverse=True
    )
    before, after = report.bytes
    return render(
        "quantization/templates/report.html.j2",
        svg=plots,
        num_open=_NUM_OPEN,
        headline=report.headline,
        outputs=report.shown(report.outputs),
        bytes=[
            Bar("in float", fmt.size(before), before),
            Bar("quantized", fmt.size(after), after),
        ],
        errors=[
            Bar(one.name, f"{one.deviation.relative:.2e}", one.deviation.relative,
                f"cosine {one.deviation.cosine:.6f}, {one.shape}")
            for one in measured if one.deviation
        ],
        outliers=[
            Bar(name, f"{after:.1f}", after, f"before {before:.1f}")
            for after, before, name in spread
        ],
        kept=[f"{name or 'the model'}: {why}" for name, why in report.kept.items()],
    )  # fmt: skip
