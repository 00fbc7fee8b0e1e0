"""Truncated normal numbers, which eager draws again and again until all lie inside the bounds."""

import math
from typing import Any

import torch

from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core.context import current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.keys import STAND_IN
from tpuport.tracing.patches._count import count

_TAIL = 1e-3


class TruncatedNormal(Shim):
    """`torch.nn.init.trunc_normal_` in a trace draws each number once, by the inverse distribution.

    The eager run that a program is compared with draws the same way.
    """

    TARGET = "torch.nn.init.trunc_normal_"
    REASON = "eager draws again until all numbers lie inside the bounds: a loop on traced values"

    def replacements(self) -> list[Replacement]:
        eager: Any = torch.nn.init._no_grad_trunc_normal_

        def draw(
            tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
        ) -> torch.Tensor:
            if current() is None and STAND_IN.get() is None:
                return eager(tensor, mean, std, a, b, generator)
            count(self.TARGET)
            low, high = (math.erf((bound - mean) / std / math.sqrt(2)) for bound in (a, b))
            # Of a tail alone float32 has too few numbers next to 1.
            if max(low, -high) > 1 - _TAIL:
                raise port_error(
                    "trunc_normal_ with both bounds far out on one side of the mean",
                    code="TPU105",
                    remedy="draw such numbers by torch.distributions, or outside of the model",
                )
            with torch.no_grad():
                tensor.uniform_(low, high, generator=generator).erfinv_()
                return tensor.mul_(std * math.sqrt(2)).add_(mean).clamp_(a, b)

        return [Replacement(torch.nn.init, "_no_grad_trunc_normal_", draw)]
