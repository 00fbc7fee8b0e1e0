"""Seeding inside a ported function, which sets the program's keys and not torch's generator."""

from typing import Any

import jax
import torch

from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.context import KeyStream, current
from tpuport.tracing.patches._count import count


class ManualSeed(Shim):
    """`torch.manual_seed(n)` in a trace restarts the program's random numbers from `n`."""

    TARGET = "torch.manual_seed"
    REASON = "it would seed the generator of the host, from which a ported program draws nothing"

    def replacements(self) -> list[Replacement]:
        eager = torch.manual_seed

        def manual_seed(seed: Any) -> torch.Generator:
            trace = current()
            if trace is None or isinstance(seed, (torch.Tensor, *sym_numbers.SYMBOLIC)):
                return eager(seed)
            count(self.TARGET)
            trace.keys = KeyStream(jax.random.key(int(seed) & 0xFFFFFFFF))
            return torch.default_generator

        return [
            Replacement(torch, "manual_seed", manual_seed),
            Replacement(torch.random, "manual_seed", manual_seed),
        ]
