"""Live arrays in a chip's HBM at its peak, read from the schedule of a compiled program."""

import dataclasses
import re
from dataclasses import dataclass, field

from tpuport.cost.hlo.parser import Array, Computation, HloProgram, Instruction

HBM = 0
_ALIASED = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")
_INDEX = re.compile(r"\bindex=(\d+)")
# Opcodes whose result aliases their operand.
_SAME = {"bitcast", "optimization-barrier", "opt-barrier", "while", "add-dependency"}
# Opcodes without temporaries: arguments are counted by themselves, constants with the program.
_ELSEWHERE = {"parameter", "constant", "partition-id", "replica-id", "after-all"}
_BRANCHES = ("to_apply", "true_computation", "false_computation", "branch_computations")


@dataclass(frozen=True)
class Live:
    """One array in HBM at the peak.

    Attributes:
        name: instruction that makes it.
        opcode: opcode of that instruction.
        op_name: operation of the jaxpr that it comes from.
        shape: dtype and sizes.
        bytes: size in memory, with the padding of tiles.
        is_carried: whether a loop reads or writes it from round to round.
    """

    name: str
    opcode: str
    op_name: str
    shape: str
    bytes: int
    is_carried: bool = False


@dataclass
class _Buffer:
    live: Live
    born: int
    dies: int
    is_result: bool = False


# The buffer of each array of a result; None for one that is not in HBM or is no temporary.
_Value = list[_Buffer | None]


@dataclass
class _Sweep:
    """The walk over one computation."""

    program: HloProgram
    values: dict[str, _Value] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    buffers: list[_Buffer] = field(default_factory=list)
    inner: dict[int, list[Live]] = field(default_factory=dict)


def live_at_peak(program: HloProgram) -> list[Live]:
    """Return the temporaries of a program at their peak, the largest first.

    Arguments, results and arrays in on-chip memory are left out. A loop counts with the temporaries
    of its body. Packing is not modelled, so the sum is what XLA calls the peak, a lower bound of
    what it allocates.
    """
    return sorted(_peak(program, program.entry), key=lambda one: -one.bytes)


def _peak(program: HloProgram, computation: Computation) -> list[Live]:
    sweep = _Sweep(program)
    for time, one in enumerate(computation.instructions.values()):
        for operand in one.operands:
            for buffer in filter(None, sweep.values.get(operand, ())):
                buffer.dies = time
                if one.opcode == "while":
                    buffer.live = dataclasses.replace(buffer.live, is_carried=True)
        sweep.origins[one.name] = _origin(sweep, one)
        sweep.values[one.name] = _value(sweep, one, time)
        inside = _inside(program, one)
        if inside:
            sweep.inner[time] = inside
        if one.is_root:
            for buffer in filter(None, sweep.values[one.name]):
                buffer.is_result = True
    return _largest(sweep, len(computation.instructions))


def _largest(sweep: _Sweep, length: int) -> list[Live]:
    """Return the arrays that are live when live arrays take most."""
    change = [0] * (length + 1)
    buffers = [b for b in sweep.buffers if not b.is_result]
    for buffer in buffers:
        change[buffer.born] += buffer.live.bytes
        change[buffer.dies + 1] -= buffer.live.bytes
    most, at, now = 0, -1, 0
    for time in range(length):
        now += change[time]
        total = now + sum(one.bytes for one in sweep.inner.get(time, ()))
        if total > most:
            most, at = total, time
    live = [buffer.live for buffer in buffers if buffer.born <= at <= buffer.dies]
    return live + sweep.inner.get(at, [])


def _value(sweep: _Sweep, one: Instruction, time: int) -> _Value:
    """Return the buffers that hold the arrays of a result."""
    operands = [sweep.values.get(name, []) for name in one.operands]
    first = operands[0] if operands else []
    if one.opcode in _ELSEWHERE:
        return [None] * len(one.arrays)
    if one.opcode in _SAME:
        return first
    if one.opcode.endswith("-done"):
        return first[: len(one.arrays)]
    if one.opcode == "tuple":
        return [buffer for value in operands for buffer in value]
    if one.opcode == "get-tuple-element":
        found = _INDEX.search(one.attributes)
        index = int(found[1]) if found else 0
        return first[index : index + 1]
    if one.opcode.endswith("-start"):
        # An asynchronous operation keeps its operands alive until its `-done`.
        made = [_made(sweep, one, array, time) for array in _started(one)]
        return made + [buffer for value in operands for buffer in value]
    aliases = _aliases(one)
    if not aliases and _updates_in_place(sweep.program, one, first, time):
        return first
    made = []
    for index, array in enumerate(one.arrays):
        if index in aliases:
            number, at = aliases[index]
            source = operands[number]
            made.append(source[at] if at < len(source) else None)
        else:
            made.append(_made(sweep, one, array, time))
    return made


def _made(sweep: _Sweep, one: Instruction, array: Array, time: int) -> _Buffer | None:
    if array.space != HBM or not array.padded_bytes:
        return None
    shape = f"{array.dtype}{list(array.dims)}"
    live = Live(one.name, one.opcode, sweep.origins[one.name], shape, array.padded_bytes)
    buffer = _Buffer(live, time, time)
    sweep.buffers.append(buffer)
    return buffer


def _origin(sweep: _Sweep, one: Instruction) -> str:
    """Return the jaxpr operation of an instruction: its own, or that of what it calls or reads."""
    if one.op_name:
        return one.op_name
    called = (sweep.program.computations.get(name) for name in one.called("calls"))
    inside = [part for c in called if c is not None for part in c.instructions.values()]
    named = (part.op_name for part in reversed(inside))
    read = (sweep.origins.get(name, "") for name in one.operands)
    return next(filter(None, named), "") or next(filter(None, read), "")


def _started(one: Instruction) -> list[Array]:
    """Return the results among the arrays of an asynchronous operation.

    The arrays are (operands, results, flags); for a copy (result, operand, flags); for an
    all-reduce the results alone.
    """
    found, num = one.arrays, len(one.operands)
    if one.opcode == "copy-start":
        return found[:1]
    if one.opcode == "all-reduce-start":
        return found
    return found[num : 2 * num]


def _aliases(one: Instruction) -> dict[int, tuple[int, int]]:
    """Return the outputs that reuse an operand's memory: the operand's number and index in it."""
    start = one.attributes.find("output_to_operand_aliasing={")
    if start < 0:
        return {}
    listed = one.attributes[start : one.attributes.find(")}", start) + 1]
    found = _ALIASED.findall(listed)
    return {int(to or 0): (int(number), int(at or 0)) for to, number, at in found}


def _updates_in_place(program: HloProgram, one: Instruction, operand: _Value, time: int) -> bool:
    """Return whether it updates a part of its first operand, which nothing reads later."""
    opcode = one.opcode
    if opcode == "fusion":
        called = program.computations.get((one.called("calls") or [""])[0])
        opcode = called.root.opcode if called is not None and called.root is not None else opcode
    if opcode != "dynamic-update-slice" or len(operand) != 1 or len(one.arrays) != 1:
        return False
    (buffer,), (array,) = operand, one.arrays
    same = buffer is not None and buffer.live.bytes == array.padded_bytes
    return same and buffer is not None and buffer.dies == time


def _inside(program: HloProgram, one: Instruction) -> list[Live]:
    """Return the temporaries of a loop's body, or of the branch that has most."""
    names: list[str] = []
    if one.opcode == "while":
        names = one.called("body")
    elif one.opcode in ("conditional", "call"):
        names = [name for attribute in _BRANCHES for name in one.called(attribute)]
    found = (_peak(program, program.computations[name]) for name in names)
    return max(found, key=lambda live: sum(one.bytes for one in live), default=[])


def parameter_bytes(program: HloProgram) -> dict[str, tuple[int, int]]:
    """Return bytes and padded bytes of each argument that the program takes, by its name."""
    found: dict[str, tuple[int, int]] = {}
    for one in program.entry.instructions.values():
        if one.opcode == "parameter":
            name = one.op_name.replace("\\'", "'") or one.name
            plain, padded = found.get(name, (0, 0))
            plain += sum(array.bytes for array in one.arrays)
            padded += sum(array.padded_bytes for array in one.arrays)
            found[name] = (plain, padded)
    return found
