"""Seeding inside a ported function, which sets the program's keys and not torch's generator."""

from typing import Any

import jax
import torch

from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.context import KeyStream, current
from tpuport.tracing.core.keys import STAND_IN
from tpuport.tracing.patches._count import count


class ManualSeed(Shim):
    """`torch.manual_seed(n)` in a trace restarts the program's random numbers from `n`.

    A state from `torch.get_rng_state`, which `torch.random.fork_rng` keeps, sets them back.
    """

    TARGET = "torch.manual_seed"
    REASON = "it would seed the generator of the host, from which a ported program draws nothing"

    def replacements(self) -> list[Replacement]:
        eager, get, put = torch.manual_seed, torch.get_rng_state, torch.set_rng_state

        def manual_seed(seed: Any) -> torch.Generator:
            holder = current() or STAND_IN.get()
            if holder is None or isinstance(seed, (torch.Tensor, *sym_numbers.SYMBOLIC)):
                return eager(seed)
            count(self.TARGET)
            holder.keys = KeyStream(jax.random.key(int(seed) & 0xFFFFFFFF))
            return torch.default_generator

        def get_rng_state() -> torch.Tensor:
            state, holder = get(), current() or STAND_IN.get()
            if holder is not None and holder.keys is not None:
                state._stream = (holder, holder.keys, holder.keys.count)  # type: ignore[attr-defined]
            return state

        def set_rng_state(new_state: torch.Tensor) -> None:
            holder = current() or STAND_IN.get()
            kept = getattr(new_state, "_stream", None)
            if holder is None or kept is None or kept[0] is not holder:
                put(new_state)
                return
            holder.keys = kept[1]
            holder.keys.count = kept[2]

        made = {
            "manual_seed": manual_seed,
            "get_rng_state": get_rng_state,
            "set_rng_state": set_rng_state,
        }
        return [
            Replacement(owner, name, function)
            for name, function in made.items()
            for owner in (torch, torch.random)
        ]
