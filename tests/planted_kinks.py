"""Functions with kinks, and faults of their gradients, for tests of turned decisions."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tpuport.tracing.core.tensor import TracedTensor

Function = Callable[[torch.Tensor], torch.Tensor]

# By name: a function with kinks, and one of them.
KINKS: dict[str, tuple[Function, float]] = {
    "relu": (F.relu, 0.0),
    "relu in place": (lambda h: F.relu(h * 1, inplace=True), 0.0),
    "leaky_relu": (lambda h: F.leaky_relu(h, 0.1), 0.0),
    "relu6": (F.relu6, 6.0),
    "relu6 in place": (lambda h: F.relu6(h * 1, inplace=True), 0.0),
    "hardswish": (F.hardswish, -3.0),
    "abs": (torch.abs, 0.0),
    "clamp": (lambda h: h.clamp(-0.5, 0.5), -0.5),
    "where": (lambda h: torch.where(h > 0.25, 2 * h - 0.25, h), 0.25),
    "maximum": (lambda h: torch.maximum(h, 0.125 * h.detach().sign().abs()), 0.125),
}


def is_traced(x: Any) -> bool:
    """Return whether code runs in a program."""
    return isinstance(x, TracedTensor)


def two_layers() -> tuple[nn.Linear, nn.Linear]:
    """Return layers `[12, 32]` and `[32, 4]`, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    first, second = nn.Linear(12, 32), nn.Linear(32, 4)
    with torch.no_grad():
        for parameter in (*first.parameters(), *second.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        first.bias[0] += 7  # some numbers are beyond every kink
    return first, second


def with_fault(function: Function, h: torch.Tensor, fault: str) -> torch.Tensor:
    """Return what a function gives, with a gradient that has a fault if one is named."""
    if fault == "scaled gradient":
        h = h + 0.001 * (h - h.detach())
    y = function(h)
    if fault == "gradient at zero":
        return torch.where(h >= 0, h, 0)
    wrong = {
        "mask of the next row": lambda: h * (h > 0).roll(1, 0),
        "no upper bound": lambda: F.relu(h),
        "wrong slope": lambda: F.leaky_relu(h, 0.101),
    }.get(fault)
    if wrong is None:
        return y
    other = wrong()
    return other + (y - other).detach()
