"""Run counts of a compiled program's computations: loops by their trip counts."""

import re
from dataclasses import dataclass, field

from tpuport.cost.hlo.parser import Computation, HloProgram, Instruction

_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLS = ("calls", "to_apply", "branch_computations", "true_computation", "false_computation")
# Each ends an asynchronous operation, which is counted at its start.
_ENDS = ("-done", "-update")


@dataclass
class Runs:
    """Runs of each computation in one run of the program.

    Args:
        times: number of runs by the computation's name, without computations never reached.
        fused: names of computations that run within one kernel: their results are no buffers.
        unknown: assumptions that had to be made, in sentences.
    """

    times: dict[str, int] = field(default_factory=dict)
    fused: set[str] = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)


def count_runs(program: HloProgram) -> Runs:
    """Count how often each computation of a program runs."""
    runs = Runs()
    _visit(program, program.entry, 1, False, runs)
    return runs


def _visit(
    program: HloProgram, computation: Computation, times: int, fused: bool, runs: Runs
) -> None:
    runs.times[computation.name] = runs.times.get(computation.name, 0) + times
    if fused:
        runs.fused.add(computation.name)
    for one in computation.instructions.values():
        if one.opcode.endswith(_ENDS):
            continue
        if one.opcode == "while":
            trips = _trip_count(program, computation, one, runs)
            if trips is None:
                runs.unknown.append(f"how often the loop {one.name} runs; it is counted once")
            for name in one.called("body") + one.called("condition"):
                _enter(program, name, times * (1 if trips is None else trips), fused, runs)
            continue
        if one.opcode == "conditional":
            runs.unknown.append(f"which branch of {one.name} is taken; each is counted")
        inside = fused or one.opcode not in ("call", "conditional", "async-start")
        for attribute in _CALLS:
            for name in one.called(attribute):
                _enter(program, name, times, inside, runs)


def _enter(program: HloProgram, name: str, times: int, fused: bool, runs: Runs) -> None:
    if name in program.computations:
        _visit(program, program.computations[name], times, fused, runs)


def _trip_count(
    program: HloProgram, outer: Computation, loop: Instruction, runs: Runs
) -> int | None:
    """Return a loop's trip count: XLA's own, or one from a condition that compares a counter.

    A counter does not always count by one: if a product overlaps with the gathering of its operand,
    libtpu's loop runs two rounds in one.
    """
    known = _TRIPS.search(loop.attributes)
    if known:
        return int(known[1])
    condition = program.computations.get((loop.called("condition") or [""])[0])
    ends = _compared(program, condition)
    if condition is None or ends is None:
        return None
    first, last = (_value(outer, loop, where, name) for where, name in ends)
    if first is None or last is None:
        return None
    index = _carried(*ends[0])
    step = None if index is None else _step(program, loop, index)
    if step is None:
        runs.unknown.append(f"by how much the loop {loop.name} counts up; one is taken")
    return max(0, -(-(last - first) // (step or 1)))


def _compared(
    program: HloProgram, condition: Computation | None
) -> list[tuple[Computation, str]] | None:
    """Return both sides of a condition's "less than", each with the computation that holds it.

    The comparison may be fused. The fusion's operands then replace its parameters.
    """
    root = condition.root if condition else None
    if condition is None or root is None:
        return None
    inner = program.computations.get((root.called("calls") or [""])[0])
    within, compare = (inner, inner.root) if inner else (condition, root)
    if compare is None or compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    ends = []
    for name in compare.operands[:2]:
        source = within.instructions[name]
        if within is not condition and source.opcode == "parameter":
            ends.append((condition, root.operands[int(source.arguments)]))
        else:
            ends.append((within, name))
    return ends


def _carried(where: Computation, name: str) -> int | None:
    """Return the index of this value among those that a loop carries; None if it is not carried."""
    source = _behind_copies(where, name)
    if source is None or source.opcode != "get-tuple-element":
        return None
    index = re.search(r"\bindex=(\d+)", source.attributes)
    return int(index[1]) if index else None


def _value(outer: Computation, loop: Instruction, where: Computation, name: str) -> int | None:
    """Read a number in a condition: a constant, or one that the loop started with."""
    index = _carried(where, name)
    if index is None:
        return _constant(where, name)
    start = outer.instructions.get((loop.operands or [""])[0])
    if start is None or start.opcode != "tuple":
        return None
    return _constant(outer, start.operands[index])


def _step(program: HloProgram, loop: Instruction, index: int) -> int | None:
    """Return by how much a round increases a value that the loop carries; None if unclear."""
    body = program.computations.get((loop.called("body") or [""])[0])
    if body is None or body.root is None or body.root.opcode != "tuple":
        return None
    added = _behind_copies(body, body.root.operands[index])
    if added is None or added.opcode != "add":
        return None
    for one, other in (added.operands[:2], added.operands[1::-1]):
        if _carried(body, one) == index:
            step = _constant(body, other)
            return step if step and step > 0 else None
    return None


def _behind_copies(where: Computation, name: str) -> Instruction | None:
    found = where.instructions.get(name)
    while found is not None and found.opcode in ("copy", "bitcast", "convert") and found.operands:
        found = where.instructions.get(found.operands[0])
    return found


def _constant(where: Computation, name: str) -> int | None:
    found = _behind_copies(where, name)
    if found is None or found.opcode != "constant":
        return None
    return int(found.arguments) if re.fullmatch(r"-?\d+", found.arguments) else None
