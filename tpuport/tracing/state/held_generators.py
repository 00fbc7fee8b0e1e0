"""Generators of random numbers that a module holds, and that a call of it seeds."""

from typing import Any, Self

import jax
import jax.numpy as jnp
import torch

from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.context import KeyStream, Trace, current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.keys import STAND_IN

_SEED_BITS = 0xFFFFFFFF
_OF_STATE = {"get_state", "set_state", "graphsafe_get_state", "graphsafe_set_state"}
_OF_STATE |= {"initial_seed", "seed", "clone_state", "get_offset", "set_offset"}


class HeldGenerator(torch._C.Generator):
    """What stands for a generator in a copy of a module.

    A seed starts numbers of the program, as `torch.manual_seed` does, and not the generator's own.
    """

    is_held = True

    def manual_seed(self, seed: Any) -> Self:
        """Begin the numbers that belong to a seed, which the program may compute."""
        holder = current() or STAND_IN.get()
        if holder is None:
            super().manual_seed(seed)
            return self
        if isinstance(holder, Trace) and len(holder.regions) > 1:
            raise _refused("is seeded inside of a branch or loop of the program")
        value = seed
        if isinstance(seed, sym_numbers.SYMBOLIC):
            value = sym_numbers.exact_value(seed).astype(jnp.uint32)
        else:
            value = jnp.uint32(int(seed) & _SEED_BITS)
        ident = self._cdata  # pyright: ignore[reportAttributeAccessIssue]  (not in the stubs)
        holder.generators[ident] = KeyStream(jax.random.key(value))
        return self

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_STATE:
            raise _refused("is asked for its state, or given another one")
        return super().__getattribute__(name)


def _refused(does: str) -> Exception:
    return port_error(
        f"a torch.Generator that the module holds {does}",
        code="TPU404",
        remedy="pass the generator as an argument, or seed it at the start of the call by"
        " manual_seed",
    )


def holds_generator(module: torch.nn.Module | None) -> bool:
    """Return whether an attribute of a module is a generator."""
    found = () if module is None else module.modules()
    return any(
        isinstance(value, torch._C.Generator) for one in found for value in vars(one).values()
    )


def hold_generators(module: torch.nn.Module) -> None:
    """Put stand-ins for the generators among the attributes of a copy of a module."""
    made: dict[int, HeldGenerator] = {}
    for one in module.modules():
        for name, value in vars(one).items():
            if isinstance(value, torch._C.Generator) and not isinstance(value, HeldGenerator):
                vars(one)[name] = made.setdefault(id(value), HeldGenerator())
