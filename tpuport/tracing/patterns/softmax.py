"""A softmax in a flat program, as jax and people write it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tpuport.tracing.patterns.program import FlatProgram


@dataclass
class Softmax:
    """A softmax.

    Attributes:
        input: What it is of.
        axis: The dim that it sums over.
        zeros: Whether a row of minus infinity becomes zeros, and not NaN.
        equations: What computes it; the last one makes the result.
    """

    input: Any
    axis: int
    zeros: bool = False
    equations: list[Any] = field(default_factory=list)


def softmax_of(program: FlatProgram, division: Any) -> Softmax | None:
    """Return the softmax that ends in this equation, or None.

    It is exp(x - m) / sum(exp(x - m)), where m is the highest x of a row.
    """
    if division is None or division.primitive.name != "div":
        return None
    power = program.maker(division.invars[0])
    if power is None or power.primitive.name != "exp":
        return None
    less = program.maker(power.invars[0])
    if less is None or less.primitive.name != "sub":
        return None
    rows = _RowNumbers(program, less.invars[0].aval.shape)
    total = rows.reduced(division.invars[1], 1.0)
    high = rows.reduced(less.invars[1], 0.0)
    if total is None or high is None or high.test is not total.test:
        return None
    of_total, of_high = total.reduction, high.reduction
    if of_total.primitive.name != "reduce_sum" or of_total.invars[0] is not power.outvars[0]:
        return None
    if of_high.primitive.name != "reduce_max" or of_high.invars[0] is not less.invars[0]:
        return None
    axes = tuple(of_total.params["axes"])
    if len(axes) != 1 or tuple(of_high.params["axes"]) != axes:
        return None
    equations = [*high.equations, less, power, *total.equations, division]
    return Softmax(less.invars[0], axes[0], total.test is not None, equations)


@dataclass
class _Reduced:
    reduction: Any
    test: Any = None
    equations: list[Any] = field(default_factory=list)


@dataclass
class _RowNumbers:
    """Numbers of rows of an array of this shape, stretched along the reduced dim again."""

    program: FlatProgram
    shape: tuple[int, ...]

    def reduced(self, atom: Any, instead: float) -> _Reduced | None:
        """Return the reduction that a number for each row comes from.

        Args:
            atom: The number for each row, such as their sums.
            instead: What it is for rows of minus infinity, if there is a test for such.
        """
        found, eqn = _Reduced(None), self.program.maker(atom)
        if eqn is not None and eqn.primitive.name == "select_n" and len(eqn.invars) == 3:
            test = self.program.maker(eqn.invars[0])
            if test is None or not self._is_empty_row(test):
                return None
            if self.program.number(eqn.invars[2]) != instead:
                return None
            found.test, found.equations = test, [eqn, test]
            eqn = self.program.maker(eqn.invars[1])
        while eqn is not None:
            views = list(found.equations)
            found.equations.append(eqn)
            eqn = _without_rule(eqn) if instead == 0.0 else eqn
            name = eqn.primitive.name
            if name in ("reduce_max", "reduce_sum"):
                found.reduction = eqn
                return found if self._stretches(views, eqn) else None
            if name == "max" and self.program.number(eqn.invars[0]) == -np.inf:
                eqn = self.program.maker(eqn.invars[1])
            elif name in _VIEWS or (name == "stop_gradient" and instead == 0.0):
                eqn = self.program.maker(eqn.invars[0])
            else:
                return None
        return None

    def _is_empty_row(self, test: Any) -> bool:
        """Return whether a test is: the highest number of a row is minus infinity."""
        if test.primitive.name != "eq" or self.program.number(test.invars[1]) != -np.inf:
            return False
        found = self.reduced(test.invars[0], 0.0)
        return found is not None and found.reduction.primitive.name == "reduce_max"

    def _stretches(self, views: list[Any], reduction: Any) -> bool:
        """Return whether the views among these equations put each row's number into its row."""
        (axis, *more) = reduction.params["axes"]
        if more or reduction.invars[0].aval.shape != self.shape:
            return False
        places: list[Any] = [d for d in range(len(self.shape)) if d != axis]
        for eqn in reversed(views):
            if eqn.primitive.name in _VIEWS:
                moved = _moved(places, eqn)
                if moved is None:
                    return False
                places = moved
        wanted = [d for d, n in enumerate(self.shape) if n > 1 and d != axis]
        return len(places) == len(self.shape) and all(places[d] == d for d in wanted)


def _without_rule(eqn: Any) -> Any:
    """Return the one equation of a call that has a gradient of its own; others as they are.

    The gradient of a row's highest number does not matter: a softmax does not change with it.
    """
    if eqn.primitive.name != "custom_jvp_call":
        return eqn
    inner = eqn.params["call_jaxpr"].jaxpr.eqns
    return inner[0].replace(invars=eqn.invars, outvars=eqn.outvars) if len(inner) == 1 else eqn


_VIEWS = ("broadcast_in_dim", "reshape")


def _moved(places: list[Any], eqn: Any) -> list[Any] | None:
    """Return where dims are after a view that stretches or inserts dims; None for another one."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    result: list[Any] = [None] * len(after)
    if eqn.primitive.name == "broadcast_in_dim":
        for d, to in enumerate(eqn.params["broadcast_dimensions"]):
            result[to] = places[d] if before[d] == after[to] else None
        return result
    inner, outer = ([d for d, n in enumerate(shape) if n > 1] for shape in (before, after))
    if [before[d] for d in inner] != [after[d] for d in outer]:
        return None
    for d, to in zip(inner, outer, strict=True):
        result[to] = places[d]
    return result
