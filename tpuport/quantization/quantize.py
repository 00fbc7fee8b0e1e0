"""`tpuport.quantize`: calibrate, freeze, and port what serves."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tpuport.foundation.errors import UsageError
from tpuport.model.options import ConvertOptions
from tpuport.model.ported_model import PortedModel
from tpuport.quantization.files import metadata_of, open_quantized
from tpuport.quantization.folding import fold_orders
from tpuport.quantization.freeze import freeze, with_layers
from tpuport.quantization.passes import (
    LayerMeasures,
    as_module,
    calibrate,
    compare_layers,
    deviation_of,
    results_of,
)
from tpuport.quantization.report import LayerReport, QuantizationReport
from tpuport.quantization.scheme import QuantizationScheme, as_scheme
from tpuport.quantization.statistics import Statistics
from tpuport.sharding.shard import shard_like
from tpuport.weights.checkpoint import Checkpoint

# An input that lies between two codes may be rounded to either, which is a step of 1/127.
_ROUNDING_RTOL = 1e-2


class QuantizedModel(PortedModel):
    """A ported model whose layers hold integers.

    `quantization` says which do, and how the results differ from float's.
    """

    def __init__(
        self, module: torch.nn.Module, options: ConvertOptions, report: QuantizationReport
    ) -> None:
        super().__init__(module, options)
        self.quantization = report

    def _checkpoint_metadata(self) -> dict[str, str]:
        return metadata_of(self._module, self.quantization)


def quantize(
    model: torch.nn.Module | PortedModel,
    scheme: QuantizationScheme | str | None = None,
    *,
    checkpoint: str | Path | Checkpoint | None = None,
    calibration: Iterable[Any] | Statistics | None = None,
    keep: Iterable[str] = (),
    verify: bool | str = True,
    rtol: float | None = None,
) -> QuantizedModel:
    """Return a ported model whose linear layers compute with integer weights.

    Args:
        model: a module on the CPU, or the result of `tpuport.convert`. It is left as it is. A port
            on a mesh gives one on that mesh, by the same preset or table. With a checkpoint, or to
            be compiled for a TPU, the model may be on the meta device.
        scheme: "w8a8" (the default), "w4a8", "w4a16", "w8a16", or a `QuantizationScheme`. The short
            names round to nearest, with a scale for each output channel and each row of the input.
        checkpoint: a file or directory of a quantized model, instead of a scheme: as
            `tpuport.save_checkpoint` writes it, or of compressed-tensors, GPTQ or AWQ with their
            `quantization_config`. All of the model's weights come from there.
        calibration: batches, each the arguments of a call: a tuple, a dict of named ones, or one
            argument; all are used, and the report's errors are measured on them. Or `Statistics`
            of `tpuport.quantization.calibrate`. Schemes that need none may go without.
        keep: patterns of layers that stay in float, such as "**.lm_head".
        verify: compare calls with eager PyTorch of the quantized module, as `tpuport.convert` does.
        rtol: of that comparison. Default 1e-2 where inputs are rounded, since a value between two
            codes may become either; otherwise as in `tpuport.convert`.

    Returns:
        The ported model; `print(quantized.quantization)`.

    Raises:
        UsageError: The scheme needs calibration, or there is nothing to quantize.
        CheckpointError: The checkpoint is of no known format, or does not fit the model.
    """
    if checkpoint is not None:
        if scheme is not None or calibration is not None or tuple(keep):
            raise UsageError(
                "a checkpoint says which layers are quantized and how: leave scheme=, calibration="
                " and keep= out, or quantize the float model"
            )
        return _loaded(model, checkpoint, verify=verify, rtol=rtol)
    scheme, module = as_scheme("w8a8" if scheme is None else scheme), as_module(model)
    keep = (keep,) if isinstance(keep, str) else tuple(keep)
    batches: list[Any] = []
    statistics = calibration if isinstance(calibration, Statistics) else None
    if calibration is not None and not isinstance(calibration, Statistics):
        batches = _batches(calibration)
        if scheme.is_calibrated:
            statistics = calibrate(model, scheme, batches, keep=keep)
    frozen, layers, kept = freeze(module, scheme, statistics, keep)
    errors: dict[str, LayerMeasures] = {}
    wanted: list[Any] = []
    folded: dict[str, tuple[str, ...]] = {}
    if batches:
        errors, wanted = compare_layers(module, layers, batches, model)
        layers, folded = fold_orders(module, layers, batches[0])
        frozen = with_layers(module, layers) if folded else frozen
    options = _options((scheme,), verify, rtol)
    found = None
    if batches:
        # The port that is returned starts without calls, since a call may have changed its state.
        measured = PortedModel(frozen, ConvertOptions(verify=False))
        shard_like(measured, model)
        found = deviation_of(wanted, results_of(measured, batches))
    reports = tuple(
        _layer_report(name, module.get_submodule(name), one, errors.get(name))
        for name, one in layers.items()
    )
    report = QuantizationReport(asdict(scheme), reports, kept, found, folded)
    made = QuantizedModel(frozen, options, report)
    shard_like(made, model)
    return made


def _batches(calibration: Iterable[Any]) -> list[Any]:
    if isinstance(calibration, torch.Tensor | Mapping):
        raise UsageError(
            f"calibration is a list of batches, got one {type(calibration).__name__}; write"
            " calibration=[batch]"
        )
    return list(calibration)


def _options(
    schemes: Iterable[QuantizationScheme], verify: bool | str, rtol: float | None
) -> ConvertOptions:
    if rtol is None and any(one.activation_bits == 8 for one in schemes):
        rtol = _ROUNDING_RTOL
    return ConvertOptions(verify=verify, rtol=rtol)


def _loaded(
    model: torch.nn.Module | PortedModel,
    checkpoint: str | Path | Checkpoint,
    *,
    verify: bool | str,
    rtol: float | None,
) -> QuantizedModel:
    """Return the model of a checkpoint, whose float weights are read nowhere."""
    module = model._module if isinstance(model, PortedModel) else as_module(model)
    opened = open_quantized(checkpoint, module)
    layers, report = opened.layers, opened.report
    if report is None:
        reports = (
            _layer_report(n, module.get_submodule(n), one, None) for n, one in layers.items()
        )
        first: Any = next(iter(layers.values()))
        scheme = asdict(first.scheme)
        kept = {
            name: "the checkpoint has it in float"
            for name, one in module.named_modules()
            if name not in layers and any(p.dim() > 1 for p in one.parameters(recurse=False))
        }
        report = QuantizationReport(scheme, tuple(reports), kept)
    options = _options(opened.schemes, verify, rtol)
    made = QuantizedModel(with_layers(module, layers), options, report)
    shard_like(made, model)
    made.load(opened.values)
    return made


def _layer_report(
    name: str, layer: torch.nn.Module, frozen: torch.nn.Module, error: LayerMeasures | None
) -> LayerReport:
    weights = [one for one in layer.parameters(recurse=False) if one.dim() > 1]
    before = sum(one.nbytes for one in weights)
    after = sum(b.nbytes for key, b in frozen.named_buffers() if key != "bias")
    made = LayerReport(name, tuple(weights[0].shape), before, after)
    if error is None:
        return made
    return replace(made, deviation=error.deviation, outliers=error.outliers)
