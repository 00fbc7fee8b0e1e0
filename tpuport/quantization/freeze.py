"""Float layers to frozen ones, on the host."""

from collections.abc import Iterable, Mapping
from typing import Any, overload

import numpy as np
import torch

from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop.name_patterns import matches, refuse_unmatched
from tpuport.foundation.pytree.clone import clone_module
from tpuport.quantization import duquant
from tpuport.quantization.convolution import QuantizedConv, why_no_convolution
from tpuport.quantization.error_feedback import awq, gptq
from tpuport.quantization.experts import QuantizedExperts, are_experts, why_no_experts
from tpuport.quantization.layer import FrozenLayer, QuantizedLinear
from tpuport.quantization.rounding import round_weight
from tpuport.quantization.scheme import QuantizationScheme
from tpuport.quantization.statistics import Statistics, input_scale
from tpuport.quantization.transforms import Divide, Permute, Rotate, Transform, hadamard

_LEAST = 1e-5
Found = Mapping[str, np.ndarray]


def select(
    model: torch.nn.Module, scheme: QuantizationScheme, keep: Iterable[str]
) -> tuple[dict[str, torch.nn.Module], dict[str, str]]:
    """Return the layers to quantize by name, and why each other module with weights is kept.

    Raises:
        UsageError: A pattern to keep matches no module, or there is nothing to quantize.
    """
    keep = (keep,) if isinstance(keep, str) else tuple(keep)
    modules = {
        name: module
        for name, module in model.named_modules()
        if any(p.dim() > 1 for p in module.parameters(recurse=False))
    }
    refuse_unmatched(keep, modules, "module with weights")
    users: dict[int, list[str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(one), []).append(name)
    kept = {}
    for name, module in modules.items():
        reason = next((f"keep has {p!r}" for p in keep if matches(p, name)), None)
        reason = reason or _why_kept(name, module, scheme, users)
        if reason is not None:
            kept[name] = reason
    layers = {name: module for name, module in modules.items() if name not in kept}
    if not layers:
        shown = "; ".join(f"{name or 'the model'}: {why}" for name, why in list(kept.items())[:4])
        raise UsageError(f"no layer can be quantized: {shown or 'the model has no such layer'}")
    return layers, kept


def _why_kept(
    name: str, module: torch.nn.Module, scheme: QuantizationScheme, users: Mapping[int, list[str]]
) -> str | None:
    """Return why a module stays in float, or None."""
    reason = _why_no_kind(module, scheme)
    if reason is not None:
        return reason
    if not name:
        return "the model is itself the layer; put it in a module"
    own = {f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)}
    others = [n for p in module.parameters(recurse=False) for n in users[id(p)] if n not in own]
    if others:
        return f"its weight is {others[0]} too"
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has hooks, which see the float layer"
    return None


def _why_no_kind(module: torch.nn.Module, scheme: QuantizationScheme) -> str | None:
    """Return why a module is of no kind that the scheme quantizes, or None."""
    if type(module) is torch.nn.Linear:
        return _why_sizes_do_not_fit(module, scheme)
    if isinstance(module, torch.nn.modules.conv._ConvNd):
        return why_no_convolution(module, scheme)
    if are_experts(module):
        return why_no_experts(module, scheme)
    if isinstance(module, torch.nn.Embedding):
        return "rows of an embedding are looked up, not multiplied"
    return f"a {type(module).__name__} is no plain torch.nn.Linear"


def inputs_of(layer: torch.nn.Module) -> tuple[int, int]:
    """Return the number of a layer's input features, and their dim in its input."""
    given: Any = layer
    if isinstance(layer, torch.nn.modules.conv._ConvNd):
        return given.in_channels, -1 - len(given.stride)
    weight = given.gate_up_proj if are_experts(layer) else given.weight
    return weight.shape[-1], -1


def _why_sizes_do_not_fit(module: torch.nn.Linear, scheme: QuantizationScheme) -> str | None:
    size = scheme.group or (2 if scheme.weight_bits == 4 else 1)
    sizes = {"group": size}
    if scheme.method in ("hadamard", "duquant"):
        sizes["block"] = scheme.block
    for what, one in sizes.items():
        if module.in_features % one:
            return f"its {module.in_features} input features are no multiple of {what}={one}"
    if scheme.method == "duquant" and scheme.rotate_outputs and scheme.basis == "svd":
        if module.out_features % scheme.block:
            return (
                f"its {module.out_features} output features are no multiple of block={scheme.block}"
            )
    return None


def transforms_of(
    layer: torch.nn.Module, scheme: QuantizationScheme, found: Found | None
) -> list[Transform]:
    """Return what the scheme does to a layer's input before it is rounded."""
    if not isinstance(layer, torch.nn.Linear):
        return []
    weight = layer.weight.detach()
    if scheme.method == "hadamard":
        return [Rotate(hadamard(scheme.block)[None])]
    if scheme.method == "duquant" and scheme.basis == "svd":
        return duquant.from_weight(weight, scheme)
    if scheme.method in ("round", "gptq"):
        return []
    if weight.is_meta:
        return _shapes_of_calibrated(weight, scheme)
    if found is None:
        return []
    if scheme.method == "duquant":
        return list(duquant.from_inputs(torch.from_numpy(found["rows"].copy()), scheme))
    if scheme.method == "awq":
        gram, sizes = (torch.from_numpy(found[key].copy()) for key in ("gram", "sizes"))
        return [Divide(awq(weight.float(), gram, sizes.float(), scheme))]
    peaks = torch.from_numpy(np.maximum(np.abs(found["low"]), np.abs(found["high"])))
    of_weight = _at_least(weight.float().abs().amax(0))
    factors = _at_least(peaks) ** scheme.strength / of_weight ** (1 - scheme.strength)
    return [Divide(_at_least(factors))]


def _at_least(sizes: torch.Tensor) -> torch.Tensor:
    """Return sizes without zeros: at least 1e-5, or a share of the largest if that is below 1."""
    largest = float(sizes.max())
    return sizes.clamp_min(_LEAST * min(largest or 1.0, 1.0))


def _shapes_of_calibrated(weight: torch.Tensor, scheme: QuantizationScheme) -> list[Transform]:
    """Return what calibration would give a layer on the meta device."""
    per_channel, block = weight[0], weight.new_empty(1, scheme.block, scheme.block)
    if scheme.method in ("smooth", "awq"):
        return [Divide(per_channel)]
    return [Rotate(block), Permute(per_channel), Rotate(block)]


@overload
def freeze_layer(
    layer: torch.nn.Linear, scheme: QuantizationScheme, found: Found | None
) -> QuantizedLinear: ...


@overload
def freeze_layer(
    layer: torch.nn.Module, scheme: QuantizationScheme, found: Found | None
) -> FrozenLayer: ...


@torch.no_grad()
def freeze_layer(
    layer: torch.nn.Module, scheme: QuantizationScheme, found: Found | None
) -> FrozenLayer:
    """Return the frozen form of a layer."""
    made: FrozenLayer
    if isinstance(layer, torch.nn.Linear):
        made = _freeze_linear(layer, scheme, found)
    elif isinstance(layer, torch.nn.modules.conv._ConvNd):
        made = QuantizedConv.of(layer, scheme, _input_scale(layer, scheme, found))
    else:
        made = QuantizedExperts.of(layer, scheme)
    return made.instead_of(layer)


def _freeze_linear(
    layer: torch.nn.Linear, scheme: QuantizationScheme, found: Found | None
) -> QuantizedLinear:
    weight = layer.weight.detach().float()
    transforms = transforms_of(layer, scheme, found)
    for one in transforms:
        weight = one.of_weight(weight)
    restore = []
    if scheme.method == "duquant" and scheme.basis == "svd" and scheme.rotate_outputs:
        rotation = duquant.output_rotation(layer.weight.detach(), scheme)
        weight = rotation(weight.t()).t()
        restore = [rotation.inverse()]
    if scheme.is_static and scheme.method in ("smooth", "awq") and found is not None:
        factors = transforms[0].factors.numpy()  # pyright: ignore[reportCallIssue]
        found = {"low": found["low"] / factors, "high": found["high"] / factors}
    if scheme.method == "gptq" and found is not None and not weight.is_meta:
        codes = gptq(weight, torch.from_numpy(found["gram"].copy()), scheme)
    else:
        codes = round_weight(weight, scheme)
    return QuantizedLinear.of_codes(
        *(codes, scheme, transforms, restore),
        bias=layer.bias,
        input_scale=_input_scale(layer, scheme, found),
    )


def _input_scale(
    layer: torch.nn.Module, scheme: QuantizationScheme, found: Found | None
) -> torch.Tensor | None:
    if not scheme.is_static:
        return None
    if is_meta(layer):
        size = inputs_of(layer)[0] if scheme.activations == "channel" else ()
        return torch.empty(size, device="meta")
    return None if found is None else input_scale(found, scheme)


def is_meta(layer: torch.nn.Module) -> bool:
    """Return whether a layer has shapes and no values."""
    return any(one.is_meta for one in layer.parameters(recurse=False))


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the same memory that asks for no gradient."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(tensor.detach(), requires_grad=False)
    return tensor.detach()


def with_layers(model: torch.nn.Module, layers: Mapping[str, torch.nn.Module]) -> torch.nn.Module:
    """Return a copy of a model, tensors shared, in which layers are replaced."""
    made = clone_module(model, _shared)[0]
    old = {name: made.get_submodule(name) for name in layers}
    # The same module may be known by several names, and all of them mean the new one.
    new = {id(old[name]): layer for name, layer in layers.items()}
    for parent in list(made.modules()):
        for key, child in parent._modules.items():
            if id(child) in new:
                parent._modules[key] = new[id(child)]
    return made


@torch.no_grad()
def freeze(
    model: torch.nn.Module,
    scheme: QuantizationScheme,
    statistics: Statistics | None,
    keep: Iterable[str] = (),
) -> tuple[torch.nn.Module, dict[str, FrozenLayer], dict[str, str]]:
    """Return a copy of a model with frozen layers, those layers, and why others are kept.

    Raises:
        UsageError: There is nothing to quantize.
    """
    layers, kept = select(model, scheme, keep)
    known = {} if statistics is None else statistics.layers
    for name in list(layers) if scheme.is_calibrated else ():
        if is_meta(layers[name]):
            continue
        if name not in known or not int(known[name]["calls"]):
            kept[name] = "no batch of the calibration reached it"
            del layers[name]
    if not layers:
        raise UsageError(
            f"{scheme.name} with method={scheme.method!r} needs calibration, and no batch of it"
            " reached a layer; pass calibration=batches, each the arguments of a call"
        )
    frozen = {name: freeze_layer(one, scheme, known.get(name)) for name, one in layers.items()}
    return with_layers(model, frozen), frozen, kept
