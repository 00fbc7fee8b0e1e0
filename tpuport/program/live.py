"""What lies in a chip's HBM when most does, read from the schedule of a compiled program."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tpuport.program.hlo import HBM, Array, Instruction, Program, arrays_of

_ALIASED = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")
_INDEX = re.compile(r"\bindex=(\d+)")
# Their result is their operand, where it is.
_SAME = {"bitcast", "optimization-barrier", "while", "add-dependency"}
# They take no memory of a run: arguments are counted by themselves, constants with the program.
_ELSEWHERE = {"parameter", "constant", "partition-id", "replica-id"}


@dataclass(frozen=True)
class Live:
    """One array in HBM at the moment when most is there.

    Attributes:
        name: the instruction that makes it.
        opcode: its operation.
        op_name: the operation of the jaxpr that it comes from.
        shape: dtype and sizes.
        bytes: what it takes, tiles included.
    """

    name: str
    opcode: str
    op_name: str
    shape: str
    bytes: int


@dataclass
class _Buffer:
    live: Live
    born: int
    dies: int
    is_result: bool = False


@dataclass
class _Sweep:
    """The walk over one computation."""

    program: Program
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    buffers: list[_Buffer] = field(default_factory=list)
    inner: dict[int, list[Live]] = field(default_factory=dict)


def live_at_peak(program: Program) -> list[Live]:
    """The temporaries of a program at the moment when they take most, the largest first.

    Arguments, results and what lies in on-chip memory are not among them. A loop counts with the
    temporaries of its body. Source: `HeapSimulator` of XLA; how it packs them is not modelled, so
    the sum is a lower bound of what is set aside.
    """
    found = _peak(program, program.entry)
    return sorted(found, key=lambda one: -one.bytes)


def _peak(program: Program, name: str) -> list[Live]:
    sweep = _Sweep(program)
    instructions = program.instructions(name)
    for time, one in enumerate(instructions):
        for operand in one.operands:
            for buffer in _flat(sweep.values.get(operand)):
                buffer.dies = time
        sweep.values[one.name] = _value(sweep, one, time)
        sweep.origins[one.name] = _origin(sweep, one)
        inside = _inside(program, one)
        if inside:
            sweep.inner[time] = inside
        if one.is_root:
            for buffer in _flat(sweep.values[one.name]):
                buffer.is_result = True
    return _largest(sweep, len(instructions))


def _largest(sweep: _Sweep, length: int) -> list[Live]:
    """What is live at the time when most is."""
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


def _value(sweep: _Sweep, one: Instruction, time: int) -> Any:
    """Where the result of an instruction lies: a buffer, None, or a list for a tuple."""

    def operand(number: int = 0) -> Any:
        return sweep.values.get(one.operands[number]) if number < len(one.operands) else None

    if one.opcode in _ELSEWHERE:
        return _mapped(one.shape, lambda array: None)
    if one.opcode in _SAME:
        return operand()
    if one.opcode == "tuple":
        return [sweep.values.get(name) for name in one.operands]
    if one.opcode == "get-tuple-element":
        found = _INDEX.search(one.attributes)
        return _part(operand(), (int(found[1]),) if found else ())
    if one.opcode.endswith("-done"):
        return _part(operand(), (0 if one.opcode == "copy-done" else 1,))

    def made(array: Array) -> _Buffer | None:
        if array.space != HBM or not array.padded_bytes:
            return None
        live = Live(one.name, one.opcode, _origin(sweep, one), array.text, array.padded_bytes)
        buffer = _Buffer(live, time, time)
        sweep.buffers.append(buffer)
        return buffer

    if one.opcode.endswith("-start") and isinstance(one.shape, list):
        return _started(one, operand(), made)
    aliases = _aliases(one)
    if not aliases and _updates_in_place(sweep.program, one, operand(), time):
        return operand()
    return _aliasing(one.shape, (), aliases, made, sweep.values, one.operands)


def _origin(sweep: _Sweep, one: Instruction) -> str:
    """The operation that an instruction comes from: its own, that of what it calls or reads."""
    inside = sweep.program.instructions(one.called("calls")) if not one.op_name else []
    named = (part.op_name for part in reversed(inside))
    read = (sweep.origins[name] for name in one.operands if name in sweep.origins)
    return one.op_name or next(filter(None, named), "") or next(filter(None, read), "")


def _started(one: Instruction, operand: Any, made: Callable[[Array], Any]) -> list[Any]:
    """The tuple of an asynchronous operation: its operand, its result, and flags."""
    result = 0 if one.opcode == "copy-start" else 1
    assert isinstance(one.shape, list)
    parts = []
    for index, part in enumerate(one.shape):
        if index == result:
            parts.append(_mapped(part, made))
        else:
            parts.append(operand if index == 1 - result else None)
    return parts


def _aliases(one: Instruction) -> dict[tuple[int, ...], tuple[int, tuple[int, ...]]]:
    """The outputs that take over the memory of an operand: its number and the place in it."""
    start = one.attributes.find("output_to_operand_aliasing={")
    if start < 0:
        return {}
    found = _ALIASED.findall(one.attributes[start : one.attributes.find("}, ", start + 28) + 400])
    return {_index(to): (int(number), _index(at)) for to, number, at in found}


def _index(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _aliasing(
    shape: Any,
    index: tuple[int, ...],
    aliases: dict[tuple[int, ...], tuple[int, tuple[int, ...]]],
    made: Callable[[Array], Any],
    values: dict[str, Any],
    operands: list[str],
) -> Any:
    if index in aliases:
        number, at = aliases[index]
        return _part(values.get(operands[number]), at)
    if isinstance(shape, list):
        return [
            _aliasing(part, (*index, i), aliases, made, values, operands)
            for i, part in enumerate(shape)
        ]
    return made(shape)


def _updates_in_place(program: Program, one: Instruction, operand: Any, time: int) -> bool:
    """Whether it writes a part of its first operand, which nothing reads later."""
    if one.opcode == "fusion":
        called = program.instructions(one.called("calls"))
        if not called or called[-1].opcode != "dynamic-update-slice":
            return False
    elif one.opcode != "dynamic-update-slice":
        return False
    same = isinstance(operand, _Buffer) and isinstance(one.shape, Array)
    return same and operand.dies == time and operand.live.bytes == one.shape.padded_bytes


def _inside(program: Program, one: Instruction) -> list[Live]:
    """The temporaries of a loop's body, or of the branch that has most."""
    if one.opcode == "while":
        return _peak(program, one.called("body"))
    if one.opcode in ("conditional", "call"):
        names = re.findall(
            r"(?:to_apply|true_computation|false_computation)=%?([\w.\-]+)", one.attributes
        )
        listed = re.search(r"branch_computations=\{([^}]*)\}", one.attributes)
        names += re.findall(r"%?([\w.\-]+)", listed[1]) if listed else []
        found = [_peak(program, name) for name in names]
        return max(found, key=lambda live: sum(b.bytes for b in live), default=[])
    return []


def _mapped(shape: Any, made: Callable[[Array], Any]) -> Any:
    return [_mapped(part, made) for part in shape] if isinstance(shape, list) else made(shape)


def _part(value: Any, index: tuple[int, ...]) -> Any:
    for number in index:
        if not isinstance(value, list):
            return value
        value = value[number] if number < len(value) else None
    return value


def _flat(value: Any) -> Iterable[_Buffer]:
    if isinstance(value, list):
        for part in value:
            yield from _flat(part)
    elif value is not None:
        yield value


def parameter_bytes(program: Program) -> dict[str, tuple[int, int]]:
    """Bytes and padded bytes of each argument that the program takes, by its name."""
    found: dict[str, tuple[int, int]] = {}
    for one in program.instructions(program.entry):
        if one.opcode == "parameter":
            arrays = arrays_of(one.shape)
            name = one.op_name or one.name
            plain, padded = found.get(name, (0, 0))
            found[name] = (
                plain + sum(a.bytes for a in arrays),
                padded + sum(a.padded_bytes for a in arrays),
            )
    return found
