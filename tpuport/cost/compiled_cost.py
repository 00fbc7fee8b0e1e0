"""The work of a compiled program on one chip, read from its text (HLO after optimisation)."""

import math
import re
from collections.abc import Collection, Iterator

from tpuport.cost.hlo.collectives import collective_id, collective_kind
from tpuport.cost.hlo.parser import Array, Computation, HloProgram, Instruction, read_program
from tpuport.cost.hlo_products import product_flops
from tpuport.cost.hlo_runs import Runs, count_runs
from tpuport.cost.hlo_traffic import traffic
from tpuport.cost.modules import innermost, operation_names
from tpuport.cost.records import Buffer, Collective, CompiledCost, Custom

PALLAS_TARGET = "tpu_custom_call"
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# Opcodes whose results alias other instructions' memory, or have none.
_NO_BUFFER = {
    *("tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "opt-barrier"),
    *("optimization-barrier", "after-all", "partition-id", "replica-id", "domain", "async-start"),
}
_NUM_BUFFERS = 200


def read_compiled(text: str, *, modules: Collection[str] | None = None) -> CompiledCost:
    """Count the work of a compiled program on one chip.

    Args:
        text: `compiled.as_text()`.
        modules: names of modules; an operation belongs to the innermost of them around it. None
            takes any `jax.named_scope`.
    """
    program = read_program(text)
    runs = count_runs(program)
    reader = _Reader(program, runs, modules)
    for computation in program.computations.values():
        if computation.name in runs.times:
            reader.read(computation, runs.times[computation.name])
    buffers = sorted(reader.buffers, key=lambda buffer: -buffer.padded_bytes)
    copies = sorted(reader.copies, key=lambda copy: -copy[0].padded_bytes * copy[1])
    return CompiledCost(
        dot_flops=sum(reader.flops.values()),
        collectives=tuple(reader.collectives.values()),
        copies=tuple(copy for copy, _ in copies[:_NUM_BUFFERS]),
        copied_bytes=sum(copy.padded_bytes * times for copy, times in copies),
        padding_bytes=sum(buffer.padded_bytes - buffer.bytes for buffer in buffers),
        buffers=tuple(buffers[:_NUM_BUFFERS]),
        kernels=tuple(reader.kernels),
        dot_flops_by_module=dict(sorted(reader.flops.items(), key=lambda item: -item[1])),
        estimated_cycles=reader.cycles,
        hbm_bytes=reader.hbm_bytes,
        unknown=tuple(dict.fromkeys(runs.unknown + reader.unknown)),
    )


class _Reader:
    """Collector of work and buffers, computation by computation."""

    def __init__(self, program: HloProgram, runs: Runs, modules: Collection[str] | None):
        self.program = program
        self.runs = runs
        self.modules = modules
        self.flops: dict[str, int] = {}
        self.collectives: dict[str, Collective] = {}
        self.copies: list[tuple[Buffer, int]] = []
        self.buffers: list[Buffer] = []
        self.kernels: list[Custom] = []
        self.cycles = 0
        self.hbm_bytes = 0
        self.unknown: list[str] = []

    def read(self, computation: Computation, times: int) -> None:
        """Read one computation that runs `times` times."""
        fused = computation.name in self.runs.fused
        for one in computation.instructions.values():
            self._read_work(computation, one, times)
            if not fused:
                self._read_memory(computation, one, times)

    def _read_work(self, computation: Computation, one: Instruction, times: int) -> None:
        module = self._module(one)
        try:
            flops = product_flops(computation, one)
        except ValueError as error:
            self.unknown.append(f"the FLOPs of {one.opcode} {one.name}: {error}")
            flops = None
        if flops:
            self.flops[module] = self.flops.get(module, 0) + flops * times
        if kind := collective_kind(one.opcode):
            found = self._collective(computation, one, kind, times)
            known = self.collectives.setdefault(collective_id(one), found)
            # Its steps may be spread over a loop that it overlaps with; it starts and ends once.
            if found.times < known.times:
                self.collectives[collective_id(one)] = found
        if _is_kernel(one):
            name = re.sub(r"(?:\.\d+|\.clone)+$", "", one.name)
            self.kernels.append(Custom(name, PALLAS_TARGET, module, times))

    def _read_memory(self, computation: Computation, one: Instruction, times: int) -> None:
        cycles = _CYCLES.search(one.attributes)
        self.cycles += int(cycles[1]) * times if cycles else 0
        is_argument = one.opcode == "parameter" and computation is self.program.entry
        if one.opcode in _NO_BUFFER or one.opcode.endswith(("-done", "-update")):
            return
        if one.opcode == "parameter" and not is_argument:
            return
        if one.opcode not in ("parameter", "constant") and not _is_kernel(one):
            self.hbm_bytes += traffic(self.program, computation, one) * times
        held = [array for array in one.results if array.size > 1]
        in_memory = [array for array in held if array.space == 0]
        if in_memory:
            self.buffers.append(self._buffer(one, in_memory))
        if held and self._is_copy(computation, one):
            self.copies.append((self._buffer(one, held), times))

    def _module(self, one: Instruction) -> str:
        return innermost(operation_names(one.op_name), self.modules)

    def _buffer(self, one: Instruction, held: list[Array]) -> Buffer:
        return Buffer(
            one.name,
            one.opcode,
            self._module(one),
            one.shape,
            sum(array.bytes for array in held),
            sum(array.padded_bytes for array in held),
        )

    def _is_copy(self, computation: Computation, one: Instruction) -> bool:
        opcode = one.opcode
        if opcode == "fusion":
            inner = self.program.computations.get((one.called("calls") or [""])[0])
            opcode = inner.root.opcode if inner and inner.root else opcode
        if opcode == "transpose":
            return True
        if opcode not in ("copy", "copy-start") or not one.operands:
            return False
        source = computation.instructions.get(one.operands[0])
        if source is None or not source.arrays:
            return True
        before, after = source.arrays[0], one.results[0]
        moved = before.space != after.space
        return before.order != after.order or before.tile != after.tile or not moved

    def _collective(
        self, computation: Computation, one: Instruction, kind: str, times: int
    ) -> Collective:
        held = one.results
        if kind == "reduce-scatter":
            sources = [computation.instructions.get(name) for name in one.operands]
            held = [array for source in sources if source for array in source.arrays]
        return Collective(
            kind,
            self._module(one),
            sum(array.bytes for array in held),
            self._group_size(one, kind),
            times,
            one.op_name,
        )

    def _group_size(self, one: Instruction, kind: str) -> int:
        size = group_size(one.attributes)
        if size is None and kind != "collective-permute":
            self.unknown.append(f"how many chips take part in {one.name}; 2 are taken")
        return size or 2


def _is_kernel(one: Instruction) -> bool:
    return one.opcode == "custom-call" and f'"{PALLAS_TARGET}"' in one.attributes


def group_size(attributes: str) -> int | None:
    """Return how many chips take part in a collective; None if its attributes do not say."""
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    if listed:
        return len(listed[1].split(","))
    tiled = re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes)
    if tiled:
        return int(tiled[2])
    mesh = re.search(r"replica_groups=@?\w*\[([^\]]*)\]\s*\{([^}]*)\}", attributes)
    if mesh:
        sizes = dict(_axes(mesh[1]))
        return math.prod(_axis_size(name, sizes) for name in mesh[2].split(",") if name.strip())
    return None


def _axes(text: str) -> Iterator[tuple[str, int]]:
    for name, size in re.findall(r"'([^']+)'=(\d+)", text):
        yield name, int(size)


def _axis_size(name: str, sizes: dict[str, int]) -> int:
    """Return the size of an axis, or of a part of one, such as 4 for `'x':(2)4`."""
    part = re.search(r":\(\d+\)(\d+)", name)
    return int(part[1]) if part else sizes[name.strip().strip("'")]
