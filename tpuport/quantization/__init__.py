"""Quantization: calibrate, freeze, serve. `tpuport.quantize` does all three."""

from typing import TYPE_CHECKING

from tpuport.foundation.imports import imported

if TYPE_CHECKING:
    from tpuport.quantization.layer import QuantizedLinear
    from tpuport.quantization.passes import calibrate
    from tpuport.quantization.published_save import save_published
    from tpuport.quantization.report import QuantizationReport
    from tpuport.quantization.scheme import QuantizationScheme
    from tpuport.quantization.search import search
    from tpuport.quantization.statistics import Statistics

_HOME = {
    "QuantizationReport": "report", "QuantizationScheme": "scheme", "QuantizedLinear": "layer",
    "Statistics": "statistics", "calibrate": "passes", "save_published": "published_save",
    "search": "search",
}  # fmt: skip

__all__ = [
    "QuantizationReport",
    "QuantizationScheme",
    "QuantizedLinear",
    "Statistics",
    "calibrate",
    "save_published",
    "search",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(imported(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
