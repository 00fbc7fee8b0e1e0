"""A convolution as it is served: int8 by int8 to int32, one scale an output channel."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.quantization.layer import FrozenLayer, input_codes
from tpuport.quantization.product import pack
from tpuport.quantization.rounding import LEAST_STEP, round_weight
from tpuport.quantization.scheme import QuantizationScheme
from tpuport.tracing.core.lowering_registry import lowering

_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
_REASON = "an op of tpuport: convolutions of integer codes"


@torch.library.custom_op("tpuport::code_convolution", mutates_args=())
def code_convolution(
    x: torch.Tensor,
    codes: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    """Convolve codes with codes: sums of int8 products are exact, of float8 in float32.

    Args:
        x: `[batch, channels, ...]`, int8 or float8.
        codes: `[out, channels / groups, ...]`, of the same dtype.
        stride: of each dim.
        padding: before and after each dim, in the order of dims.
        dilation: of each dim.
        groups: of channels.

    Returns:
        float32.
    """
    exact = torch.float32 if x.is_floating_point() else torch.float64
    before = [n for pair in zip(padding[::2], padding[1::2], strict=True) for n in pair[::-1]][::-1]
    padded = torch.nn.functional.pad(x.to(exact), before)
    function: Any = (torch.conv1d, torch.conv2d, torch.conv3d)[len(stride) - 1]
    y = function(padded, codes.to(exact), None, stride, [0] * len(stride), dilation, groups)
    return y.float()


@code_convolution.register_fake
def _(
    x: torch.Tensor,
    codes: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    sizes = [
        (n + padding[2 * i] + padding[2 * i + 1] - dilation[i] * (codes.shape[2 + i] - 1) - 1)
        // stride[i]
        + 1
        for i, n in enumerate(x.shape[2:])
    ]
    return x.new_empty((x.shape[0], codes.shape[0], *sizes), dtype=torch.float32)


@lowering(torch.ops.tpuport.code_convolution.default, reason=_REASON)
def lower_code_convolution(
    x: jax.Array,
    codes: jax.Array,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> jax.Array:
    """Lower `code_convolution`: int8 by int8 to int32."""
    wanted = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    y = jax.lax.conv_general_dilated(
        *(x, codes, tuple(stride), list(zip(padding[::2], padding[1::2], strict=True))),
        rhs_dilation=tuple(dilation),
        feature_group_count=groups,
        preferred_element_type=wanted,
    )
    return y.astype(jnp.float32)


class QuantizedConv(FrozenLayer):
    """A frozen convolution: a pure function of its buffers and its input.

    Buffers: `codes`, `scale` by output channel, and where there are any `input_scale` and `bias`.
    Inputs have one scale a sample, or the calibrated one.
    """

    codes: torch.Tensor
    scale: torch.Tensor

    def __init__(
        self, scheme: QuantizationScheme, how: dict[str, Any], buffers: dict[str, torch.Tensor]
    ) -> None:
        super().__init__()
        self.scheme, self.how = scheme, how
        for name, value in buffers.items():
            self.register_buffer(name, value)

    @classmethod
    def of(
        cls, layer: torch.nn.Module, scheme: QuantizationScheme, input_scale: torch.Tensor | None
    ) -> "QuantizedConv":
        """Return the frozen form of a convolution."""
        given: Any = layer
        weight = given.weight.detach().float()
        # A group would be of features of one place in the window.
        made = round_weight(weight.flatten(1), replace(scheme, group=None))
        codes = pack(made.values, 8).reshape(weight.shape)
        buffers = {"codes": codes, "scale": made.scale[0]}
        if input_scale is not None:
            buffers["input_scale"] = input_scale
        if given.bias is not None:
            buffers["bias"] = given.bias.detach().clone()
        how = {
            "stride": list(given.stride),
            "padding": _padding(given),
            "dilation": list(given.dilation),
            "groups": given.groups,
        }
        return cls(scheme, how, buffers)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, in the input's dtype."""
        x = input
        held, spatial = dict(self.named_buffers()), len(self.how["stride"])
        rows = x.float() if x.dim() == spatial + 2 else x.float()[None]
        step = held.get("input_scale")
        if step is None:
            dims = tuple(range(1, rows.dim()))
            peaks = rows.abs().amax(dims, keepdim=True) * self.scheme.activation_clip
            step = (peaks / self.scheme.input_limit).clamp_min(LEAST_STEP)
        y = code_convolution(input_codes(rows / step, self.scheme), held["codes"], **self.how)
        shape = (-1, *[1] * spatial)
        y = y * held["scale"].view(shape) * step
        if "bias" in held:
            y = y + held["bias"].float().view(shape)
        return (y if x.dim() == spatial + 2 else y[0]).to(x.dtype)


def _padding(layer: Any) -> list[int]:
    """Return the zeros before and after each dim."""
    if layer.padding == "valid":
        return [0, 0] * len(layer.stride)
    if layer.padding == "same":
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [n for total in totals for n in (total // 2, total - total // 2)]
    return [n for one in layer.padding for n in (one, one)]


def why_no_convolution(layer: torch.nn.Module, scheme: QuantizationScheme) -> str | None:
    """Return why a convolution stays in float, or None."""
    if type(layer) not in _CONVOLUTIONS:
        return f"a {type(layer).__name__} is none of Conv1d, Conv2d and Conv3d"
    if (scheme.weight_bits, scheme.activation_bits) != (8, 8):
        return f"convolutions are quantized to w8a8 or fp8, not to {scheme.name}"
    if not scheme.symmetric or not scheme.activation_symmetric:
        return "convolutions are quantized without zero points"
    if scheme.method != "round":
        return f"convolutions are rounded only, and method is {scheme.method!r}"
    if scheme.activations == "channel" or scheme.clip == "mse":
        return "convolutions have no scales by input channel, and no clip='mse'"
    if layer.padding_mode != "zeros":
        return f"it pads by {layer.padding_mode!r}"
    return None
