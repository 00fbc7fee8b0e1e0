"""A traced program as a flat list of equations, with who makes and who reads each value."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax.core
import numpy as np
from jax.extend import core

from tpuport.tracing.attention.masks.graph import Node, leaf
from tpuport.tracing.core.paths import CALLS, INLINED
from tpuport.tracing.scan_layers.shared_programs import NAME

# Functions of jax that a pattern knows by name, and blocks, stay calls.
BERNOULLI = "_bernoulli"
_WHOLE = {NAME, BERNOULLI}


class FlatProgram:
    """The equations of one jaxpr; calls in it are inlined, and keep the place of the call.

    Args:
        closed: The program, a closed jaxpr.
    """

    def __init__(self, closed: Any) -> None:
        jaxpr = closed.jaxpr
        self.invars = list(jaxpr.invars)
        self.consts: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self.equations: list[Any] = []
        names: dict[Any, Any] = {}
        self._inline(jaxpr, names, None)
        self.outvars = [_renamed(names, atom) for atom in jaxpr.outvars]
        self.order = {id(eqn): i for i, eqn in enumerate(self.equations)}
        self._made = {var: eqn for eqn in self.equations for var in eqn.outvars}
        self._readers: dict[Any, list[Any]] = {}
        for eqn in self.equations:
            for var in {atom for atom in eqn.invars if is_var(atom)}:
                self._readers.setdefault(var, []).append(eqn)
        self._results = {atom for atom in self.outvars if is_var(atom)}

    def _inline(self, jaxpr: Any, names: dict[Any, Any], place: Any) -> None:
        """Append a jaxpr's equations, and add the new names of its variables to `names`."""
        for eqn in jaxpr.eqns:
            invars = [_renamed(names, atom) for atom in eqn.invars]
            body = _body(eqn)
            if body is not None:
                inner = dict(zip(body.jaxpr.invars, invars, strict=True))
                for var, value in zip(body.jaxpr.constvars, body.consts, strict=True):
                    inner[var] = core.Var(var.aval)
                    self.consts[inner[var]] = value
                # The body may have been traced for an earlier call, on another line.
                self._inline(body.jaxpr, inner, place or eqn)
                outs = [_renamed(inner, atom) for atom in body.jaxpr.outvars]
                names.update(zip(eqn.outvars, outs, strict=True))
                continue
            if place is not None:
                outvars = [core.Var(var.aval) for var in eqn.outvars]
                names.update(zip(eqn.outvars, outvars, strict=True))
                eqn = eqn.replace(outvars=outvars, source_info=place.source_info)
            self.equations.append(eqn.replace(invars=invars))

    def maker(self, atom: Any) -> Any:
        """Return the equation that makes a value; None for inputs, constants and literals."""
        return self._made.get(atom) if is_var(atom) else None

    def other_reader(self, equations: list[Any]) -> Any:
        """Return who else reads what these equations make, the last one's results apart.

        An equation, `True` for the program's results, None for nobody.
        """
        own = {id(eqn) for eqn in equations}
        for eqn in equations[:-1]:
            for var in eqn.outvars:
                if var in self._results:
                    return True
                for reader in self._readers.get(var, ()):
                    if id(reader) not in own:
                        return reader
        return None

    def behind(self, top: Any, follow: frozenset[str]) -> Iterator[Any]:
        """Yield the equations behind a value, through operations of these names only.

        The first equations of another kind are yielded, and nothing behind them.
        """
        seen: set[int] = set()
        left = [self.maker(top)]
        while left:
            eqn = left.pop()
            if eqn is None or id(eqn) in seen:
                continue
            seen.add(id(eqn))
            yield eqn
            if eqn.primitive.name in follow:
                left.extend(map(self.maker, eqn.invars))

    def number(self, atom: Any) -> Any:
        """Return the one number that a literal or a constant is everywhere; None for others."""
        while (eqn := self.maker(atom)) is not None:
            if eqn.primitive.name not in ("broadcast_in_dim", "reshape", "convert_element_type"):
                return None
            atom = eqn.invars[0]
        value = self.consts.get(atom) if is_var(atom) else atom.val
        if value is None or isinstance(value, jax.core.Tracer) or np.size(value) != 1:
            return None
        return np.asarray(value).reshape(())[()]


def _body(eqn: Any) -> Any:
    """Return the program of a call that is inlined, or None."""
    name = eqn.primitive.name
    if name not in INLINED or eqn.params.get("name") in _WHOLE:
        return None
    body = eqn.params[CALLS[name]]
    return body if isinstance(body, core.ClosedJaxpr) else None


def is_var(atom: Any) -> bool:
    """Return whether an atom is a variable, not a literal."""
    return not isinstance(atom, core.Literal)


def _renamed(names: dict[Any, Any], atom: Any) -> Any:
    return names.get(atom, atom) if is_var(atom) else atom


class RunningValues:
    """The values of a program that runs, and their nodes for what reads the structure of masks.

    Args:
        program: The program.
        known: The value of each variable that is computed by now.
    """

    def __init__(self, program: FlatProgram, known: dict[Any, Any]) -> None:
        self._program, self._known = program, known
        self._nodes: dict[Any, Node] = {}

    def read(self, atom: Any) -> Any:
        """Return the value of a variable or literal."""
        return self._known[atom] if is_var(atom) else atom.val

    def node(self, atom: Any) -> Node:
        """Return the node of a variable or literal."""
        if not is_var(atom):
            return leaf(atom.val)
        if atom not in self._nodes:
            node = self._nodes[atom] = leaf(self._known[atom])
            eqn = self._program.maker(atom)
            if eqn is not None and len(eqn.outvars) == 1:
                node._make = lambda: self._made(eqn)
        return self._nodes[atom]

    def _made(self, eqn: Any) -> Any:
        return eqn.primitive, eqn.params, tuple(map(self.node, eqn.invars))


@dataclass(frozen=True)
class PatternMatch:
    """A place of a pattern.

    Attributes:
        equation: The equation whose results are computed in another way.
        compute: Returns these results; None to leave the equation as it is after all.
    """

    equation: Any
    compute: Callable[[RunningValues], list[Any] | None]
