"""Recognition of equal rounds in a program: equal operations on different operands."""

from dataclasses import dataclass, field
from typing import Any

from jax.extend import core


@dataclass
class Loop:
    """A repeated sequence of equations, the body of a loop.

    Attributes:
        rounds: The number of rounds.
        body: The equations of a round, in variables of the first one and new ones for its inputs.
        fixed: The variable of an input that every round shares, and its value outside.
        varying: The variable of an input that each round has its own of, and the value for each.
        carried: The variable of a result of the round before, its value for the first round, and
            the variable of that result.
        results: The values read after the loop: the body's variable, the round (None for the last
            round's result that is carried), and the variable outside.
    """

    rounds: int
    body: list[Any]
    fixed: list[tuple[Any, Any]] = field(default_factory=list)
    varying: list[tuple[Any, list[Any]]] = field(default_factory=list)
    carried: list[tuple[Any, Any, Any]] = field(default_factory=list)
    results: list[tuple[Any, int | None, Any]] = field(default_factory=list)

    def note_results(self, rounds: list[list[Any]], rest: list[Any], outvars: Any) -> None:
        """Find the results of the loop that are read later.

        Args:
            rounds: The equations of each round.
            rest: The equations after the loop.
            outvars: The outputs of the program.
        """
        defined: dict[Any, tuple[Any, int]] = {}
        for number, equations in enumerate(rounds[: self.rounds]):
            for ours, theirs in zip(rounds[0], equations, strict=False):
                for var, name in zip(ours.outvars, theirs.outvars, strict=True):
                    defined[name] = (var, number)
        read = [var for eqn in rest for var in eqn.invars] + list(outvars)
        handed_on = {out for _, _, out in self.carried}
        wanted = (v for v in read if not isinstance(v, core.Literal) and v in defined)
        for name in dict.fromkeys(wanted):
            var, number = defined[name]
            last = number == self.rounds - 1 and var in handed_on
            self.results.append((var, None if last else number, name))


def matched(rounds: list[list[Any]], min_rounds: int) -> Loop | None:
    """Return the loop of all leading rounds that are equal, or None if they are too few.

    Args:
        rounds: The equations of each round, in order. A round that is longer than the first one
            can only be the last of the loop.
        min_rounds: The number of rounds that a loop needs.
    """
    first = rounds[0]
    slots: list[list[list[Any]]] = []
    count = 0
    places: dict[Any, tuple[int, tuple[int, int]]] = {}
    for number, whole in enumerate(rounds):
        equations = whole[: len(first)]
        if not _same_work(first, equations):
            break
        places.update(_places(equations, number))
        operands = [[_operand(atom, number, places) for atom in eqn.invars] for eqn in equations]
        if any(_TOO_OLD in row for row in operands) or not _fits(slots, operands, number):
            break
        slots = slots or [[[] for _ in row] for row in operands]
        for row, kept in zip(operands, slots, strict=True):
            for operand, seen in zip(row, kept, strict=True):
                seen.append(operand)
        count += 1
        if len(whole) > len(first):
            break
    return _loop(first, slots, count) if count >= min_rounds else None


def _same_work(ours: list[Any], theirs: list[Any]) -> bool:
    """Return whether two rounds run the same operations on values of the same dtypes and shapes."""
    return len(ours) == len(theirs) and all(map(_same_operation, ours, theirs))


def same_kinds(ours: Any, theirs: Any) -> bool:
    """Return whether two equations have equal primitives and effects, and values of equal types."""
    if ours.primitive is not theirs.primitive or len(ours.invars) != len(theirs.invars):
        return False
    if len(ours.outvars) != len(theirs.outvars) or _effects(ours) != _effects(theirs):
        return False
    kinds = zip((*ours.invars, *ours.outvars), (*theirs.invars, *theirs.outvars), strict=True)
    return all((a.aval.shape, a.aval.dtype) == (b.aval.shape, b.aval.dtype) for a, b in kinds)


def _effects(eqn: Any) -> set[Any]:
    """Return an equation's effects; those on an operand (a kernel's writes) by operand number."""
    return {
        (type(effect), _place(eqn, effect.input)) if hasattr(effect, "input") else effect
        for effect in eqn.effects
    }


def _place(eqn: Any, operand: Any) -> Any:
    return next((n for n, var in enumerate(eqn.invars) if var is operand), operand)


def _same_operation(ours: Any, theirs: Any) -> bool:
    same = same_kinds(ours, theirs) and ours.params.keys() == theirs.params.keys()
    return same and all(_same(v, theirs.params[k]) for k, v in ours.params.items())


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    equal = a == b
    return equal if isinstance(equal, bool) else False


def _places(equations: list[Any], number: int) -> dict[Any, tuple[int, tuple[int, int]]]:
    """Return the round that defines each variable, and its position in the round."""
    return {
        var: (number, (place, index))
        for place, eqn in enumerate(equations)
        for index, var in enumerate(eqn.outvars)
    }


_INSIDE, _BEFORE, _OUTSIDE = "inside", "before", "outside"
# A loop carries results to the next round only.
_TOO_OLD = ("too old", None)


def _operand(
    atom: Any, number: int, places: dict[Any, tuple[int, tuple[int, int]]]
) -> tuple[str, Any]:
    """Return where an operand is defined: in this round, in the one before, or outside."""
    found = None if isinstance(atom, core.Literal) else places.get(atom)
    if found is None:
        return (_OUTSIDE, atom)
    made, place = found
    if made < number - 1:
        return _TOO_OLD
    return (_INSIDE if made == number else _BEFORE, place)


def _fits(slots: list[list[list[Any]]], operands: list[list[Any]], number: int) -> bool:
    """Return whether a round's operands are defined where those of the earlier rounds are."""
    if not slots:
        return True
    for row, kept in zip(operands, slots, strict=True):
        for (kind, what), seen in zip(row, kept, strict=True):
            earlier = seen[-1]
            # What later rounds take from the round before, the first one takes from outside.
            if number == 1 and kind == _BEFORE:
                if earlier[0] != _OUTSIDE:
                    return False
            elif kind != earlier[0] or (kind != _OUTSIDE and what != earlier[1]):
                return False
    return True


def _loop(first: list[Any], slots: list[list[list[Any]]], count: int) -> Loop:
    """Return the loop, with a new variable for each of its inputs."""
    loop = Loop(count, [])
    inputs: dict[Any, Any] = {}
    for eqn, row in zip(first, slots, strict=True):
        atoms = [
            _input(loop, inputs, first, atom, seen)
            for atom, seen in zip(eqn.invars, row, strict=True)
        ]
        loop.body.append(eqn.replace(invars=atoms))
    return loop


def _input(loop: Loop, inputs: dict[Any, Any], first: list[Any], atom: Any, seen: list[Any]) -> Any:
    """Return the body's variable or literal for an operand of the first round."""
    kind, what = seen[1] if len(seen) > 1 else seen[0]
    if kind == _INSIDE:
        return atom
    outside = [_identity(a) for source, a in seen if source == _OUTSIDE]
    if kind == _OUTSIDE and len(set(outside)) == 1 and isinstance(atom, core.Literal):
        return atom
    key = (kind, what if kind == _BEFORE else None, tuple(outside))
    if key in inputs:
        return inputs[key]
    var = inputs[key] = core.Var(atom.aval)
    if kind == _BEFORE:
        number, index = what
        loop.carried.append((var, atom, first[number].outvars[index]))
    elif len(set(outside)) == 1:
        loop.fixed.append((var, atom))
    else:
        loop.varying.append((var, [a for _, a in seen]))
    return var


def _identity(atom: Any) -> Any:
    if isinstance(atom, core.Literal):
        return ("literal", str(atom.aval), repr(atom.val))
    return atom
