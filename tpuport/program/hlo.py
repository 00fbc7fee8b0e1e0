"""The text of a compiled program: its computations, instructions, shapes with their layouts.

Source: `xla/service/hlo_parser.cc` and `xla/layout.h` for the grammar; openxla.org/xla/tiled_layout
for what a tile adds.
"""

import math
import re
from dataclasses import dataclass, field
from functools import cached_property

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^  (ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"(\w+)\[([\d,<=\s]*)\](?:\{([^{}]*)\})?")
_OPERAND = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TILE = re.compile(r"T\(([\d,*]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_BITS = re.compile(r"^(?:pred|[a-z]+?(\d+))")

HBM, HOST = 0, 5


@dataclass(frozen=True)
class Array:
    """One array of a shape.

    Attributes:
        text: as HLO writes it, without its layout: `bf16[512,64]`.
        bytes: of its elements.
        padded_bytes: with what its tiles add.
        space: the memory that it is in: 0 is HBM, 1 on-chip, 2 and 4 flags, 5 the host's.
    """

    text: str
    bytes: int
    padded_bytes: int
    space: int = HBM


# An array, or a tuple of shapes.
Shape = "Array | list[Shape]"


@dataclass
class Instruction:
    """One instruction; `attributes` is what follows its operands."""

    name: str
    opcode: str
    shape: "Array | list"
    operands: list[str]
    arguments: str
    attributes: str
    is_root: bool

    @cached_property
    def op_name(self) -> str:
        """The operation of the jaxpr that it comes from, with the scopes that it is in."""
        found = _OP_NAME.search(self.attributes)
        return found[1].replace("\\'", "'").replace('\\"', '"') if found else ""

    def called(self, attribute: str) -> str:
        """The computation that `body=`, `condition=`, `calls=` or `to_apply=` names, or ""."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""


@dataclass
class Program:
    """A compiled program.

    Attributes:
        header: its first line.
        entry: the name of the computation that it begins with.
        lines: the text of each computation; `instructions` reads one.
    """

    header: str
    entry: str
    lines: dict[str, list[str]]
    _read: dict[str, list[Instruction]] = field(default_factory=dict)

    def instructions(self, name: str) -> list[Instruction]:
        """The instructions of a computation, in the order of the schedule."""
        if name not in self._read:
            parsed = (parse_instruction(line) for line in self.lines.get(name, []))
            self._read[name] = [one for one in parsed if one is not None]
        return self._read[name]

    @cached_property
    def aliased_outputs(self) -> set[tuple[int, ...]]:
        """The outputs, by their index, that take over the memory of an argument."""
        start = self.header.find("input_output_alias={")
        if start < 0:
            return set()
        body = _balanced(self.header, self.header.index("{", start), "{", "}")
        found = re.findall(r"\{([\d, ]*)\}: \(\d+", body)
        return {tuple(int(part) for part in index.split(",") if part.strip()) for index in found}


def parse_program(text: str) -> Program:
    """Split the text of a compiled program (`compiled.as_text()`) into computations.

    They are read when they are asked for: a fused one of many seldom is.
    """
    lines: dict[str, list[str]] = {}
    entry, current = "", None
    all_lines = text.splitlines()
    for line in all_lines:
        if line.startswith("  "):
            if current is not None:
                current.append(line)
            continue
        header = _HEADER.match(line)
        if header:
            current = lines.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
    return Program(all_lines[0] if all_lines else "", entry, lines)


def parse_instruction(line: str) -> Instruction | None:
    """One line of a computation; None if it is no instruction."""
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    at = found.end()
    if line[at] == "(":
        shape_text = _balanced(line, at, "(", ")")
    else:
        shape_text = line[at : line.index(" ", at)]
    at += len(shape_text) + 1
    opening = line.index("(", at)
    arguments = _balanced(line, opening, "(", ")")
    return Instruction(
        name=found[2],
        opcode=line[at:opening],
        shape=parse_shape(shape_text),
        operands=_OPERAND.findall(arguments),
        arguments=arguments[1:-1],
        attributes=line[opening + len(arguments) :],
        is_root=found[1] is not None,
    )


def parse_shape(text: str) -> "Array | list":
    """A shape: an array, or a list for a tuple."""
    return _parse_shape(text, 0)[0]


def arrays_of(shape: "Array | list") -> list[Array]:
    """The arrays of a shape."""
    if isinstance(shape, Array):
        return [shape]
    return [array for part in shape for array in arrays_of(part)]


def _parse_shape(text: str, at: int) -> "tuple[Array | list, int]":
    if text[at] != "(":
        found = _ARRAY.match(text, at)
        if found is None:  # token[] and the like hold no data
            end = next((i for i in range(at, len(text)) if text[i] in ",)"), len(text))
            return Array(text[at:end], 0, 0), end
        return _array(*found.groups()), found.end()
    parts, at = [], at + 1
    while text[at] != ")":
        skipped = re.match(r"(?:[,\s]|/\*.*?\*/)+", text[at:])
        if skipped:
            at += skipped.end()
            continue
        part, at = _parse_shape(text, at)
        parts.append(part)
    return parts, at + 1


def _array(dtype: str, dims: str, layout: str | None) -> Array:
    sizes = [int(dim.strip(" <=")) for dim in dims.split(",") if dim.strip()]
    bits = _BITS.match(dtype)
    width = 8 if bits is None or bits[1] is None else int(bits[1])
    if dtype == "token":
        width = 0
    space = _SPACE.search(layout or "")
    plain = -(-math.prod(sizes) * width // 8)
    padded = -(-math.prod(_padded(sizes, layout or "")) * width // 8)
    return Array(f"{dtype}[{dims}]", plain, padded, int(space[1]) if space else HBM)


def _padded(sizes: list[int], layout: str) -> list[int]:
    """The sizes with the minor ones filled up to whole tiles; further tiles only reorder."""
    order, _, rest = layout.partition(":")
    minor = [int(part) for part in order.split(",") if part.strip()]
    tile = _TILE.search(rest)
    if tile is None or len(minor) != len(sizes):
        return sizes
    physical = [sizes[dim] for dim in reversed(minor)]
    steps = tile[1].split(",")
    physical = [1] * (len(steps) - len(physical)) + physical
    for back, step in enumerate(reversed(steps), 1):
        if step != "*":
            physical[-back] = -(-physical[-back] // int(step)) * int(step)
    return physical


def _balanced(text: str, at: int, opening: str, closing: str) -> str:
    """The part of a text from an opening bracket to the one that closes it, both included."""
    depth, quoted = 0, False
    for index in range(at, len(text)):
        char = text[index]
        if char == '"' and text[index - 1] != "\\":
            quoted = not quoted
        elif not quoted and char == opening:
            depth += 1
        elif not quoted and char == closing:
            depth -= 1
            if not depth:
                return text[at : index + 1]
    return text[at:]
