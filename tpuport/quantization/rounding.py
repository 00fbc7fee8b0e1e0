"""Weights to integer codes, on the host."""

from dataclasses import dataclass

import torch

from tpuport.quantization.scheme import FLOAT8_LIMIT, QuantizationScheme

# No range is so small that a division by its scale overflows.
LEAST_STEP = 1e-30
# Of the largest value: then float32 holds it and the zero point exactly, in steps.
_LEAST_SHARE = 2.0**-22
_SHARES = (0.5, 0.75, 1.0, 1.25, 1.5)


@dataclass(frozen=True)
class Codes:
    """A weight `[out, in]` as integers.

    Attributes:
        values: signed codes `[groups, out, size]`, or numbers of float8.
        scale: `[groups, out]`.
        zero: the code of 0.0, `[groups, out]`; None if it is 0.
    """

    values: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None

    def weight(self) -> torch.Tensor:
        """Return the weight that the codes stand for, `[out, in]`."""
        values = self.values.float()
        shifted = values if self.zero is None else values - self.zero[..., None]
        return (shifted * self.scale[..., None]).transpose(0, 1).flatten(1)


def round_with(weight: torch.Tensor, found: Codes, scheme: QuantizationScheme) -> Codes:
    """Round a weight `[out, columns]` with the scales and zero points of one group of codes."""
    least, most = -(2 ** (scheme.weight_bits - 1)), 2 ** (scheme.weight_bits - 1) - 1
    values = torch.round(weight[None] / found.scale[..., None])
    if found.zero is not None:
        values = values + found.zero[..., None]
    return Codes(torch.clamp(values, least, most), found.scale, found.zero)


def step_of_range(low: torch.Tensor, high: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the step of codes with a zero point that reach from `low` to `high`."""
    largest = torch.maximum(high.abs(), low.abs())
    step = torch.maximum((high - low) / (2**bits - 1), largest * _LEAST_SHARE)
    return step.clamp_min(LEAST_STEP)


def to_float8(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest number of float8 e4m3, the largest at most: beyond it is no infinity."""
    return torch.clamp(x, -FLOAT8_LIMIT, FLOAT8_LIMIT).to(torch.float8_e4m3fn)


def round_weight(weight: torch.Tensor, scheme: QuantizationScheme) -> Codes:
    """Round a weight to the nearest codes of a scheme."""
    bits = scheme.weight_bits
    size = scheme.group or weight.shape[1]
    grouped = weight.float().unflatten(1, (-1, size)).transpose(0, 1)
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    if scheme.number == "float8":
        scale = grouped.abs().amax(-1) * scheme.weight_clip / FLOAT8_LIMIT
        scale = scale.clamp_min(LEAST_STEP)
        return Codes(to_float8(grouped / scale[..., None]), scale, None)
    if scheme.symmetric:
        largest = grouped.abs().amax(-1) * scheme.weight_clip
        scale = (largest / most).clamp_min(LEAST_STEP)
        if scheme.clip == "mse":
            scale = _least_error(grouped, scale, least, most)
        values = torch.clamp(torch.round(grouped / scale[..., None]), least, most)
        return Codes(values, scale, None)
    low, high = grouped.amin(-1) * scheme.weight_clip, grouped.amax(-1) * scheme.weight_clip
    scale = step_of_range(low, high, bits)
    # A zero point beyond the codes would not fit in a byte, and is right for a range without 0.
    zero = torch.round(-low / scale) + least
    values = torch.round(grouped / scale[..., None]) + zero[..., None]
    return Codes(torch.clamp(values, least, most), scale, zero)


def _least_error(grouped: torch.Tensor, scale: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """Return for each channel the candidate scale with the least square error."""
    best, lowest = scale, torch.full_like(scale, torch.inf)
    for share in _SHARES:
        tried = (scale / share)[..., None]
        codes = torch.clamp(torch.round(grouped / tried), least, most)
        error = ((codes * tried - grouped) ** 2).mean(-1)
        best = torch.where(error < lowest, tried[..., 0], best)
        lowest = torch.minimum(error, lowest)
    return best
