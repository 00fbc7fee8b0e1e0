"""One parsed file: the full names, places and surroundings of its nodes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import libcst as cst
import libcst.matchers as m
from libcst.metadata import (
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    QualifiedNameProvider,
    QualifiedNameSource,
)

from tpuport.rules._torch_xla_facts import canonical, is_torch_xla

_Node = TypeVar("_Node", bound=cst.CSTNode)

# Given a node whose children are edited already, what stands in its place.
Replacement = Callable[[Any], Any]


@dataclass(frozen=True, order=True)
class Note:
    """One thing that was done or that is left to the reader.

    Attributes:
        line: The line in the file as it was.
        code: The rule that finds the place.
        text: What happened, or what to do.
    """

    line: int
    code: str
    text: str


@dataclass
class Edits:
    """What to change in one file.

    Attributes:
        replaced: A replacement for each changed node of the file.
        imports: Modules to import, each with a name from it or None.
        appended: Statements for the end of a class's body.
        helpers: Classes and functions to add, by name.
        done: The changes.
        left: What is left to the reader.
        handled: Nodes whose names of torch_xla are gone or explained.
    """

    replaced: dict[cst.CSTNode, Replacement] = field(default_factory=dict)
    imports: set[tuple[str, str | None]] = field(default_factory=set)
    helpers: dict[str, str] = field(default_factory=dict)
    done: list[Note] = field(default_factory=list)
    left: list[Note] = field(default_factory=list)
    handled: set[cst.CSTNode] = field(default_factory=set)

    def replace(self, node: cst.CSTNode, replacement: Replacement) -> None:
        """Replace a node, after what was to replace it before."""
        before = self.replaced.get(node)
        self.replaced[node] = (
            replacement if before is None else lambda updated: replacement(before(updated))
        )


class SourceFile:
    """A file's tree with what is known about its nodes.

    Args:
        module: The parsed text.
        name: The file as the user knows it.
    """

    def __init__(self, module: cst.Module, name: str = "<string>") -> None:
        self.name = name
        self._wrapper = MetadataWrapper(module)
        self.module = self._wrapper.module
        resolved = self._wrapper.resolve_many(
            [QualifiedNameProvider, PositionProvider, ParentNodeProvider]
        )
        self._names: Mapping[cst.CSTNode, Any] = resolved[QualifiedNameProvider]
        self._places: Mapping[cst.CSTNode, Any] = resolved[PositionProvider]
        self._parents: Mapping[cst.CSTNode, Any] = resolved[ParentNodeProvider]
        self._nodes: list[cst.CSTNode] = []
        self._ranges: dict[cst.CSTNode, tuple[int, int]] = {}
        self._by_kind: dict[type[cst.CSTNode], list[Any]] = {}
        self._index(self.module)

    def imported_name(self, node: cst.CSTNode) -> str | None:
        """Return the full name of an imported thing, or None."""
        inner = node
        while isinstance(inner, cst.Attribute):
            inner = inner.value
        if not isinstance(inner, cst.Name):
            return None  # to libcst `f().x` has the name of `f.x`
        found: Any = self._names.get(node, ())
        found = found() if callable(found) else found
        names = [one.name for one in found if one.source is QualifiedNameSource.IMPORT]
        return names[0] if len(names) == 1 else None

    def torch_xla_name(self, node: cst.CSTNode) -> str | None:
        """Return the name that the tables have for a thing of torch_xla, or None."""
        name = self.imported_name(node)
        return canonical(name) if name is not None and is_torch_xla(name) else None

    def line(self, node: cst.CSTNode) -> int:
        """Return the line on which a node begins."""
        return self._places[node].start.line

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return the parent of a node."""
        return self._parents.get(node)

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the parents of a node, the nearest first."""
        parent = self.parent(node)
        while parent is not None:
            yield parent
            parent = self.parent(parent)

    def around(self, node: cst.CSTNode, kind: type[_Node]) -> _Node | None:
        """Return the nearest parent of a kind."""
        return next((one for one in self.above(node) if isinstance(one, kind)), None)

    def all(self, kind: type[_Node], inside: cst.CSTNode | None = None) -> list[_Node]:
        """Return the nodes of a kind, in the order of the text."""
        if inside is not None:
            begin, end = self._ranges[inside]
            return [node for node in self._nodes[begin:end] if isinstance(node, kind)]
        if kind not in self._by_kind:
            self._by_kind[kind] = [node for node in self._nodes if isinstance(node, kind)]
        return self._by_kind[kind]

    def _index(self, node: cst.CSTNode) -> None:
        begin = len(self._nodes)
        self._nodes.append(node)
        for child in node.children:
            self._index(child)
        self._ranges[node] = (begin, len(self._nodes))

    def code(self, node: cst.CSTNode) -> str:
        """Return the text of a node on one line, without comments."""
        text = self.module.code_for_node(node.visit(_Uncommented()))  # pyright: ignore
        return " ".join(text.split())


def statement_of(node: cst.CSTNode) -> cst.BaseSmallStatement | None:
    """Return the simple statement that is alone on its line, or None."""
    if isinstance(node, cst.SimpleStatementLine) and len(node.body) == 1:
        return node.body[0]
    return None


def expression_of(node: cst.CSTNode) -> cst.BaseExpression | None:
    """Return the expression of a statement that is nothing else, or None."""
    small = statement_of(node)
    return small.value if isinstance(small, cst.Expr) else None


def own_attribute(node: cst.CSTNode | None) -> str | None:
    """Return the name of `self.name`, or None."""
    if isinstance(node, cst.Attribute) and m.matches(node.value, m.Name("self")):
        return node.attr.value
    return None


def argument(call: cst.Call, position: int, keyword: str) -> cst.BaseExpression | None:
    """Return an argument of a call by position or keyword, or None."""
    for arg in call.args:
        if arg.keyword is not None and arg.keyword.value == keyword:
            return arg.value
    plain = [arg for arg in call.args if arg.keyword is None]
    if len(plain) > position and not any(arg.star for arg in plain):
        return plain[position].value
    return None


def keywords(call: cst.Call) -> set[str]:
    """Return the names of a call's keyword arguments; "**" for those of a mapping."""
    return {arg.keyword.value if arg.keyword else arg.star for arg in call.args} - {""}


def parsed(template: str, **parts: cst.BaseExpression) -> cst.BaseExpression:
    """Parse an expression, with nodes for the names in it."""
    tree = cst.parse_expression(template)
    changed = tree.visit(_Fill(parts))
    assert isinstance(changed, cst.BaseExpression)
    return changed


def parsed_statements(template: str, config: cst.PartialParserConfig) -> Sequence[Any]:
    """Parse statements in the style of a file."""
    return cst.parse_module(template, config=config).body


class _Uncommented(cst.CSTTransformer):
    def leave_Comment(self, original_node: cst.Comment, updated_node: cst.Comment) -> Any:
        del original_node, updated_node
        return cst.RemoveFromParent()


class _Fill(cst.CSTTransformer):
    def __init__(self, parts: dict[str, cst.BaseExpression]) -> None:
        super().__init__()
        self._parts = parts

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        del original_node
        return self._parts.get(updated_node.value, updated_node)
