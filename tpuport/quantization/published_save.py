"""Quantized models in files that other tools read: compressed-tensors, GPTQ and AWQ.

A layer is written as the integers that it computes with, so that what is read stands for the same
weights to the bit. What a format has no place for is refused.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tpuport.foundation.errors import UsageError
from tpuport.foundation.files import flushed, replacing_folder
from tpuport.model.ported_model import PortedModel
from tpuport.quantization.layer import FrozenLayer, QuantizedLinear
from tpuport.quantization.product import unpack
from tpuport.quantization.published import AWQ_ORDER, HALF_RANGE, StoredLayer, packed
from tpuport.quantization.scheme import QuantizationScheme
from tpuport.quantization.transforms import Divide, Permute, Rotate
from tpuport.weights.locate import is_weights
from tpuport.weights.save import save_checkpoint

Format = Literal["compressed-tensors", "gptq", "awq"]
Tensors = dict[str, torch.Tensor]
_CONFIG = "config.json"


def save_published(
    path: str | Path,
    model: PortedModel,
    format: Format = "compressed-tensors",
    *,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a quantized model as a directory of Hugging Face's, for other tools.

    Weights and `config.json` with its `quantization_config` are written at once; other files of
    an existing directory stay. The rest of the configuration is the model's own if it has one as
    transformers' models do, or else that of the directory. Weights in float keep their dtypes, and
    scales are float32.

    Args:
        path: a directory.
        model: the result of `tpuport.quantize`.
        format: "compressed-tensors", "gptq" or "awq".
        max_shard_size: the most bytes of one file of weights.

    Raises:
        UsageError: The format has no place for what the model has, such as rotations.
        CheckpointError: The files cannot be written.
    """
    if format not in _WRITERS:
        raise UsageError(f"format is one of {', '.join(map(repr, _WRITERS))}; got {format!r}")
    folder, module = Path(path), model.to_torch()
    if folder.is_file():
        raise UsageError(f"{folder} is a file; {format} is a directory with a {_CONFIG}")
    layers, write = _layers(module, format), _WRITERS[format]
    said = write.config(module, layers)
    tensors: Tensors = dict(module.state_dict())
    for name, one in layers.items():
        for key in module.get_submodule(name).state_dict():
            if key != "bias":
                del tensors[f"{name}.{key}"]
        tensors |= {f"{name}.{key}": value for key, value in write.tensors(one, said).items()}
    text = json.dumps(_config(folder, module, said), indent=2) + "\n"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing_folder(folder, lambda n: n != _CONFIG and not is_weights(n)) as temporary:
        with flushed(temporary / _CONFIG) as out:
            out.write(text.encode())
        save_checkpoint(temporary, tensors, max_shard_size=max_shard_size)


@dataclass(frozen=True)
class _Layer:
    """One layer to write: its name, its scheme, and what stands in a file."""

    name: str
    format: str
    scheme: QuantizationScheme
    stored: StoredLayer

    def refuse(self, what: str, instead: str) -> UsageError:
        """Return the error that the format has no place for something that the layer has."""
        return _refusal(self.name, self.format, what, instead)

    @property
    def unsigned(self) -> torch.Tensor:
        """Return the codes from 0, `[out, in]`."""
        return self.stored.codes.long() + 2 ** (self.stored.bits - 1)

    @property
    def zeros(self) -> torch.Tensor:
        """Return the codes of 0.0 from 0, `[groups, out]`."""
        middle = 2 ** (self.stored.bits - 1)
        if self.stored.zero is None:
            return torch.full(self.stored.scale.shape, middle)
        return self.stored.zero.long() + middle


def _refusal(name: str, format: str, what: str, instead: str) -> UsageError:
    return UsageError(
        f"{name!r} has {what}, which {format} has no place for.\nWhat to do: {instead}; or write"
        " tpuport's own layout by tpuport.save_checkpoint"
    )


def _layers(module: torch.nn.Module, format: str) -> dict[str, _Layer]:
    """Return the quantized layers of a module as they stand in a file."""
    found = {}
    for name, one in module.named_modules(remove_duplicate=False):
        if isinstance(one, QuantizedLinear):
            found[name] = _Layer(name, format, one.scheme, _stored(name, one, format))
        elif isinstance(one, FrozenLayer):
            what = f"codes of a {type(one).__name__}"
            raise _refusal(name, format, what, "name it in keep= of tpuport.quantize")
    if not found:
        raise UsageError("the model has no quantized layer; give the result of tpuport.quantize")
    return found


_WHY = {Divide: "inputs that are divided by factors", Rotate: "inputs that are rotated"}


def _stored(name: str, layer: QuantizedLinear, format: str) -> StoredLayer:
    """Return a layer as a file has it, the columns in the order of its inputs."""
    scheme, order = layer.scheme, None
    rounding = "use method='round' or 'gptq'"
    if len(layer.restore):
        raise _refusal(name, format, "outputs that are rotated back", rounding)
    for one in layer.inputs:
        if not isinstance(one, Permute) or len(layer.inputs) > 1:
            what = next(
                (why for cls, why in _WHY.items() if isinstance(one, cls)), "two transforms"
            )
            raise _refusal(name, format, what, rounding)
        order = one.order.long()
    groups, _, size = (values := unpack(layer.codes, scheme.weight_bits)).shape
    codes = values.transpose(0, 1).flatten(1)
    if order is not None:
        codes = codes[:, order.argsort()]
    zero = None
    if "offset" in layer._buffers:
        zero = torch.round(layer.offset / layer.scale)
        least = -(2 ** (scheme.weight_bits - 1))
        if not torch.equal(zero * layer.scale, layer.offset) or not (
            least <= int(zero.min()) and int(zero.max()) < -least
        ):
            raise _refusal(
                name, format, "zero points beyond its codes", "quantize with symmetric=True"
            )
    return StoredLayer(
        scheme.weight_bits,
        codes,
        layer.scale,
        scheme.group or (None if groups == 1 else size),
        zero,
        order if groups > 1 else None,
        input_scale=layer._buffers.get("input_scale"),
    )


def _config(folder: Path, module: torch.nn.Module, said: dict[str, Any]) -> dict[str, Any]:
    """Return the content of `config.json`."""
    own: Any = getattr(module, "config", None)
    found: dict[str, Any] = {}
    if hasattr(own, "to_json_string"):
        found = {"architectures": [type(module).__name__], **json.loads(own.to_json_string())}
    elif (folder / _CONFIG).is_file():
        found = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    found.pop("compression_config", None)
    return {**found, "quantization_config": said}


def _in_float(module: torch.nn.Module) -> list[str]:
    """Return the names of linear layers that stay in float."""
    modules = module.named_modules(remove_duplicate=False)
    return [name for name, one in modules if isinstance(one, torch.nn.Linear)]


# -- compressed-tensors ----------------------------------------------------------------------------


def _compressed(layer: _Layer, _: Mapping[str, Any]) -> Tensors:
    stored, bits = layer.stored, layer.stored.bits
    if stored.order is not None:
        raise layer.refuse("groups of columns that are no neighbours", 'write format="gptq"')
    made = {"weight_scale": stored.scale.t().contiguous()}
    if _is_packed(layer.scheme):
        made["weight_packed"] = packed(layer.unsigned, bits, 1)
        made["weight_shape"] = torch.tensor(stored.codes.shape)
        if stored.zero is not None:
            made["weight_zero_point"] = packed(layer.zeros.t(), bits, 0)
    else:
        made["weight"] = stored.codes.contiguous()
        if stored.zero is not None:
            made["weight_zero_point"] = stored.zero.to(torch.int8).t().contiguous()
    if stored.input_scale is not None:
        made["input_scale"] = stored.input_scale.float().reshape(1)
    return made


def _is_packed(scheme: QuantizationScheme) -> bool:
    if scheme.number == "float8":
        return False
    return scheme.weight_bits == 4 or scheme.activation_bits == 16


def _compressed_config(module: torch.nn.Module, layers: Mapping[str, _Layer]) -> dict[str, Any]:
    found: list[tuple[dict[str, Any], list[str]]] = []
    for name, one in layers.items():
        group = _group(one)
        names = next((names for known, names in found if known == group), None)
        if names is None:
            found.append((group, names := []))
        names.append(name)
    formats = {group["format"] for group, _ in found}
    groups = {
        # Engines that fuse layers know them by their class, so names are for several groups only.
        f"group_{i}": {"targets": names if len(found) > 1 else ["Linear"], **group}
        for i, (group, names) in enumerate(found)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": _in_float(module),
        "kv_cache_scheme": None,
    }


def _group(layer: _Layer) -> dict[str, Any]:
    """Return a layer's group of the configuration, without its targets."""
    scheme, stored = layer.scheme, layer.stored
    of_floats = scheme.number == "float8"
    weights = {
        "num_bits": stored.bits,
        "type": "float" if of_floats else "int",
        "symmetric": stored.zero is None,
        "strategy": "channel" if stored.group is None else "group",
        "group_size": stored.group,
        "dynamic": False,
    }
    plain = "float-quantized" if of_floats else "int-quantized"
    return {
        "weights": weights,
        "input_activations": _inputs(layer),
        "output_activations": None,
        "format": "pack-quantized" if _is_packed(scheme) else plain,
    }


def _inputs(layer: _Layer) -> dict[str, Any] | None:
    """Return how the inputs of a layer are rounded."""
    scheme = layer.scheme
    if scheme.activation_bits == 16:
        return None
    number = "float" if scheme.number == "float8" else "int"
    made = {"num_bits": 8, "type": number, "symmetric": True}
    if scheme.activations == "tensor":
        return {**made, "strategy": "tensor", "dynamic": False}
    by_token = 'use activations="token" with activation_clip=127 / 127.5, or "tensor"'
    if scheme.activations == "channel":
        raise layer.refuse("scales by input channel", by_token)
    if not scheme.activation_symmetric:
        raise layer.refuse("zero points of inputs", "use activation_symmetric=True")
    if scheme.activation_clip != (HALF_RANGE if number == "int" else 1.0):
        range_ = "127.5" if number == "int" else "448"
        what = f"inputs whose scale by token is not their largest value over {range_}"
        clip = "127 / 127.5" if number == "int" else "1.0"
        raise layer.refuse(what, f"quantize with activation_clip={clip}")
    return {**made, "strategy": "token", "dynamic": True}


# -- GPTQ and AWQ ----------------------------------------------------------------------------------


def _refuse_inputs(layer: _Layer) -> None:
    if layer.scheme.activation_bits != 16:
        raise layer.refuse("rounded inputs", 'write format="compressed-tensors"')
    if layer.scheme.number != "int":
        raise layer.refuse("weights of float8", 'write format="compressed-tensors"')


def _refuse_sizes(layer: _Layer, each: int, *sizes: tuple[str, int]) -> None:
    for what, size in sizes:
        if size % each:
            raise layer.refuse(
                f"{size} {what} features, no multiple of {each}",
                "name it in keep= of tpuport.quantize",
            )


def _gptq(layer: _Layer, said: Mapping[str, Any]) -> Tensors:
    _refuse_inputs(layer)
    stored, bits = layer.stored, layer.stored.bits
    rows, columns = stored.codes.shape
    _refuse_sizes(layer, 32 // bits, ("output", rows), ("input", columns))
    index = torch.arange(columns) // (stored.group or columns)
    if stored.order is not None:
        index = index[stored.order.argsort()]
    return {
        "qweight": packed(layer.unsigned.t(), bits, 0),
        "qzeros": packed(layer.zeros - int(said["checkpoint_format"] == "gptq"), bits, 1),
        "scales": stored.scale.contiguous(),
        "g_idx": index.to(torch.int32),
    }


def _one_size(layers: Iterable[_Layer]) -> tuple[int, int]:
    """Return the bits and the group size of all layers, -1 for one group each."""
    layers = list(layers)
    first = next((one for one in layers if one.stored.group), layers[0])
    bits, group = first.stored.bits, first.stored.group
    for one in layers:
        # A layer as wide as a group of the others has one such group.
        size = one.stored.group or (group if one.stored.codes.shape[1] == group else None)
        if (one.stored.bits, size) != (bits, group):
            what = f"{one.stored.bits} bits in groups of {size or 'all columns'}, where"
            what += f" {first.name!r} has {bits} in groups of {group or 'all columns'}"
            raise one.refuse(what, 'write format="compressed-tensors"')
    return bits, group or -1


def _gptq_config(module: torch.nn.Module, layers: Mapping[str, _Layer]) -> dict[str, Any]:
    bits, group = _one_size(layers.values())
    # The first version has zero points less one, and its readers differ about a zero point of 0.
    second = any(bool((one.zeros == 0).any()) for one in layers.values())
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": all(one.stored.zero is None for one in layers.values()),
        "desc_act": any(one.stored.order is not None for one in layers.values()),
        "checkpoint_format": "gptq_v2" if second else "gptq",
        "lm_head": any(name.rpartition(".")[2] == "lm_head" for name in layers),
        "dynamic": {f"-:^{name.replace('.', '[.]')}$": {} for name in _in_float(module)},
    }


def _awq(layer: _Layer, _: Mapping[str, Any]) -> Tensors:
    _refuse_inputs(layer)
    stored, bits = layer.stored, layer.stored.bits
    if bits != 4:
        raise layer.refuse(f"weights of {bits} bits", 'write format="gptq"')
    if stored.order is not None:
        raise layer.refuse("groups of columns that are no neighbours", 'write format="gptq"')
    _refuse_sizes(layer, 8, ("output", stored.codes.shape[0]))

    def columns(codes: torch.Tensor) -> torch.Tensor:
        return packed(codes.unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1), bits, 1)

    scales = stored.scale.contiguous()
    return {
        "qweight": columns(layer.unsigned.t()),
        "qzeros": columns(layer.zeros),
        "scales": scales,
    }


def _awq_config(module: torch.nn.Module, layers: Mapping[str, _Layer]) -> dict[str, Any]:
    bits, group = _one_size(layers.values())
    return {
        "quant_method": "awq",
        "bits": bits,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": _in_float(module),
    }


@dataclass(frozen=True)
class _Writer:
    """One format: the tensors of a layer, given the configuration of all, and that."""

    tensors: Callable[[_Layer, Mapping[str, Any]], Tensors]
    config: Callable[[torch.nn.Module, Mapping[str, _Layer]], dict[str, Any]]


_WRITERS = {
    "compressed-tensors": _Writer(_compressed, _compressed_config),
    "gptq": _Writer(_gptq, _gptq_config),
    "awq": _Writer(_awq, _awq_config),
}
