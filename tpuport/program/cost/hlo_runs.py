"""How often each computation of a compiled program runs: loops by their trip counts."""

import re
from dataclasses import dataclass, field

from tpuport.sharding.hlo_text import Computation, Instruction, Program

_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLS = ("calls", "to_apply", "branch_computations", "true_computation", "false_computation")
# Each is the end of an asynchronous operation, whose start was counted.
_ENDS = ("-done", "-update")


@dataclass
class Runs:
    """Runs of each computation in one run of the program.

    Args:
        times: by the computation's name; what is never reached is not in it.
        fused: names of computations that run within one kernel: their results are no buffers.
        unknown: what had to be assumed, in sentences.
    """

    times: dict[str, int] = field(default_factory=dict)
    fused: set[str] = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)


def count_runs(program: Program) -> Runs:
    """How often each computation of a program runs."""
    runs = Runs()
    _visit(program, program.entry, 1, False, runs)
    return runs


def _visit(program: Program, computation: Computation, times: int, fused: bool, runs: Runs) -> None:
    runs.times[computation.name] = runs.times.get(computation.name, 0) + times
    if fused:
        runs.fused.add(computation.name)
    for one in computation.instructions.values():
        if one.opcode.endswith(_ENDS):
            continue
        if one.opcode == "while":
            trips = _trip_count(program, computation, one)
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


def _enter(program: Program, name: str, times: int, fused: bool, runs: Runs) -> None:
    if name in program.computations:
        _visit(program, program.computations[name], times, fused, runs)


def _trip_count(program: Program, outer: Computation, loop: Instruction) -> int | None:
    """Said by XLA, or read from a condition that compares a counter with a constant.

    JAX's scans and `fori_loop`s of fixed length count up by one.
    """
    known = _TRIPS.search(loop.attributes)
    if known:
        return int(known[1])
    conditions = [program.computations.get(name) for name in loop.called("condition")]
    root = conditions[0].root if conditions and conditions[0] else None
    if root is None or conditions[0] is None:
        return None
    if root.opcode == "fusion":
        return _trips_of_fused(program, outer, loop, conditions[0], root)
    if root.opcode != "compare" or "direction=LT" not in root.attributes:
        return None
    first, last = (_value(outer, loop, conditions[0], name) for name in root.operands[:2])
    return None if first is None or last is None else max(0, last - first)


def _trips_of_fused(
    program: Program,
    outer: Computation,
    loop: Instruction,
    condition: Computation,
    root: Instruction,
) -> int | None:
    """The same where the comparison was fused, with the fusion's operands as its parameters."""
    inner = program.computations.get((root.called("calls") or [""])[0])
    compare = inner.root if inner else None
    if inner is None or compare is None or compare.opcode != "compare":
        return None
    if "direction=LT" not in compare.attributes:
        return None
    ends = []
    for name in compare.operands[:2]:
        source = inner.instructions[name]
        if source.opcode == "parameter":
            outside = root.operands[int(source.arguments)]
            ends.append(_value(outer, loop, condition, outside))
        else:
            ends.append(_constant(inner, name))
    first, last = ends
    return None if first is None or last is None else max(0, last - first)


def _value(outer: Computation, loop: Instruction, condition: Computation, name: str) -> int | None:
    """A number in a condition: a constant, or one that the loop started with."""
    source = condition.instructions.get(name)
    while source is not None and source.opcode in ("copy", "bitcast") and source.operands:
        source = condition.instructions.get(source.operands[0])
    if source is None:
        return None
    if source.opcode != "get-tuple-element":
        return _constant(condition, source.name)
    index = re.search(r"\bindex=(\d+)", source.attributes)
    start = outer.instructions.get((loop.operands or [""])[0])
    if index is None or start is None or start.opcode != "tuple":
        return None
    return _constant(outer, start.operands[int(index[1])])


def _constant(computation: Computation, name: str) -> int | None:
    found = computation.instructions.get(name)
    while found is not None and found.opcode in ("copy", "bitcast", "convert") and found.operands:
        found = computation.instructions.get(found.operands[0])
    if found is None or found.opcode != "constant":
        return None
    return int(found.arguments) if re.fullmatch(r"-?\d+", found.arguments) else None
