"""Generators of random numbers that a module holds, and that a call of it seeds."""

import random
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.context import KeyStream, Trace, current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.host_tape import Tape
from tpuport.tracing.core.keys import STAND_IN
from tpuport.tracing.state.draw_forms import form_of

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


@dataclass(frozen=True)
class _HeldMethod:
    """A method of a generator that an attribute of the module is, whenever it is called."""

    tape: Tape
    owner: str
    attribute: str
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        holder = self.tape.module.get_submodule(self.owner)
        return getattr(getattr(holder, self.attribute), self.name)(*args, **kwargs)


class HeldHostGenerator:
    """What stands for a generator of numpy or of `random` in a copy of a module.

    It draws from that of the module itself, by the tape.
    """

    # No attributes: what the tape holds is no state of the module.
    __slots__ = ("__weakref__",)
    __module__ = "random"

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """Answer `isinstance` as the generator does."""
        return _STANDS_FOR[self].kind

    def __getattr__(self, name: str) -> Any:
        tape, place, kind = _STANDS_FOR[self]
        if name.startswith("__") or not callable(getattr(kind, name, None)):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r} here")
        family = random if issubclass(kind, random.Random) else np.random
        form, method = form_of(family, name), _HeldMethod(tape, *place, name)
        return lambda *args, **kwargs: form(tape, method, args, kwargs)


class _StandsFor(NamedTuple):
    tape: Tape
    place: tuple[str, str]
    kind: type


_STANDS_FOR: weakref.WeakKeyDictionary[Any, _StandsFor] = weakref.WeakKeyDictionary()


def hold_host_generators(
    module: torch.nn.Module, master: torch.nn.Module, tapes: list[Tape]
) -> None:
    """Put stand-ins for generators of the host among the attributes of a copy of a module."""
    kinds = (np.random.Generator, np.random.RandomState, random.Random)
    held = [
        (owner, name, value)
        for owner, one in (master.named_modules() if tapes else ())
        for name, value in vars(one).items()
        if isinstance(value, kinds) and name in vars(module.get_submodule(owner))
    ]
    for tape in tapes:
        tape.module, tape.held = master, [value for *_, value in held]
        for owner, name, value in held:
            made = HeldHostGenerator()
            _STANDS_FOR[made] = _StandsFor(tape, (owner, name), type(value))
            vars(module.get_submodule(owner))[name] = made
