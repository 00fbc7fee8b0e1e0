"""A `try` whose handler repairs a masked write that got the wrong number of rows.

A program cannot raise for a number that is known only when it runs. The same write does what the
handler would do if it drops the rows that are too many. Where the handler gives a name another
constant, the program chooses the constant by the number of rows.
"""

import ast
import copy
from collections.abc import Sequence
from dataclasses import dataclass

from tpuport.rules._expressions import OPS
from tpuport.rules._reports import is_log
from tpuport.source.rewrite.finding import NotFixable
from tpuport.source.rewrite.matching import Context

_CAUGHT = ("Exception", "RuntimeError", "BaseException")


@dataclass(frozen=True)
class Guard:
    """The `try` around a masked write, and the names that tell whether the write succeeded.

    Attributes:
        statement: The `try`.
        target: The subscript that is written to.
        flags: For each name the constant that the handler assigns.
    """

    statement: ast.Try
    target: ast.Subscript
    flags: dict[str, str]

    def lines(self) -> list[str]:
        """Return statements to run after the `try`."""
        tensor, mask = ast.unparse(self.target.value), ast.unparse(self.target.slice)
        return [
            f"{name} = {OPS}.mismatched({tensor}, {mask}, {name}, {value})"
            for name, value in self.flags.items()
        ]


def guard_of(write: ast.Assign | ast.AugAssign, context: Context) -> Guard | None:
    """Return the `try` that a masked write is in, if it could catch a wrong number of rows.

    Raises:
        NotFixable: the handlers are not understood.
    """
    around = _try_around(write, context)
    if around is None or not around.handlers:
        return None
    refusal = NotFixable("an except clause may handle a number of rows that does not fit")
    if not isinstance(write, ast.Assign) or around.body[0] is not write:
        raise refusal
    if len(around.handlers) != 1 or around.orelse or around.finalbody:
        raise refusal
    function = context.module.function(write)
    target = write.targets[0]
    if function is None or not isinstance(target, ast.Subscript):
        raise refusal
    handler = around.handlers[0]
    if handler.type is not None and ast.unparse(handler.type) not in _CAUGHT:
        raise refusal
    before = _constants(around.body[1:])
    after = _Repair(write, target).flags(handler.body)
    live = context.flow(function).after.get(around, frozenset())
    if before is None or after is None:
        raise refusal
    if any(name in live for name in after[1]) or set(before) != set(after[0]):
        raise refusal
    return Guard(around, target, {n: v for n, v in after[0].items() if v != before[n]})


def _try_around(node: ast.stmt, context: Context) -> ast.Try | None:
    inner: ast.AST = node
    for parent in context.module.ancestors(node):
        if isinstance(parent, ast.Try) and inner in parent.body:
            return parent
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return None
        inner = parent
    return None


def _constants(statements: Sequence[ast.stmt]) -> dict[str, str] | None:
    """Return the constants that statements give to names, if they do nothing else."""
    found: dict[str, str] = {}
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant() as value):
                found[name] = ast.unparse(value)
            case _:
                return None
    return found


class _Repair:
    """Reader of a handler that writes again, with as many rows as the mask selects."""

    def __init__(self, write: ast.Assign, target: ast.Subscript) -> None:
        self.write, self.target = write, target
        self.values: dict[str, ast.expr] = {}

    def flags(self, statements: Sequence[ast.stmt]) -> tuple[dict[str, str], set[str]] | None:
        """Return the constants that the handler assigns, and the other names that it binds."""
        found: dict[str, str] = {}
        repaired = 0
        for statement in statements:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant() as value):
                    found[name] = ast.unparse(value)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.values[name] = self._resolved(value)
                case ast.Assign(targets=[ast.Subscript() as target], value=value):
                    repaired += self._is_same(target, value)
                case _ if not is_log(statement):
                    return None
        return (found, set(self.values)) if repaired == 1 else None

    def _is_same(self, target: ast.Subscript, value: ast.expr) -> bool:
        if ast.unparse(_plain(target)) != ast.unparse(_plain(self.target)):
            return False
        cut = f"[:{ast.unparse(self.target.slice)}.sum()]"
        return ast.unparse(_plain(self._resolved(value))).replace(cut, "") == ast.unparse(
            _plain(self.write.value)
        )

    def _resolved(self, value: ast.expr) -> ast.expr:
        """Return a value with the names that the handler has bound replaced by their values."""
        return _Substitute(self.values).visit(copy.deepcopy(value))


class _Substitute(ast.NodeTransformer):
    def __init__(self, values: dict[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.values.get(node.id, node))


class _Unmask(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        ours = ast.unparse(node.func) == f"{OPS}.masked"
        return node.args[0] if ours else node


def _plain(node: ast.expr) -> ast.expr:
    """Return an expression as it was before rewriting."""
    return _Unmask().visit(copy.deepcopy(node))
