"""Which inputs of a program its outputs depend on, by paths of differentiable values.

A branch on a traced value is decided when the program runs. A loop counts as one that runs each of
its lines: a parameter that only a branch inside a loop reads has a gradient.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import api_util
from jax.extend import core

from tpuport.foundation.interop.scan_params import scan_counts
from tpuport.tracing.core.view_steps import replace_value


@dataclass(frozen=True)
class Path:
    """The inputs that an output depends on, as bits.

    Attributes:
        must: whichever branches are taken.
        may: if some branches are taken.
        open: those of `must` that a branch inside a loop may not read after all.
    """

    must: int = 0
    may: int = 0
    open: int = 0

    def __or__(self, other: "Path") -> "Path":
        return Path(self.must | other.must, self.may | other.may, self.open | other.open)

    def __and__(self, other: "Path") -> "Path":
        """Return what holds whichever of two branches is taken."""
        return Path(self.must & other.must, self.may | other.may, self.open | other.open)

    def __lshift__(self, count: int) -> "Path":
        return Path(self.must << count, self.may << count, self.open << count)

    def through(self, inputs: Sequence["Path"]) -> "Path":
        """Return the path from where the inputs come from."""
        must = (p.must for i, p in enumerate(inputs) if self.must >> i & 1)
        may = (p.may for i, p in enumerate(inputs) if self.may >> i & 1)
        unsure = (p.may if self.open >> i & 1 else p.open for i, p in enumerate(inputs))
        return Path(_union(must), found := _union(may), _union(unsure) & found)

    def looped(self) -> "Path":
        """Return the path through a loop, in which branches count as taken."""
        return Path(self.may, self.may, self.open | (self.may & ~self.must))


def _union(bits: Any) -> int:
    return functools.reduce(int.__or__, bits, 0)


def _bit(index: int) -> Path:
    return Path(1 << index, 1 << index)


_NONE = Path()
# Calls by the name of their body.
CALLS = {
    **{"jit": "jaxpr", "pjit": "jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr"},
    **{"closed_call": "call_jaxpr", "core_call": "call_jaxpr", "shard_map": "jaxpr"},
}
INLINED = {"jit", "pjit", "closed_call", "core_call"}
# The name of the functions of `control_flow.loop_gradient`.
DIFFERENTIABLE_WHILE = "differentiable_while"
RECOMPUTED = {"remat2", "checkpoint"}


class Paths:
    """The paths through the programs inside of one program, each found once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, list[Path]]] = {}

    def of(self, jaxpr: Any) -> list[Path]:
        """Return for each output of a jaxpr the inputs that it depends on."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        known = self._known.get(id(jaxpr))
        if known is None:
            known = self._known[id(jaxpr)] = (jaxpr, self._found(jaxpr))
        return known[1]

    def _found(self, jaxpr: Any) -> list[Path]:
        paths = {var: _bit(i) for i, var in enumerate(jaxpr.invars) if is_float(var)}
        for eqn in jaxpr.eqns:
            given = [_of(paths, atom) for atom in eqn.invars]
            if any(p.may for p in given):
                for var, path in zip(eqn.outvars, self.of_equation(eqn), strict=True):
                    paths[var] = path.through(given)
        return [_of(paths, atom) for atom in jaxpr.outvars]

    def of_equation(self, eqn: Any) -> list[Path]:
        """Return for each output of an equation the operands that it depends on."""
        name = eqn.primitive.name
        rule = _RULES.get(name)
        if name in CALLS:
            found = self.of(eqn.params[CALLS[name]])
        elif rule is not None:
            found = rule(self, eqn)
        else:
            found = [_all_of(eqn)] * len(eqn.outvars)
        return [p if is_float(v) else _NONE for v, p in zip(eqn.outvars, found, strict=True)]


def _of(paths: dict[Any, Path], atom: Any) -> Path:
    return _NONE if isinstance(atom, core.Literal) else paths.get(atom, _NONE)


def is_float(atom: Any) -> bool:
    """Return whether a variable or literal of a jaxpr may have a gradient."""
    return jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def _all_of(eqn: Any) -> Path:
    bits = _union(1 << i for i, atom in enumerate(eqn.invars) if is_float(atom))
    return Path(bits, bits)


def _branches(paths: Paths, eqn: Any) -> list[Path]:
    sides = [paths.of(branch) for branch in eqn.params["branches"]]
    merged = [functools.reduce(Path.__and__, parts) for parts in zip(*sides, strict=True)]
    return [p << 1 for p in merged]  # the index is before the operands


def _settled(body: list[Path], carried: int, before: int, feed: int) -> list[Path]:
    """Return what values that a loop carries depend on after any number of rounds.

    Args:
        body: the paths of the body's outputs.
        carried: the number of values that it carries.
        before: the number of constants, which are the body's first inputs.
        feed: the number of inputs after the carried values.
    """
    state = [_bit(before + i) for i in range(carried)]
    inputs = [*map(_bit, range(before)), *state, *map(_bit, range(before + carried, feed))]
    while True:
        after = [
            old | p.looped().through(inputs) for old, p in zip(state, body[:carried], strict=True)
        ]
        if after == state:
            return [p.looped().through(inputs) for p in body]
        state = after
        inputs[before : before + carried] = state


def _scan(paths: Paths, eqn: Any) -> list[Path]:
    consts, carried = scan_counts(eqn.params)
    return _settled(paths.of(eqn.params["jaxpr"]), carried, consts, len(eqn.invars))


def _while(paths: Paths, eqn: Any) -> list[Path]:
    test, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carried = len(eqn.outvars)
    found = _settled(paths.of(eqn.params["body_jaxpr"]), carried, consts, consts + carried)
    # The loop may run no round at all.
    found = [p | _bit(consts + i) for i, p in enumerate(found)]
    return [p << test for p in found]


def has_rule_of(eqn: Any, function: str) -> bool:
    """Return whether an equation calls the `jax.custom_jvp` function of this name."""
    if eqn.primitive.name != "custom_jvp_call":
        return False
    # jax keeps no other trace of the function.
    return eqn.params["call_jaxpr"].jaxpr.debug_info.func_name == function


def _custom_jvp(paths: Paths, eqn: Any) -> list[Path]:
    if has_rule_of(eqn, replace_value.__name__):
        return [_bit(0)]
    if has_rule_of(eqn, DIFFERENTIABLE_WHILE):  # its derivative is that of its rounds
        return paths.of(eqn.params["call_jaxpr"])
    return [_all_of(eqn)] * len(eqn.outvars)


def _custom_vjp(paths: Paths, eqn: Any) -> list[Path]:
    del paths
    # A custom autograd function of the user's says which arguments its backward gives a gradient.
    owner = getattr(getattr(eqn.params["bwd"], "f", None), "__self__", None)
    reached = getattr(owner, "reached", None)
    if reached is None:
        return [_all_of(eqn)] * len(eqn.outvars)
    first = eqn.params["num_consts"]
    bits = _union(1 << first + i for i, flag in enumerate(reached()) if flag)
    return [Path(bits, bits)] * len(eqn.outvars)


_RULES: dict[str, Callable[[Paths, Any], list[Path]]] = {
    "stop_gradient": lambda paths, eqn: [_NONE],
    "cond": _branches,
    "scan": _scan,
    "while": _while,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "optimization_barrier": lambda paths, eqn: [_bit(i) for i in range(len(eqn.outvars))],
}


def bound(eqn: Any, operands: list[Any]) -> list[Any]:
    """Run one equation, in the place and the settings that it was traced in."""
    given = {a: v for a, v in zip(eqn.invars, operands, strict=True) if isinstance(a, core.Var)}
    info = api_util.debug_info("one equation", bound, (), {}).with_unknown_names()
    piece = core.Jaxpr([], list(given), eqn.outvars, [eqn], eqn.effects, info)
    return core.jaxpr_as_fun(core.ClosedJaxpr(piece, []))(*given.values())
