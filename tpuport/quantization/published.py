"""Checkpoints that other tools quantized: compressed-tensors, GPTQ and AWQ.

Each layer's codes, scales and zero points become the buffers of a `QuantizedLinear`, bit for bit.
What a format has and that layer has not is refused.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tpuport.foundation.errors import CheckpointError
from tpuport.quantization.layer import QuantizedLinear
from tpuport.quantization.rounding import Codes
from tpuport.quantization.scheme import QuantizationScheme
from tpuport.quantization.transforms import Permute
from tpuport.weights.checkpoint import Checkpoint

Config = Mapping[str, Any]
# AWQ's "gemm" kernels have the columns of eight in this order.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# compressed-tensors divides the largest value by half of 255; a row's scale here is over 127.
HALF_RANGE = 127 / 127.5


@dataclass(frozen=True)
class StoredLayer:
    """One layer as a file has it.

    Attributes:
        bits: of a code of its weight.
        codes: signed codes `[out, in]`.
        scale: `[groups, out]`.
        group: the input features of a group as the configuration has them; -1 or None: one group.
        zero: the code of 0.0, `[groups, out]`; None if that is 0.
        order: the columns by their groups, where these are not neighbours.
        inputs: fields of the scheme about its inputs.
        input_scale: the calibrated scale of its input.
    """

    bits: int
    codes: torch.Tensor
    scale: torch.Tensor
    group: int | None
    zero: torch.Tensor | None = None
    order: torch.Tensor | None = None
    inputs: Config | None = None
    input_scale: torch.Tensor | None = None


def config_of(path: Path) -> dict[str, Any] | None:
    """Return the `quantization_config` of the `config.json` at a checkpoint, or None."""
    folder = path if path.is_dir() else path.parent
    file = folder / "config.json"
    if not file.is_file():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    return found.get("quantization_config") or found.get("compression_config")


def read_published(
    opened: Checkpoint, config: Config, model: torch.nn.Module
) -> tuple[dict[str, QuantizedLinear], Checkpoint]:
    """Return the quantized layers of a checkpoint, and it with their names instead of its own.

    Raises:
        CheckpointError: the format is unknown, or it has what no layer here has.
    """
    method = config.get("quant_method", "")
    if method not in _FORMATS:
        raise CheckpointError(
            f"{opened.path} is quantized by {method!r}; tpuport reads"
            f" {', '.join(map(repr, _FORMATS))} and its own files.\nWhat to do: quantize the float"
            " checkpoint by tpuport.quantize"
        )
    format_ = _FORMATS[method]
    names = [
        n.removesuffix(f".{key}") for n in opened for key in format_.marks if n.endswith(f".{key}")
    ]
    layers, values, used = {}, {}, set()
    for name in sorted({n for n in names if format_.has(opened, n)}):
        part = _Part(opened, name)
        layer = _layer(part, format_.read(part, config), _bias(part, model))
        state = layer.state_dict(prefix=f"{name}.")
        values |= {key: value for key, value in state.items() if not key.endswith(".bias")}
        used |= part.used
        layers[name] = layer.to("meta")
    if not layers:
        raise CheckpointError(f"{opened.path} has no layer of the format {method!r}")
    return layers, opened.replaced(values, used)


class _Part:
    """The tensors of one layer in a checkpoint; `used` has the names that were read."""

    def __init__(self, opened: Checkpoint, name: str) -> None:
        self.opened, self.name, self.used = opened, name, set[str]()

    def __call__(self, key: str) -> torch.Tensor:
        """Read a tensor."""
        self.used.add(f"{self.name}.{key}")
        return self.opened.read(f"{self.name}.{key}")

    def optional(self, key: str) -> torch.Tensor | None:
        """Read a tensor that may be absent."""
        return self(key) if f"{self.name}.{key}" in self.opened else None

    def refuse(self, what: str) -> CheckpointError:
        """Return the error that a layer has something unknown."""
        return CheckpointError(
            f"{self.name!r} in {self.opened.path} has {what}, which no layer of tpuport has.\nWhat"
            " to do: quantize the float checkpoint by tpuport.quantize"
        )


def _bias(part: _Part, model: torch.nn.Module) -> torch.Tensor | None:
    """Return the bias of the model's layer; files of GPTQ have zeros where it has none."""
    layer = dict(model.named_modules()).get(part.name)
    bias = getattr(layer, "bias", None)
    if bias is None and (given := part.optional("bias")) is not None and given.any():
        raise CheckpointError(
            f"{part.name!r} has a bias in {part.opened.path}, and in the model none"
        )
    return bias


def _layer(part: _Part, found: StoredLayer, bias: torch.Tensor | None) -> QuantizedLinear:
    groups, num = found.scale.shape[0], found.codes.shape[1]
    size = num if found.group in (None, -1) else min(int(found.group or num), num)
    if size * groups != num:
        raise part.refuse(f"{groups} groups of {num} input features, and a group of {size}")
    scheme = QuantizationScheme(
        found.bits, group=None if groups == 1 else size, symmetric=found.zero is None,
        **(found.inputs or {"activation_bits": 16}),
    )  # fmt: skip
    codes, inputs = found.codes, []
    if found.order is not None:
        codes, inputs = codes[:, found.order], [Permute(found.order)]
    values = codes.unflatten(1, (groups, size)).transpose(0, 1)
    zero = None if found.zero is None else found.zero.float()
    made = Codes(values.contiguous(), found.scale.float().contiguous(), zero)
    return QuantizedLinear.of_codes(
        *(made, scheme, inputs), bias=bias, input_scale=found.input_scale
    )


def unpacked(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Return the unsigned codes that each int32 holds, the lowest bits first, along a dim."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    parts = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return parts.movedim(-1, dim + 1).flatten(dim, dim + 1)


def packed(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Return the int32 words that `unpacked` reads; the last one may hold fewer codes."""
    moved = codes.long().movedim(dim, -1)
    each = 32 // bits
    parts = torch.nn.functional.pad(moved, (0, -moved.shape[-1] % each)).unflatten(-1, (-1, each))
    words = (parts << torch.arange(0, 32, bits)).sum(-1)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


def _by_group(part: _Part, key: str, groups: int) -> torch.Tensor | None:
    """Return the columns in the order of their groups; None if they are in it."""
    index = part.optional(key)
    if index is None or groups == 1:
        return None
    if len(set(torch.bincount(index, minlength=groups).tolist())) > 1:
        raise part.refuse("groups of several sizes")
    order = torch.argsort(index, stable=True)
    return None if torch.equal(order, torch.arange(len(index))) else order


# -- compressed-tensors ----------------------------------------------------------------------------


def _read_compressed(part: _Part, config: Config) -> StoredLayer:
    group = _group_of(part, config)
    weights = group["weights"]
    bits, kind = weights["num_bits"], weights.get("type", "int")
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
        raise part.refuse(f"weights of {bits} bits ({kind})")
    if len(part.opened[f"{part.name}.weight_scale"].shape) > 2:
        raise part.refuse("weights in one stack")
    if weights.get("strategy") not in ("tensor", "channel", "group"):
        raise part.refuse(f"scales by {weights.get('strategy')!r}")
    if f"{part.name}.weight_packed" in part.opened:
        rows, columns = part("weight_shape").tolist()
        codes = unpacked(part("weight_packed"), bits, 1)[:, :columns] - 2 ** (bits - 1)
    else:
        codes = part("weight")
        if codes.dtype is not (torch.float8_e4m3fn if kind == "float" else torch.int8):
            raise part.refuse(f"a weight of {codes.dtype}, where codes are expected")
        rows = codes.shape[0]
    scale = part("weight_scale").reshape(-1, part.opened[f"{part.name}.weight_scale"].shape[-1])
    scale = scale.expand(rows, -1).t()
    zero = part.optional("weight_zero_point")
    if zero is not None and zero.dtype == torch.int32:
        zero = unpacked(zero, bits, 0)[:rows] - 2 ** (bits - 1)
    zero = None if zero is None else zero.reshape(-1, zero.shape[-1]).expand(rows, -1).t()
    if zero is not None and not zero.any():
        zero = None
    order = _by_group(part, "weight_g_idx", scale.shape[0])
    inputs, input_scale = _inputs(part, group.get("input_activations"), kind)
    group_size = weights.get("group_size")
    return StoredLayer(bits, codes, scale, group_size, zero, order, inputs, input_scale)


def _inputs(part: _Part, said: Config | None, of_weight: str) -> tuple[Config, torch.Tensor | None]:
    """Return the scheme of a layer's inputs, and their calibrated scale."""
    number = {"number": "float8"} if of_weight == "float" else {}
    if said is None:
        return {"activation_bits": 16, **number}, None
    bits, kind = said["num_bits"], said.get("type", "int")
    if bits != 8 or kind != of_weight or not said.get("symmetric", True):
        raise part.refuse(f"inputs of {bits} bits ({kind}, symmetric={said.get('symmetric')})")
    if said.get("dynamic") is True and said.get("strategy") == "token":
        clip = {} if number else {"activation_clip": HALF_RANGE}
        return {"activation_bits": 8, **clip, **number}, None
    if not said.get("dynamic") and said.get("strategy") == "tensor":
        part.optional("input_zero_point")
        scale = part("input_scale").float().reshape(())
        return {"activation_bits": 8, "activations": "tensor", **number}, scale
    raise part.refuse(
        f"scales of inputs by {said.get('strategy')!r}, dynamic={said.get('dynamic')}"
    )


def _group_of(part: _Part, config: Config) -> Config:
    """Return the group of a configuration that a layer belongs to."""
    for key in ("transform_config", "kv_cache_scheme"):
        if config.get(key):
            raise part.refuse(f"a {key}")
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise part.refuse("sparse weights")
    groups = list(config["config_groups"].values())
    fitting = [one for one in groups if _targets(one.get("targets", ()), part.name)]
    if len(fitting) != 1:
        raise part.refuse(f"{len(fitting)} groups of the configuration")
    if fitting[0].get("output_activations"):
        raise part.refuse("rounded outputs")
    return fitting[0]


def _targets(targets: Iterable[str], name: str) -> bool:
    return any(
        re.match(one.removeprefix("re:"), name)
        if one.startswith("re:")
        else one in ("Linear", name)
        for one in targets
    )


def _is_compressed(opened: Checkpoint, name: str) -> bool:
    return f"{name}.weight_scale" in opened


# -- GPTQ and AWQ ----------------------------------------------------------------------------------


def _read_gptq(part: _Part, config: Config) -> StoredLayer:
    bits = config["bits"]
    if bits not in (4, 8):
        raise part.refuse(f"weights of {bits} bits")
    version = config.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise part.refuse(f"the checkpoint_format {version!r}")
    codes = unpacked(part("qweight"), bits, 0).t() - 2 ** (bits - 1)
    scale, stored = part("scales"), unpacked(part("qzeros"), bits, 1)[:, : codes.shape[0]]
    if scale.shape != stored.shape or scale.shape[1] != codes.shape[0]:
        raise part.refuse(f"codes that are not of {bits} bits")
    if version == "gptq":
        if bool((stored == 2**bits - 1).any()):
            # It was 0 - 1 when it was packed, and readers differ in what they make of it.
            raise part.refuse("a zero point of 0 in the first version of the format")
        stored = stored + 1
    zero = stored - 2 ** (bits - 1)
    order = _by_group(part, "g_idx", scale.shape[0])
    return StoredLayer(
        bits, codes, scale, config.get("group_size"), zero if zero.any() else None, order
    )


def _read_awq(part: _Part, config: Config) -> StoredLayer:
    version, bits = config.get("version", "gemm").lower(), config.get("bits", 4)
    if version != "gemm" or bits != 4:
        raise part.refuse(f"weights of {bits} bits in the version {version!r}")

    def columns(packed: torch.Tensor) -> torch.Tensor:
        parts = unpacked(packed, bits, 1).unflatten(1, (-1, 8))
        return parts[..., torch.tensor(AWQ_ORDER).argsort()].flatten(1)

    codes, scale = columns(part("qweight")).t() - 8, part("scales")
    zero = part.optional("qzeros")
    zero = None if zero is None else columns(zero) - 8
    zero = None if zero is None or not zero.any() else zero
    return StoredLayer(bits, codes, scale, config.get("group_size"), zero)


def _is_packed(opened: Checkpoint, name: str) -> bool:
    return f"{name}.scales" in opened


@dataclass(frozen=True)
class _Format:
    """One published format: the tensor that marks a layer, and how a layer is read."""

    marks: tuple[str, ...]
    has: Callable[[Checkpoint, str], bool]
    read: Callable[[_Part, Config], StoredLayer]


_FORMATS = {
    "compressed-tensors": _Format(("weight_packed", "weight"), _is_compressed, _read_compressed),
    "gptq": _Format(("qweight",), _is_packed, _read_gptq),
    "awq": _Format(("qweight",), _is_packed, _read_awq),
}
