"""Seeding inside a ported function, which sets the program's keys and not torch's generator."""

from dataclasses import replace
from typing import Any

import jax
import torch

from tpuport.foundation.patching.shim import Replacement, Shim, everywhere, original_of
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.context import KeyStream, Trace, current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.keys import STAND_IN
from tpuport.tracing.core.measured_time import refuse_measured
from tpuport.tracing.patches._count import count


class ManualSeed(Shim):
    """`torch.manual_seed(n)` in a trace restarts the program's random numbers from `n`.

    A state from `torch.get_rng_state`, which `torch.random.fork_rng` keeps, sets them back.
    """

    TARGET = "torch.manual_seed"
    REASON = "it would seed the generator of the host, from which a ported program draws nothing"

    def replacements(self) -> list[Replacement]:
        eager, get, put = self.copied()

        def manual_seed(seed: Any) -> torch.Generator:
            holder = current() or STAND_IN.get()
            if holder is None or isinstance(seed, (torch.Tensor, *sym_numbers.SYMBOLIC)):
                return eager(seed)
            refuse_measured((seed,))
            count(self.TARGET)
            holder.keys = KeyStream(jax.random.key(int(seed) & 0xFFFFFFFF))
            return torch.default_generator

        def get_rng_state() -> torch.Tensor:
            state, holder = get(), current() or STAND_IN.get()
            if holder is not None:
                count = 0 if holder.keys is None else holder.keys.count
                state._stream = (holder, holder.keys, count)  # type: ignore[attr-defined]
            return state

        def set_rng_state(new_state: torch.Tensor) -> None:
            holder = current() or STAND_IN.get()
            kept = getattr(new_state, "_stream", None)
            if holder is None or kept is None:
                put(new_state)
            else:
                _set(holder, *kept)

        made = (manual_seed, get_rng_state, set_rng_state)
        return everywhere(
            (torch, name, lambda _, function=function: function)
            for name, function in zip(_NAMES, made, strict=True)
        )

    def copied(self) -> list[Any]:
        return [original_of(torch, name) for name in _NAMES]


_NAMES = ("manual_seed", "get_rng_state", "set_rng_state")


def _set(holder: Any, owner: Any, keys: KeyStream | None, count: Any) -> None:
    """Set the random numbers of a trace, or of eager in its place, back to a state.

    Args:
        holder: whose numbers are set.
        owner: whose numbers the state is of.
        keys: the stream then.
        count: the number of draws from it then.
    """
    resumed = getattr(holder, "resumed", None)
    if resumed and resumed[2] and owner is resumed[0] and keys is resumed[1]:
        # A state that a custom function's forward kept is set in its backward.
        if not isinstance(count, int):
            raise port_error(
                "a state of the random generator that depends on a branch is set again in the"
                " backward of a custom autograd function",
                code="TPU404",
                remedy="keep the state outside of the branch, or draw the numbers before",
            )
        owner, keys = holder, replace(resumed[2])
    if owner is holder:
        holder.keys = keys
        if keys is not None:
            keys.count = count
    elif isinstance(holder, Trace) and resumed is None:
        raise port_error(
            "a state of the random generator that an earlier call kept is set",
            code="TPU404",
            remedy="keep it within one call, or seed by torch.manual_seed",
        )
    # Else this is a backward whose forward drew no numbers: nothing is drawn.
