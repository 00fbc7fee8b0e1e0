"""FLOPs of the products of a compiled program.

On a TPU a `dot` has become a `convolution` with its batch dims among the spatial ones. So spatial
dims are counted by the pairs of positions that meet in them. Source: openxla.org/xla,
`HloCostAnalysis::HandleConvolution`.
"""

import math
import re
from dataclasses import dataclass

import numpy as np

from tpuport.cost.hlo.parser import Array, Computation, Instruction

_LABELS = re.compile(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)")


@dataclass(frozen=True)
class _SpatialDim:
    """One spatial dim of a convolution."""

    size: int = 1
    stride: int = 1
    pad: int = 0
    lhs_dilate: int = 1
    rhs_dilate: int = 1


def product_flops(computation: Computation, one: Instruction) -> int | None:
    """Return the FLOPs of one run of a dot or convolution, None for other instructions.

    Raises:
        ValueError: the text lacks a shape or dims that they depend on.
    """
    if one.opcode == "dot":
        return _dot_flops(computation, one)
    if one.opcode == "convolution":
        return _convolution_flops(computation, one)
    return None


def _operand(computation: Computation, one: Instruction, place: int) -> Array:
    name = one.operands[place] if place < len(one.operands) else ""
    found = computation.instructions.get(name)
    if found is None or not found.arrays:
        raise ValueError(f"operand {place} of {one.name} has no shape")
    return found.arrays[0]


def _numbers(one: Instruction, attribute: str) -> list[int]:
    found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", one.attributes)
    return [int(n) for n in found[1].split(",") if n] if found else []


def _dot_flops(computation: Computation, one: Instruction) -> int:
    lhs = _operand(computation, one, 0)
    contracted = math.prod(lhs.dims[dim] for dim in _numbers(one, "lhs_contracting_dims"))
    return 2 * one.arrays[0].size * contracted


def _convolution_flops(computation: Computation, one: Instruction) -> int:
    labels = _LABELS.search(one.attributes)
    if labels is None:
        raise ValueError(f"{one.name} has no dim_labels")
    lhs, rhs, out = _operand(computation, one, 0), _operand(computation, one, 1), one.arrays[0]
    sizes = dict(zip(labels[1], lhs.dims, strict=True))
    kernel = dict(zip(labels[2], rhs.dims, strict=True))
    result = dict(zip(labels[3], out.dims, strict=True))
    spatial = sorted(label for label in kernel if label.isdigit())
    meets = 1
    for label, window in zip(spatial, _windows(one, len(spatial)), strict=True):
        meets *= _meeting(sizes[label], kernel[label], result[label], window)
    groups = _one_number(one, "batch_group_count")
    # The kernel has only the input channels of one feature group.
    return 2 * meets * (sizes["b"] // groups) * kernel["i"] * kernel["o"]


def _one_number(one: Instruction, attribute: str) -> int:
    found = re.search(rf"\b{attribute}=(\d+)", one.attributes)
    return int(found[1]) if found else 1


def _windows(one: Instruction, num: int) -> list[_SpatialDim]:
    text = re.search(r"\bwindow=\{([^}]*)\}", one.attributes)
    parts = dict(part.split("=") for part in text[1].split()) if text else {}

    def read(name: str, default: str) -> list[int]:
        values = parts[name].split("x") if name in parts else [default] * num
        return [int(value.partition("_")[0]) for value in values]

    return [
        _SpatialDim(*numbers)
        for numbers in zip(
            read("size", "1"), read("stride", "1"), read("pad", "0_0"),
            read("lhs_dilate", "1"), read("rhs_dilate", "1"), strict=True,
        )
    ]  # fmt: skip


def _meeting(size: int, kernel: int, out: int, window: _SpatialDim) -> int:
    """Count pairs of an output position and a kernel position that read an element, not padding."""
    if kernel == 1 and window.pad == 0 and window.lhs_dilate == 1:
        return out
    ends = np.arange(out) * window.stride - window.pad, np.arange(kernel) * window.rhs_dilate
    few, many = sorted(ends, key=len)
    total = 0
    for start in few:
        at = many + start
        inside = (at >= 0) & (at <= (size - 1) * window.lhs_dilate)
        total += int((inside & (at % window.lhs_dilate == 0)).sum())
    return total
