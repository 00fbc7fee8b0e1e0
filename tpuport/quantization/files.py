"""Quantized models in files: what is saved about each layer, and how it is read again.

A file has the `state_dict` of the quantized module. Its metadata has, under `KEY`, a JSON text:
`version`, the `schemes` that occur, `layers` by name with their kind and the number of their
scheme, and the `report` of when they were made.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tpuport.foundation.errors import CheckpointError
from tpuport.quantization.convolution import QuantizedConv
from tpuport.quantization.experts import QuantizedExperts, StackedLinear, are_experts
from tpuport.quantization.layer import FrozenLayer, QuantizedLinear
from tpuport.quantization.published import config_of, read_published
from tpuport.quantization.report import QuantizationReport, report_of
from tpuport.quantization.scheme import QuantizationScheme
from tpuport.quantization.transforms import transform_of
from tpuport.weights.checkpoint import Checkpoint, open_checkpoint

_KINDS = {"linear": QuantizedLinear, "convolution": QuantizedConv, "experts": QuantizedExperts}
KEY = "tpuport.quantization"
VERSION = 1


@dataclass(frozen=True)
class Opened:
    """A checkpoint of a quantized model, opened for one model.

    Attributes:
        layers: the quantized layers by name, on the meta device.
        schemes: their schemes.
        values: the checkpoint, with the names that those layers have.
        report: the report that was saved, if it was.
    """

    layers: Mapping[str, torch.nn.Module]
    schemes: tuple[QuantizationScheme, ...]
    values: Checkpoint
    report: QuantizationReport | None


def metadata_of(module: torch.nn.Module, report: QuantizationReport) -> dict[str, str]:
    """Return what a file says about the quantized layers of a module.

    Raises:
        CheckpointError: A buffer of one is None, which no file can hold.
    """
    schemes: list[QuantizationScheme] = []
    layers = {}
    for name, one in module.named_modules():
        kind = next((kind for kind, cls in _KINDS.items() if isinstance(one, cls)), None)
        if kind is not None:
            layer: Any = one
            refuse_none(name, layer)
            if layer.scheme not in schemes:
                schemes.append(layer.scheme)
            layers[name] = {"scheme": schemes.index(layer.scheme), "kind": kind}
            if isinstance(one, QuantizedConv):
                layers[name]["how"] = one.how
    text = {
        "version": VERSION,
        "schemes": [asdict(one) for one in schemes],
        "layers": layers,
        "report": asdict(report),
    }
    return {KEY: json.dumps(text)}


def refuse_none(name: str, layer: torch.nn.Module) -> None:
    """Refuse a layer that is not whole.

    Raises:
        CheckpointError: One of its buffers is None.
    """
    found = [
        ".".join(filter(None, (name, part, key)))
        for part, module in layer.named_modules()
        for key, value in module._buffers.items()
        if value is None
    ]
    if found:
        raise CheckpointError(
            f"{found[0]} of the quantized model is None: the file would lack it, and whoever reads"
            " it would compute with something else. What to do: quantize the float model again"
        )


def open_quantized(source: str | Path | Checkpoint, model: torch.nn.Module) -> Opened:
    """Open a checkpoint of a quantized model: one of tpuport's, or of a published format.

    Raises:
        CheckpointError: it is neither, or it does not fit the model.
    """
    opened = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    if KEY in opened.metadata:
        return _own(opened, model)
    config = config_of(opened.path)
    if config is None:
        raise CheckpointError(
            f"{opened.path} says nothing about quantization: it has no metadata {KEY!r}, as"
            " tpuport.save_checkpoint writes for a quantized model in safetensors, and no"
            " config.json with a quantization_config beside it.\nWhat to do: load float weights by"
            " tpuport.convert(model).load(path), and quantize that"
        )
    layers, values = read_published(opened, config, model)
    refuse_misfits(layers, model, opened)
    for name, one in layers.items():
        one.instead_of(model.get_submodule(name))
    return Opened(layers, tuple(one.scheme for one in layers.values()), values, None)


def _own(opened: Checkpoint, model: torch.nn.Module) -> Opened:
    said = json.loads(opened.metadata[KEY])
    if said["version"] != VERSION:
        raise CheckpointError(
            f"{opened.path} has version {said['version']} of the quantized layout, and this tpuport"
            f" reads version {VERSION}; use the tpuport that wrote it, or quantize again"
        )
    schemes = [QuantizationScheme(**one) for one in said["schemes"]]
    layers = {}
    for name, one in said["layers"].items():
        own = {n.removeprefix(f"{name}."): opened[n] for n in opened if n.startswith(f"{name}.")}
        if not any(key.endswith("codes") for key in own):
            raise CheckpointError(f"{opened.path} has no codes of {name}, which its metadata names")
        tensors = {
            key: torch.empty(info.shape, dtype=info.dtype, device="meta")
            for key, info in own.items()
        }
        refuse_other_kind(name, one["kind"], model, opened)
        there = model.get_submodule(name)
        layers[name] = _of_tensors(schemes[one["scheme"]], tensors, one, there).instead_of(there)
    linear = {n: one for n, one in layers.items() if isinstance(one, QuantizedLinear)}
    refuse_misfits(linear, model, opened)
    return Opened(layers, tuple(schemes), opened, report_of(said["report"]))


def _of_tensors(
    scheme: QuantizationScheme,
    tensors: Mapping[str, torch.Tensor],
    said: Mapping[str, Any],
    layer: torch.nn.Module,
) -> FrozenLayer:
    """Return the quantized form of a layer, of its `state_dict`."""
    if said["kind"] == "convolution":
        return QuantizedConv(scheme, said["how"], dict(tensors))
    if said["kind"] == "experts":
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in tensors.items():
            part, _, name = key.partition(".")
            parts.setdefault(part, {})[name] = value
        stacks = (StackedLinear(scheme, parts[name]) for name in ("gate_up_proj", "down_proj"))
        return QuantizedExperts(layer, *stacks)
    around = {}
    for part in ("inputs", "restore"):
        found = {}
        for key, value in tensors.items():
            if key.startswith(f"{part}."):
                _, index, kind = key.split(".")
                found[int(index)] = transform_of(kind, value)
        around[part] = [found[i] for i in sorted(found)]
    buffers = {key: value for key, value in tensors.items() if "." not in key}
    return QuantizedLinear(scheme, buffers, **around)


def refuse_other_kind(name: str, kind: str, model: torch.nn.Module, opened: Checkpoint) -> None:
    """Refuse a layer that the model does not have.

    Raises:
        CheckpointError: there is no such module, or it is of another kind.
    """
    there = dict(model.named_modules()).get(name)
    of_kind = there is not None and {
        "linear": isinstance(there, torch.nn.Linear),
        "convolution": isinstance(there, torch.nn.modules.conv._ConvNd),
        "experts": are_experts(there),
    }.get(kind, False)
    if not of_kind:
        found = "no such module" if there is None else f"a {type(there).__name__}"
        raise CheckpointError(
            f"{opened.path} has a quantized layer {name!r} ({kind}), and the model has {found}"
            " there"
        )


def refuse_misfits(
    layers: Mapping[str, QuantizedLinear], model: torch.nn.Module, opened: Checkpoint
) -> None:
    """Refuse layers that are no linear layers of the model, or of other sizes.

    Raises:
        CheckpointError: one does not fit.
    """
    for name, layer in layers.items():
        refuse_other_kind(name, "linear", model, opened)
        there: Any = model.get_submodule(name)
        sizes = (layer.out_features, layer.in_features)
        wanted = (there.out_features, there.in_features)
        if sizes != wanted:
            raise CheckpointError(
                f"{name!r} has {sizes[0]} output and {sizes[1]} input features in {opened.path},"
                f" and {wanted[0]} and {wanted[1]} in the model"
            )
