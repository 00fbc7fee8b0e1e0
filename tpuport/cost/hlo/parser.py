"""The text of a compiled program (HLO), as computations and their instructions.

Grammar: xla/hlo/parser of openxla.org/xla. Only parts that the cost depends on are read.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

_HEAD = re.compile(r"^(ENTRY\s+)?%?([\w.\-~$]+)\s*\(.*\)\s*->\s*.*\{\s*$")
_LEFT = re.compile(r"^\s+(?:ROOT\s+)?%?([\w.\-~$]+)\s+=\s+")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_NAME = re.compile(r"%([\w.\-~$]+)")
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_TILE = re.compile(r"T\(([\d,]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclass(frozen=True)
class Array:
    """An array's dtype, shape and layout.

    Args:
        dtype: dtype as HLO writes it: `bf16`.
        dims: shape.
        order: dims from the minor one to the major one; empty if the text has none.
        tile: sizes of a tile, which the minor dims are padded to; empty without tiles.
        space: memory space: 0 is HBM, or main memory on a CPU; 1 is a TPU's on-chip memory.
    """

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    space: int = 0

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Return the bytes of its elements."""
        return -(-self.size * bits(self.dtype) // 8)

    @property
    def padded_bytes(self) -> int:
        """Return the bytes with the padding of its tiles."""
        order = self.order or tuple(reversed(range(len(self.dims))))
        sizes = [self.dims[dim] for dim in order]
        # An array with fewer dims than its tile is tiled as if it had more dims of size 1.
        sizes += [1] * (len(self.tile) - len(sizes))
        for place, tile in enumerate(reversed(self.tile)):
            sizes[place] = -(-sizes[place] // tile) * tile
        return -(-math.prod(sizes) * bits(self.dtype) // 8)


def bits(dtype: str) -> int:
    """Return the bits of one element of an HLO dtype."""
    if dtype in _BITS:
        return _BITS[dtype]
    number = re.match(r"[a-z]+(\d+)", dtype)
    return int(number[1]) if number else 8


def arrays(shape: str) -> list[Array]:
    """Parse the arrays of a shape as HLO writes it; a tuple has several."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(shape):
        order, _, rest = layout.partition(":")
        tile, space = _TILE.search(rest), _SPACE.search(rest)
        sizes = tuple(int(n.lstrip("<=")) for n in dims.split(",") if n)
        found.append(
            Array(
                dtype,
                sizes,
                tuple(int(n) for n in order.split(",") if n.strip().isdigit()),
                tuple(int(n) for n in tile[1].split(",")) if tile else (),
                int(space[1]) if space else 0,
            )
        )
    return found


@dataclass(frozen=True)
class Instruction:
    """One instruction: `%name = shape opcode(arguments), attributes`."""

    name: str
    shape: str
    opcode: str
    arguments: str
    attributes: str
    is_root: bool

    @cached_property
    def operands(self) -> list[str]:
        """Return the names of the instructions that it reads."""
        return _NAME.findall(self.arguments)

    @cached_property
    def arrays(self) -> list[Array]:
        """Return the arrays of its result; a tuple has several."""
        return arrays(self.shape)

    @property
    def results(self) -> list[Array]:
        """Return the arrays that it makes.

        The start of an asynchronous operation has (operands, results, ...); a copy's result comes
        first, and an all-reduce has only results.
        """
        found = self.arrays
        if self.opcode == "copy-start":
            return found[:1]
        if not self.opcode.endswith("-start") or self.opcode == "all-reduce-start":
            return found
        num = len(self.operands)
        return found[num : 2 * num] or found

    @property
    def op_name(self) -> str:
        """Return the jaxpr operation that it was made for, with the names around it."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    def called(self, attribute: str) -> list[str]:
        """Return the computations in an attribute such as `body=%b` or `calls={%a, %b}`."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%[\w.\-~$]+)", self.attributes)
        return _NAME.findall(found[1]) if found else []


@dataclass
class Computation:
    """A function of the program: its instructions by name, in order."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction | None:
        """Return the instruction whose result the computation returns."""
        return next((i for i in self.instructions.values() if i.is_root), None)


@dataclass
class HloProgram:
    """All computations by name, and the entry computation."""

    computations: dict[str, Computation]
    entry: Computation

    def instructions(self) -> Iterator[Instruction]:
        """Yield every instruction of every computation."""
        for computation in self.computations.values():
            yield from computation.instructions.values()


def read_program(text: str) -> HloProgram:
    """Parse `compiled.as_text()`; text without a computation is a program that does nothing."""
    computations: dict[str, Computation] = {}
    entry = current = Computation("")
    for line in text.splitlines():
        if not line.startswith((" ", "}")) and (head := _HEAD.match(line)):
            current = computations.setdefault(head[2], Computation(head[2]))
            entry = current if head[1] else entry
        elif left := _LEFT.match(line):
            instruction = _instruction(line, left)
            if instruction is not None:
                current.instructions[instruction.name] = instruction
    return HloProgram(computations, entry)


def _instruction(line: str, left: re.Match[str]) -> Instruction | None:
    start = left.end()
    stop = _closing(line, start) if line[start] == "(" else line.find(" ", start)
    opcode = _OPCODE.match(line, stop)
    if stop < 0 or opcode is None:
        return None
    close = _closing(line, opcode.end() - 1)
    is_root = line.lstrip().startswith("ROOT")
    shape, arguments = line[start:stop], line[opcode.end() : close - 1]
    return Instruction(left[1], shape, opcode[1], arguments, line[close:], is_root)


def _closing(line: str, start: int) -> int:
    """Return the index after the parenthesis that closes the one at `start`."""
    depth = 0
    for at in range(start, len(line)):
        if line[at] == "(":
            depth += 1
        elif line[at] == ")":
            depth -= 1
            if not depth:
                return at + 1
    return len(line)
