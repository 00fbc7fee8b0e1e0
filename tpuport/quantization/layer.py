"""A linear layer as it is served: integer codes and scales in, no state written."""

from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch

from tpuport.foundation.errors import UsageError
from tpuport.quantization.product import pack, scaled_product
from tpuport.quantization.rounding import LEAST_STEP, Codes, step_of_range, to_float8
from tpuport.quantization.scheme import QuantizationScheme
from tpuport.quantization.transforms import Transform


class NoWeightError(UsageError, AttributeError):
    """Code asked a quantized layer's weight for more than its dtype and shape."""


class NoWeight:
    """Stands for the float weight that a frozen layer has not: its dtype and shape can be read."""

    def __init__(self, dtype: torch.dtype, shape: torch.Size) -> None:
        self.dtype, self.shape = dtype, shape

    def __getattr__(self, name: str) -> Any:
        """Refuse all else.

        Raises:
            NoWeightError: Always; code that computes with it would compute with something else.
        """
        raise NoWeightError(
            f"code outside of a quantized layer reads its weight (.{name}), and it holds integer"
            " codes only. What to do: name the layer in keep= of tpuport.quantize"
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to be given to a function of torch.

        Raises:
            NoWeightError: Always.
        """
        return getattr(self, getattr(func, "__name__", "weight"))


class FrozenLayer(torch.nn.Module):
    """A layer whose weight is in codes; models may ask for the dtype that it had."""

    _of_weight: tuple[torch.dtype, torch.Size] = torch.float32, torch.Size()

    @property
    def weight(self) -> Any:
        """Return what stands for the float weight."""
        return NoWeight(*self._of_weight)

    def instead_of(self, layer: torch.nn.Module) -> Self:
        """Take mode and the weight's dtype and shape from the layer that this one replaces."""
        weight = layer._parameters.get("weight")
        if weight is not None:
            self._of_weight = weight.dtype, weight.shape
        return self.train(layer.training)


class QuantizedLinear(FrozenLayer):
    """A frozen linear layer: a pure function of its buffers and its input.

    Buffers: `codes`, `scale`; and where the scheme has them `offset` (zero points times scales),
    `sums` (each channel's sum of weights), `input_scale`, `bias`; below `inputs` and `restore`
    those of the transforms.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor
    sums: torch.Tensor
    input_scale: torch.Tensor
    bias: torch.Tensor

    def __init__(
        self,
        scheme: QuantizationScheme,
        buffers: Mapping[str, torch.Tensor],
        inputs: Iterable[Transform] = (),
        restore: Iterable[Transform] = (),
    ) -> None:
        super().__init__()
        groups, self.out_features, size = buffers["codes"].shape
        self.in_features = groups * size * (8 // scheme.weight_bits)
        self.scheme = scheme
        self.inputs, self.restore = torch.nn.Sequential(*inputs), torch.nn.Sequential(*restore)
        for name, value in buffers.items():
            self.register_buffer(name, value)

    @classmethod
    def of_codes(
        cls,
        codes: Codes,
        scheme: QuantizationScheme,
        inputs: Iterable[Transform] = (),
        restore: Iterable[Transform] = (),
        *,
        bias: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
    ) -> Self:
        """Return the layer of a rounded weight.

        Raises:
            UsageError: the scheme's inputs have a calibrated scale, and none is given.
        """
        buffers = {"codes": pack(codes.values, scheme.weight_bits), "scale": codes.scale}
        if codes.zero is not None:
            buffers["offset"] = codes.zero * codes.scale
        if scheme.activation_bits == 8 and not scheme.activation_symmetric:
            buffers["sums"] = codes.weight().sum(-1)
        if scheme.is_static:
            if input_scale is None:
                raise UsageError("a scheme with calibrated inputs needs their scale")
            buffers["input_scale"] = input_scale
        if bias is not None:
            buffers["bias"] = bias.detach().clone()
        return cls(scheme, buffers, inputs, restore)

    @property
    def weight_dims(self) -> dict[str, tuple[int, int]]:
        """Return by buffer its dim of output features and its dim of input features.

        Those of one group are along the last dim of the codes, and of several groups the first.
        """
        dims = {"scale": (1, 0), "offset": (1, 0), "sums": (0, 0), "bias": (0, 0)}
        dims["codes"] = (1, 2 if self.codes.shape[0] == 1 else 0)
        return {name: one for name, one in dims.items() if name in self._buffers}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, in the input's dtype."""
        return apply(
            input, self.scheme, dict(self.named_buffers(recurse=False)), self.inputs, self.restore
        )


def apply(
    x: torch.Tensor,
    scheme: QuantizationScheme,
    held: Mapping[str, torch.Tensor],
    inputs: torch.nn.Sequential | None = None,
    restore: torch.nn.Sequential | None = None,
) -> torch.Tensor:
    """Return the output of a quantized linear layer with these buffers, in the input's dtype."""
    dtype = x.dtype
    if scheme.activation_bits == 16:
        # Rotations are float32; a product of bfloat16 rows with integer codes is exact.
        moved = inputs(x.float()).to(dtype) if inputs else x
        y = _product(moved, scheme, held)
    else:
        y = _rounded(x.float() if inputs is None else inputs(x.float()), scheme, held)
    if restore is not None:
        y = restore(y)
    if "bias" in held:
        y = y + held["bias"].float()
    return y.to(dtype)


def _product(
    x: torch.Tensor, scheme: QuantizationScheme, held: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Multiply codes or floats by the weight."""
    y = scaled_product(x, held["codes"], held["scale"], scheme.weight_bits)
    if "offset" in held:
        sums = x.unflatten(-1, (held["scale"].shape[0], -1)).float().sum(-1)
        y = y - torch.matmul(sums, held["offset"])
    return y


def _rounded(
    x: torch.Tensor, scheme: QuantizationScheme, held: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Round an input as the scheme says, and multiply."""
    if scheme.activations == "channel":
        # A scale of each term of the sum cannot be taken out of it: the product is of floats.
        step = held["input_scale"]
        return _product(input_codes(x / step, scheme).float() * step, scheme, held)
    if scheme.activations == "tensor":
        step = held["input_scale"]
        return _product(input_codes(x / step, scheme), scheme, held) * step
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    if scheme.activation_symmetric:
        # One division: where the largest value of a row is between two codes, two would move it.
        limit = scheme.input_limit / scheme.activation_clip
        step = (torch.maximum(high, -low) / limit).clamp_min(LEAST_STEP)
        return _product(input_codes(x / step, scheme), scheme, held) * step
    low, high = low * scheme.activation_clip, high * scheme.activation_clip
    step = step_of_range(low, high, 8)
    zero = torch.round(-low / step) - 128
    y = _product(input_codes(torch.round(x / step) + zero, scheme), scheme, held)
    return (y - zero * held["sums"]) * step


def input_codes(x: torch.Tensor, scheme: QuantizationScheme) -> torch.Tensor:
    """Round to the integers of eight bits, or to float8."""
    if scheme.number == "float8":
        return to_float8(x)
    return torch.clamp(torch.round(x), -128, 127).to(torch.int8)
