"""Gradients of a program's branches: none from the side that is not taken.

In torch a side that is not taken has no graph. `lax.cond` gives the values that only this side
reads a gradient of zeros, and zeros times an infinite derivative are NaN: of `a / a` at 0, which
was computed before the branch. So what makes such values reads its operands through gates: if no
side that reads the values is taken, a gate gives the gradient zero, whatever arrives.

Which sides are taken is known only later in the program. It is found by a first run of the
equations that make such values, and of those that depend on them; XLA makes one of two runs that
compute the same. A value that something else reads in any case has the gradient that torch gives
it, NaN included. What a loop reads from outside counts as read in any case.
"""

import functools
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from tpuport.tracing.core.inner_programs import inner_programs, run_with
from tpuport.tracing.core.paths import Path, Paths, bound, is_float

_Body = Callable[..., list[Any]]


@jax.custom_jvp
def gate_gradient(value: jax.Array, is_open: jax.Array) -> jax.Array:
    """Return the value; its gradient is zero unless the gate is open."""
    del is_open
    return value


@gate_gradient.defjvp
def _gate_jvp(primals: Any, tangents: Any) -> Any:
    value, is_open = primals
    return value, jnp.where(is_open, tangents[0], jnp.zeros_like(tangents[0]))


def runs_branches(closed: Any) -> bool:
    """Return whether a program has a branch on a traced value, in parts that are run as such."""
    jaxpr = getattr(closed, "jaxpr", closed)
    return any(
        eqn.primitive.name == "cond" or any(map(runs_branches, inner_programs(eqn)))
        for eqn in jaxpr.eqns
    )


def gated(closed: Any, read: Collection[int]) -> _Body:
    """Return a function of a program's arguments that gives its results, with such gates.

    Args:
        closed: the program, a closed jaxpr.
        read: the outputs that are differentiated.
    """
    live = [index in read for index in range(len(closed.jaxpr.outvars))]
    return _Level(Paths(), closed, live).run


def reads(closed: Any, *args: Any) -> list[bool | jax.Array]:
    """Return which arguments of a program its outputs depend on, on the path that is taken."""
    level = _Level(Paths(), closed, [True] * len(closed.jaxpr.outvars))
    path = _joint(level.paths.of(closed.jaxpr), level.live)
    if path.must == path.may:
        return [bool(path.may >> i & 1) for i in range(len(args))]
    return [
        bool(path.must >> i & 1) or (bool(path.may >> i & 1) and flag)
        for i, flag in enumerate(level.flags(*args))
    ]


class _Values(ChainMap[Any, Any]):
    """The values of variables; those of a first run have no gradient."""

    def read(self, atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else self[atom]

    def stopped(self, atom: Any) -> Any:
        inside = isinstance(atom, core.Literal) or atom in self.maps[0] or not is_float(atom)
        return self.read(atom) if inside else jax.lax.stop_gradient(self[atom])


class _Level:
    """The equations of one jaxpr.

    Attributes:
        extra: the values made here that have a gradient only where some side of a branch is taken.
        depend: whether each equation makes such values, or depends on them.
    """

    def __init__(self, paths: Paths, closed: Any, live: list[bool]) -> None:
        self.paths, self.live = paths, live
        self.closed = closed if hasattr(closed, "consts") else core.ClosedJaxpr(closed, [])
        self.jaxpr = self.closed.jaxpr
        read, self.possible = self._live("must"), self._live("may")
        made = (var for eqn in self.jaxpr.eqns for var in eqn.outvars)
        self.extra = {var for var in made if var in self.possible - read}
        reached = set(self.extra)
        self.depend: list[bool] = []
        for eqn in self.jaxpr.eqns:
            operands = (atom for atom in eqn.invars if isinstance(atom, core.Var))
            depends = any(var in reached for var in (*operands, *eqn.outvars))
            reached |= set(eqn.outvars) if depends else set()
            self.depend.append(depends)

    def _live(self, kind: str) -> set[Any]:
        outputs = zip(self.jaxpr.outvars, self.live, strict=True)
        live = {v for v, one in outputs if one and _is_var(v)}
        for eqn in reversed(self.jaxpr.eqns):
            pairs = zip(eqn.outvars, self.paths.of_equation(eqn), strict=True)
            bits = _union(getattr(path, kind) for var, path in pairs if var in live)
            live |= {v for i, v in enumerate(eqn.invars) if bits >> i & 1 and _is_var(v)}
        return live

    def _inputs(self, args: Sequence[Any]) -> _Values:
        values = _Values(dict(zip(self.jaxpr.constvars, self.closed.consts, strict=True)))
        values.update(zip(self.jaxpr.invars, args, strict=True))
        return values

    def run(self, *args: Any) -> list[Any]:
        """Return the outputs."""
        values, pairs = self._inputs(args), list(zip(self.jaxpr.eqns, self.depend, strict=True))
        for eqn in (eqn for eqn, depends in pairs if not depends):
            values.update(zip(eqn.outvars, self._equation(eqn, values, None), strict=True))
        again = [eqn for eqn, depends in pairs if depends]
        flags = self._flags(_Values({}, *values.maps), again) if self.extra else None
        for eqn in again:
            values.update(zip(eqn.outvars, self._equation(eqn, values, flags), strict=True))
        return [values.read(atom) for atom in self.jaxpr.outvars]

    def flags(self, *args: Any) -> list[jax.Array]:
        """Return which inputs the live outputs depend on, as (), bool arrays."""
        flags = self._flags(_Values({}, *self._inputs(args).maps), self.jaxpr.eqns)
        return [jnp.bool_(flags.get(var, False)) for var in self.jaxpr.invars]

    def _equation(self, eqn: Any, values: _Values, flags: dict[Any, Any] | None) -> list[Any]:
        operands = [values.read(atom) for atom in eqn.invars]
        if flags is not None and any(var in self.extra for var in eqn.outvars):
            is_open = _any(flags.get(var, False) for var in eqn.outvars)
            for i, atom in enumerate(eqn.invars):
                if is_open is True or not _is_var(atom):
                    continue
                if atom not in self.extra or flags.get(atom) is not is_open:
                    operands[i] = gate_gradient(operands[i], jnp.bool_(is_open))
        if eqn.primitive.name != "cond" and not any(map(runs_branches, inner_programs(eqn))):
            return bound(eqn, operands)
        live = [_is_var(var) for var in eqn.outvars]
        if eqn.primitive.name == "cond":
            live = [var in self.possible for var in eqn.outvars]
        return _rebound(self.paths, eqn, operands, live)

    def _flags(self, first: _Values, equations: list[Any]) -> dict[Any, Any]:
        """Return of each value whether it is read: True, a (), bool array, or nothing for never."""
        for eqn in equations:
            outs = bound(eqn, [first.stopped(atom) for atom in eqn.invars])
            first.update(zip(eqn.outvars, outs, strict=True))
        outputs = zip(self.jaxpr.outvars, self.live, strict=True)
        flags: dict[Any, Any] = {var: True for var, one in outputs if one and _is_var(var)}
        for eqn in reversed(self.jaxpr.eqns):
            live = [var in flags for var in eqn.outvars]
            path = _joint(self.paths.of_equation(eqn), live)
            if not path.may:
                continue
            here = _any(flags[var] for var in eqn.outvars if var in flags)
            sides: list[Any] = []
            if path.may != path.must and eqn.primitive.name != "scan":
                sides = self._sides(eqn, [first.stopped(atom) for atom in eqn.invars], live)
            for i, atom in enumerate(eqn.invars):
                if path.may >> i & 1 and _is_var(atom):
                    is_read = _both(here, sides[i]) if sides else here
                    flags[atom] = _any([flags.get(atom, False), is_read])
        return flags

    def _sides(self, eqn: Any, operands: list[Any], live: list[bool]) -> list[Any]:
        """Return whether each operand of a branch, or a call with branches, is read."""
        bodies = [_Level(self.paths, body, live) for body in inner_programs(eqn)]
        if eqn.primitive.name != "cond":
            return bodies[0].flags(*operands)
        sides = [_joint(self.paths.of(body), live) << 1 for body in inner_programs(eqn)]
        if any(side.must != side.may for side in sides):
            runs = [body.flags for body in bodies]
            return [False, *jax.lax.switch(operands[0], runs, *operands[1:])]
        index = jnp.clip(operands[0], 0, len(sides) - 1)
        readers = [
            [k for k, side in enumerate(sides) if side.must >> i & 1] for i in range(len(operands))
        ]
        return [len(ks) == len(sides) or _any(index == k for k in ks) for ks in readers]


def _any(flags: Iterable[Any]) -> Any:
    """Return whether any of some flags holds; the same object if one decides."""
    found: Any = False
    for flag in flags:
        if flag is True or found is True:
            return True
        if found is False:
            found = flag
        elif flag is not False and flag is not found:
            found = found | flag
    return found


def _both(one: Any, other: Any) -> Any:
    if one is True or other is True:
        return other if one is True else one
    return False if one is False or other is False else one & other


def _is_var(atom: Any) -> bool:
    return isinstance(atom, core.Var) and is_float(atom)


def _union(bits: Any) -> int:
    return functools.reduce(int.__or__, bits, 0)


def _joint(found: list[Path], live: list[bool]) -> Path:
    """Return the path to any of the live results of an equation."""
    parts = [path for path, one in zip(found, live, strict=True) if one]
    return functools.reduce(Path.__or__, parts, Path())


def _rebound(paths: Paths, eqn: Any, operands: list[Any], live: list[bool]) -> list[Any]:
    """Run an equation with gates in its bodies."""
    bodies: list[_Body] = [_Level(paths, body, live).run for body in inner_programs(eqn)]
    if eqn.primitive.name == "cond":
        # What has no gradient gets none of zeros either.
        bodies = [functools.partial(_stopped, run, live) for run in bodies]
    return run_with(eqn, bodies, operands)


def _stopped(run: _Body, live: list[bool], *operands: Any) -> list[Any]:
    return [
        out if one or not _is_inexact(out) else jax.lax.stop_gradient(out)
        for out, one in zip(run(*operands), live, strict=True)
    ]


def _is_inexact(out: Any) -> bool:
    # A literal result is a Python or numpy number.
    return jnp.issubdtype(jnp.result_type(out), jnp.inexact)
