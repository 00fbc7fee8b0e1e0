"""Bytes that the instructions of a compiled program read from memory and write to it.

They are counted as XLA counts "bytes accessed" (`HloCostAnalysis`), with two differences: loops
count as often as they run, and arrays that stay on the chip do not count. An array that is only
sliced counts as its slices; one that is updated in place counts as the update.
"""

from typing import Any

from tpuport.cost.hlo.collectives import collective_kind
from tpuport.cost.hlo.parser import Array, Computation, HloProgram, Instruction

_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATE = "dynamic-update-slice"
# A fusion that advances a collective by a step, in addition to its own work. The bytes that the
# collective moves count where it starts and ends.
_STEP = "async_collective_fusion"


# A fusion inside of another: where it is, itself, and what is around that.
_Around = tuple[Computation, Instruction, Any] | None


def traffic(program: HloProgram, computation: Computation, one: Instruction) -> int:
    """Return the bytes of HBM that one run of an instruction reads and writes."""
    inner = _fused(program, one)
    read = sum(_read(program, computation, one, place, inner) for place in range(len(one.operands)))
    return read + _written(computation, one, inner)


def _fused(program: HloProgram, one: Instruction) -> Computation | None:
    if one.opcode != "fusion":
        return None
    return program.computations.get((one.called("calls") or [""])[0])


def _in_memory(held: list[Array]) -> int:
    return sum(array.bytes for array in held if array.space == 0)


def _read(
    program: HloProgram,
    computation: Computation,
    one: Instruction,
    place: int,
    inner: Computation | None,
) -> int:
    source = computation.instructions.get(one.operands[place])
    if source is None or not _in_memory(source.arrays):
        return 0
    whole = _in_memory(source.arrays)
    if inner is not None:
        parameter = _parameter(inner, place)
        part = None if parameter is None else _part(program, inner, parameter, None)
    else:
        part = _used(program, computation, one, place, None)
    return whole if part is None else min(part, whole)


def _parameter(inner: Computation, place: int) -> Instruction | None:
    found = (i for i in inner.instructions.values() if i.opcode == "parameter")
    return next((i for i in found if i.arguments.strip() == str(place)), None)


def _part(
    program: HloProgram, inner: Computation, source: Instruction, around: _Around
) -> int | None:
    """Return the bytes of `source` that its users read; None if some user reads all of it.

    The result of a fusion inside of another one, such as a bitcast, is read by users there.
    """
    total: int | None = 0
    if source is inner.root:
        total = None if around is None else _part(program, *around)
        if total is None:
            return None
    for user in inner.instructions.values():
        for place, name in enumerate(user.operands):
            if name != source.name:
                continue
            part = _used(program, inner, user, place, around)
            if part is None:
                return None
            total += part
    return total


def _used(
    program: HloProgram, computation: Computation, user: Instruction, place: int, around: _Around
) -> int | None:
    """Return the bytes that one user reads of its operand; None for all of it."""
    # Asynchronous slices too, such as `slice-start`.
    if user.opcode.removesuffix("-start") in _SLICES and place == 0:
        return sum(array.bytes for array in user.results)
    if user.opcode == _UPDATE and place == 0:
        return 0
    if _only_steps(computation, user):
        return 0
    if user.opcode == "bitcast":
        return _part(program, computation, user, around)
    if (inner := _fused(program, user)) is not None:
        parameter = _parameter(inner, place)
        outside = (computation, user, around)
        return None if parameter is None else _part(program, inner, parameter, outside)
    return None


def _only_steps(where: Computation, one: Instruction) -> bool:
    """Return whether this is a collective under way, or an array that is only passed on to it."""
    if not where.name.startswith(_STEP):
        return False
    return one.opcode in ("parameter", "tuple") or collective_kind(one.opcode) is not None


def _written(computation: Computation, one: Instruction, inner: Computation | None) -> int:
    where = computation if inner is None else inner
    root = one if inner is None else inner.root
    if root is None:
        return _in_memory(one.results)
    if root.opcode == "tuple":
        parts = [where.instructions.get(name) for name in root.operands]
    else:
        parts = [root]
    total = 0
    for part, array in zip(parts, one.results, strict=False):
        if part is not None and _only_steps(where, part):
            continue
        update = _updated(where, part)
        whole = _in_memory([array])
        total += whole if update is None else min(update, whole)
    return total


def _updated(where: Computation, part: Instruction | None) -> int | None:
    """Return the bytes of the update if this array is updated in place, else None."""
    while part is not None and part.opcode == "bitcast" and part.operands:
        part = where.instructions.get(part.operands[0])
    if part is None or part.opcode != _UPDATE:
        return None
    update = where.instructions.get(part.operands[1])
    return None if update is None else sum(array.bytes for array in update.arrays)
