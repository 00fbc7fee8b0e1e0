"""Random programs: trees of fragments, as text, and what they are called with."""

import random
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.whole_programs import grammar

_GAP = re.compile(r"\{([a-z]+)(?::(\d))?\}")
_BLOCK = re.compile(r"^( *)\{(body|loop|return)\}$")


def _put(tensor: torch.Tensor, *values: tuple[tuple[int, ...], float]) -> torch.Tensor:
    for place, value in values:
        tensor[place] = value
    return tensor


# What hostile calls make of ordinary arguments; "rows" has more of them.
_CHANGES: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "all": lambda x, y, m, k: (x, y, m | True, k),
    "none": lambda x, y, m, k: (x, y, m & False, k),
    "alternating": lambda x, y, m, k: (x, y, torch.arange(len(m)) % 2 == 0, k),
    "zeros": lambda x, y, m, k: (x * 0, y, m, k * 0),
    "ties": lambda x, y, m, k: (torch.ones_like(x), x[:1].repeat(len(x), 1), m, k),
    "large": lambda x, y, m, k: (x * 1024, y * 4096, m, k),
    "negative": lambda x, y, m, k: (-x.abs() - 0.25, -y.abs(), m, k),
    "nan": lambda x, y, m, k: (_put(x, ((1, 2), torch.nan)), _put(y, ((0, 0), torch.nan)), m, k),
    "inf": lambda x, y, m, k: (_put(x, ((1, 2), torch.inf)), _put(y, ((0, 1), -torch.inf)), m, k),
    "far": lambda x, y, m, k: (x, y, m, _put(k, ((1,), 7))),
    "before": lambda x, y, m, k: (x, y, m, _put(k, ((1,), -1), ((2,), -4))),
}
HOSTILE = ("ordinary", "rows", *_CHANGES)
_ORDINARY_ROWS = 3


@dataclass(eq=False)
class Node:
    """A fragment of a program.

    Attributes:
        kind: its kind of expression, or "statement".
        text: its text, with `{0}`, `{1}` for the parts.
        parts: the expressions in it.
        blocks: the statements of `{body0}`, `{body1}`.
    """

    kind: str
    text: str
    parts: list["Node"] = field(default_factory=list)
    blocks: list[list["Node"]] = field(default_factory=list)

    def render(self) -> str:
        """Return its text."""
        text = self.text
        for index, part in enumerate(self.parts):
            text = text.replace(f"{{{index}}}", part.render())
        for index, block in enumerate(self.blocks):
            text = re.sub(
                rf"^( *)<{index}>$",
                lambda gap, block=block: textwrap.indent(_lines(block), gap[1]),
                text,
                flags=re.MULTILINE,
            )
        return text

    def replaced(self, old: "Node", new: list["Node"]) -> list["Node"]:
        """Return this tree with other nodes in the place of one."""
        if self is old:
            return new
        parts = [one for part in self.parts for one in part.replaced(old, new)]
        blocks = [[n for one in block for n in one.replaced(old, new)] for block in self.blocks]
        return [replace(self, parts=parts, blocks=blocks)]

    def walk(self) -> Iterator["Node"]:
        """Yield it and all nodes below."""
        yield self
        for block in self.blocks:
            for one in block:
                yield from one.walk()
        for part in self.parts:
            yield from part.walk()


def _lines(block: list[Node]) -> str:
    return "\n".join(node.render() for node in block) or "pass"


@dataclass(frozen=True)
class Call:
    """One call: what its inputs are like, and the seed that they are made from."""

    kind: str
    seed: int

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Return x, y, m and k, made of small fractions that float32 holds exactly."""
        draw = torch.Generator().manual_seed(self.seed)
        rows = _ORDINARY_ROWS + 2 * (self.kind == "rows")
        x = torch.randint(-8, 9, (rows, 4), generator=draw) / 4
        y = torch.randint(-8, 9, (rows, 4), generator=draw) / 4
        m = torch.randint(0, 2, (rows,), generator=draw).bool()
        k = torch.randint(0, 3, (rows,), generator=draw)
        return _CHANGES.get(self.kind, lambda *given: given)(x, y, m, k)


@dataclass
class Program:
    """A module's statements, and its calls."""

    seed: int
    start: list[Node]
    body: list[Node]
    end: str
    calls: list[Call]
    train: bool
    verify: bool

    def source(self) -> str:
        """Return the text of the module."""
        lines = [*(node.render() for node in (*self.start, *self.body)), self.end]
        return grammar.HEAD + grammar.FORWARD + textwrap.indent("\n".join(lines), " " * 8) + "\n"

    def script(self) -> str:
        """Return the module and its calls as a script."""
        calls = "".join(
            f"# {c.kind} (seed {c.seed}): {_shown(c.arguments())}\n" for c in self.calls
        )
        head = f"# seed {self.seed}, train={self.train}\n"
        return f"{head}{self.source()}\n\n{calls}"


def _shown(arguments: Any) -> str:
    return ", ".join(str(one.tolist()) for one in arguments)


class Maker:
    """Makes the program of a seed."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self._return = grammar.RETURNS[0]
        self._count = 0

    def program(self) -> Program:
        """Return the program."""
        draw = self.random
        self._return = draw.choice(grammar.RETURNS)
        body = [self._statement(2) for _ in range(draw.choice((1, 1, 2, 2, 3)))]
        kinds = ["ordinary" if draw.random() < 0.8 else draw.choice(HOSTILE)]
        kinds += draw.sample(HOSTILE, 2)
        if draw.random() < 0.8:  # each size compiles one more program
            kinds = ["none" if kind == "rows" else kind for kind in kinds]
        calls = [Call(kind, draw.randrange(10**6)) for kind in kinds]
        start = [Node("statement", text) for text in grammar.START]
        train, verify = draw.random() < 0.5, draw.random() < 0.1
        return Program(self.seed, start, body, self._return, calls, train, verify)

    def _statement(self, depth: int, *, loop: bool = False) -> Node:
        draw = self.random
        if loop and draw.random() < 0.3:
            return self._filled("statement", draw.choice(grammar.LEAVING), depth)
        if depth and draw.random() < 0.12 * depth:
            # Each way out of a loop doubles the paths of a trace.
            blocks = [b for b in grammar.BLOCKS if depth == 2 or "{return}" not in b]
            return self._filled("statement", draw.choice(blocks), depth, loop=loop)
        return self._filled("statement", draw.choice(grammar.SIMPLE), depth)

    def _block(self, gap: str, depth: int, *, loop: bool) -> list[Node]:
        if gap == "return":
            return [Node("statement", self._return)]
        inside = loop or gap == "loop"
        count = self.random.choice((1, 1, 2))
        return [self._statement(depth - 1, loop=inside) for _ in range(count)]

    def _expression(self, kind: str, depth: int) -> Node:
        draw = self.random
        deeper = grammar.DEEPER.get(kind)
        if deeper is None or depth <= 0 or draw.random() < 0.45:
            return Node(kind, draw.choice(grammar.LEAVES[kind]))
        return self._filled(kind, draw.choice(deeper), depth - 1)

    def _filled(self, kind: str, template: str, depth: int, *, loop: bool = False) -> Node:
        node, shared = Node(kind, ""), dict[str, int]()
        self._count += 1
        lines = []
        for line in template.replace("$", str(self._count)).split("\n"):
            block = _BLOCK.match(line)
            if block:
                node.blocks.append(self._block(block[2], depth, loop=loop))
                lines.append(f"{block[1]}<{len(node.blocks) - 1}>")
                continue

            def fill(gap: re.Match[str]) -> str:
                name, tag = gap[1], gap[2]
                if tag and tag in shared:
                    return f"{{{shared[tag]}}}"
                node.parts.append(self._expression(name, min(depth, 2)))
                if tag:
                    shared[tag] = len(node.parts) - 1
                return f"{{{len(node.parts) - 1}}}"

            lines.append(_GAP.sub(fill, line))
        node.text = "\n".join(lines)
        return node
