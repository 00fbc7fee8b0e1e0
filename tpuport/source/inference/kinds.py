"""Kinds of expressions: traced, or known to Python while tracing (host)."""

import ast
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from tpuport.source.inference.torch_facts import HOST_ATTRIBUTES, HOST_BUILTINS, HOST_METHODS
from tpuport.source.inference.values import Kind
from tpuport.source.syntax.module import Module
from tpuport.source.syntax.statements import is_ops_call

TRACED, HOST, UNKNOWN = Kind.TRACED, Kind.HOST, Kind.UNKNOWN


class Kinds(Protocol):
    """The oracle's answers for one parsed file."""

    def kind(self, node: ast.expr) -> Kind:
        """Return the kind of an expression; UNKNOWN where there is no proof."""
        ...

    def is_boolean(self, node: ast.expr) -> bool:
        """Return whether an expression is known to be a traced tensor of dtype bool."""
        ...

    def grows(self, loop: ast.stmt) -> bool:
        """Return whether a trace found that a loop makes a tensor longer."""
        ...


class Oracle(Protocol):
    """Source of the kinds of a file's expressions; bound again after each pass of rewriting."""

    def bind(self, module: Module) -> Kinds:
        """Return the answers for one parsed file."""
        ...


def structural_kind(node: ast.expr) -> Kind:
    """Return HOST where the form of an expression alone proves it, else UNKNOWN."""
    match node:
        case ast.Attribute(attr=attribute):
            return HOST if attribute in HOST_ATTRIBUTES else UNKNOWN
        case ast.Call(func=ast.Attribute(attr=attribute)):
            return HOST if attribute in HOST_METHODS else UNKNOWN
        case ast.UnaryOp(operand=operand):
            return structural_kind(operand)
        case ast.Subscript(value=left, slice=right) | ast.BinOp(left=left, right=right):
            return _all_host([left, right])
        case ast.Compare(left=left, comparators=comparators):
            return HOST if is_surely_host(node) else _all_host([left, *comparators])
        case ast.BoolOp(values=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
            return _all_host(parts)
        case _:
            return HOST if is_surely_host(node) else UNKNOWN


def is_surely_host(node: ast.expr) -> bool:
    """Return whether Python knows an expression even where sizes depend on data."""
    match node:
        case ast.Constant() | ast.JoinedStr() | ast.Lambda():
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in HOST_BUILTINS
        case ast.Call(func=ast.Attribute(attr="passes" | "grows")):
            return is_ops_call(node)
        case ast.Attribute(attr=attribute):
            return attribute in {"dtype", "device", "training", "requires_grad"}
        case ast.Compare(ops=operators) if all(
            isinstance(o, ast.Is | ast.IsNot) for o in operators
        ):
            return True
        case ast.Compare(left=left, comparators=comparators):
            return all(is_surely_host(part) for part in [left, *comparators])
        case ast.UnaryOp(operand=operand):
            return is_surely_host(operand)
        case ast.BoolOp(values=values):
            return all(is_surely_host(value) for value in values)
        case _:
            return False


def _all_host(nodes: Iterable[ast.expr]) -> Kind:
    return HOST if all(structural_kind(node) is HOST for node in nodes) else UNKNOWN


def truth_tests(test: ast.expr) -> list[ast.expr]:
    """Return the operands whose truth value Python needs to evaluate `test`, left to right."""
    match test:
        case ast.BoolOp(values=values):
            return [leaf for value in values for leaf in truth_tests(value)]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return truth_tests(operand)
        case _:
            return [test]


@dataclass(frozen=True)
class Site:
    """A place where Python needed the concrete value of a traced one.

    Attributes:
        line: The line of the user's file.
        column: The column there as code objects count it (UTF-8 bytes from 0); None for any.
    """

    line: int
    column: int | None = None


class ObservedKinds:
    """Kinds observed by a trace: the places where Python needed the value of a traced one.

    Any expression at a site is TRACED, one whose form proves it is HOST, and all others are
    UNKNOWN. UNKNOWN is no obstacle to a fix, because rewritten code decides when it runs. On a line
    that an earlier pass has rewritten, a site matches every column.

    Args:
        sites: Sites, (line, column) pairs, or bare lines.
    """

    def __init__(self, sites: Collection[Site | tuple[int, int | None] | int]) -> None:
        self.sites = frozenset(_site(site) for site in sites)

    def bind(self, module: Module) -> Kinds:
        """Return the answers for one parsed file, whose lines may have moved since the trace."""
        return _Observed(module, self.sites)


def _site(site: Site | tuple[int, int | None] | int) -> Site:
    if isinstance(site, Site):
        return site
    return Site(site) if isinstance(site, int) else Site(*site)


class _Observed:
    def __init__(self, module: Module, sites: frozenset[Site]) -> None:
        self.module, self.sites = module, sites

    def kind(self, node: ast.expr) -> Kind:
        match node:
            case ast.Call(func=ast.Name(id="len")) if self._matches(node):
                return TRACED  # Of a tensor whose size depends on data.
            case ast.Call(func=ast.Name(id="range")) if self._is_whole_line(node):
                return TRACED  # Of a loop that makes a tensor longer.
            case _ if is_surely_host(node):
                return HOST
            case _:
                pass
        return TRACED if self._is_site(node) else structural_kind(node)

    def is_boolean(self, node: ast.expr) -> bool:
        # A trace stops at truth values and numbers, never at masks.
        return False

    def _is_site(self, node: ast.expr) -> bool:
        # CPython attributes a jump to the test, to one of its operands or to the statement.
        places: list[ast.AST] = [node, *truth_tests(node)]
        parent = self.module.parents.get(node)
        if isinstance(parent, ast.If | ast.While | ast.IfExp | ast.Assert) and parent.test is node:
            places.append(parent)
        if isinstance(parent, ast.For) and parent.iter is node:
            places.append(parent)
        if isinstance(parent, ast.UnaryOp | ast.BoolOp):
            places.append(parent)
        return any(self._matches(place) for place in places)

    def grows(self, loop: ast.stmt) -> bool:
        return self._is_whole_line(loop)

    def _is_whole_line(self, node: ast.AST) -> bool:
        line, _ = self.module.place(node)
        return Site(line) in self.sites

    def _matches(self, node: ast.AST) -> bool:
        line, column = self.module.place(node)
        return any(
            site.line == line and (site.column is None or column is None or site.column == column)
            for site in self.sites
        )
