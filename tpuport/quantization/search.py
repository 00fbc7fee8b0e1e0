"""`tpuport.quantization.search`: which layers to keep in float for a given error."""

from collections.abc import Iterable
from typing import Any

import torch

from tpuport.foundation.errors import UsageError
from tpuport.model.options import ConvertOptions
from tpuport.model.ported_model import PortedModel
from tpuport.quantization.freeze import freeze, with_layers
from tpuport.quantization.passes import (
    as_module,
    calibrate,
    compare_layers,
    deviation_of,
    results_of,
)
from tpuport.quantization.quantize import QuantizedModel, quantize
from tpuport.quantization.scheme import QuantizationScheme, as_scheme
from tpuport.sharding.shard import shard_like


def search(
    model: torch.nn.Module | PortedModel,
    scheme: QuantizationScheme | str,
    *,
    calibration: Iterable[Any],
    error: float,
    keep: Iterable[str] = (),
) -> QuantizedModel:
    """Quantize all layers but the worst, as few as a given error of the outputs allows.

    Layers are kept in the order of their own error, worst first; how many is found by bisection,
    each step a call of a program on all batches. What is returned was measured.

    Args:
        model: as for `tpuport.quantize`.
        scheme: as for `tpuport.quantize`.
        calibration: batches, as for `tpuport.quantize`.
        error: the most that the outputs may differ from float's: norm of the difference over the
            norm of float's outputs.
        keep: patterns of layers that stay in float in any case.

    Raises:
        UsageError: no layer at all may be quantized for this error.
    """
    scheme, module, batches = as_scheme(scheme), as_module(model), list(calibration)
    keep = (keep,) if isinstance(keep, str) else tuple(keep)
    found = calibrate(model, scheme, batches, keep=keep)
    _, layers, _ = freeze(module, scheme, found, keep)
    errors, wanted = compare_layers(module, layers, batches, model)
    worst = sorted(layers, key=lambda name: -errors[name].deviation.relative)

    def error_without(num: int) -> float:
        made = with_layers(module, {name: layers[name] for name in worst[num:]})
        ported = PortedModel(made, ConvertOptions(verify=False))
        shard_like(ported, model)
        return deviation_of(wanted, results_of(ported, batches)).relative

    low, high = 0, len(worst)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if error_without(middle) <= error else (middle + 1, high)
    if low == len(worst):
        raise UsageError(
            f"with only {worst[-1]!r} in {scheme.name} the outputs differ by more than {error:.1e}"
            " from float's. What to do: allow a larger error, or take more bits"
        )
    return quantize(model, scheme, calibration=batches, keep=(*keep, *worst[:low]))
