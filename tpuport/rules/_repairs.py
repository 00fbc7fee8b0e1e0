"""A `try` whose handler repairs a masked write that got the wrong number of rows.

In a program nothing can be raised for a number that only the running program knows. What the
handler would do is done by the same write if it only cuts off the rows that are too many; what it
tells the code after it, by giving a name another constant, is chosen by the number of rows.
"""

import ast
import copy
from collections.abc import Sequence
from dataclasses import dataclass

from tpuport.rules._expressions import OPS
from tpuport.rules._reports import is_log
from tpuport.source.engine import Context
from tpuport.source.finding import NotFixable

_CAUGHT = ("Exception", "RuntimeError", "BaseException")


@dataclass(frozen=True)
class Guard:
    """The `try` around a masked write, and the names that tell whether the write went well.

    Attributes:
        statement: The `try`.
        target: What is written to.
        flags: For each name the constant that the handler gives it.
    """

    statement: ast.Try
    target: ast.Subscript
    flags: dict[str, str]

    def lines(self) -> list[str]:
        """Statements to run after the `try`."""
        tensor, mask = ast.unparse(self.target.value), ast.unparse(self.target.slice)
        return [
            f"{name} = {OPS}.mismatched({tensor}, {mask}, {name}, {value})"
            for name, value in self.flags.items()
        ]


def guard_of(write: ast.Assign | ast.AugAssign, context: Context) -> Guard | None:
    """The `try` that a masked write stands in, if that could catch a wrong number of rows.

    Raises:
        NotFixable: what its handlers would do then is not understood.
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
    """The constants that statements give to names, if they do nothing else."""
    found: dict[str, str] = {}
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant() as value):
                found[name] = ast.unparse(value)
            case _:
                return None
    return found


class _Repair:
    """Reads a handler that writes again, with as many rows as the mask selects."""

    def __init__(self, write: ast.Assign, target: ast.Subscript) -> None:
        self.write, self.target = write, target
        self.values: dict[str, ast.expr] = {}

    def flags(self, statements: Sequence[ast.stmt]) -> tuple[dict[str, str], set[str]] | None:
        """The constants that the handler assigns, and the other names that it binds."""
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
        """With the names that the handler has bound replaced by what they stand for."""
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
    """An expression as it was before rewriting."""
    return _Unmask().visit(copy.deepcopy(node))
"""The branches around a write to `self`: what they ask before it happens."""

import ast
from collections.abc import Iterator

from tpuport.rules._state import Write, attribute_of, self_name
from tpuport.source.engine import Context
from tpuport.source.module import FUNCTIONS
from tpuport.source.statements import leaves

_SIZES = (ast.Gt, ast.Lt, ast.GtE, ast.LtE, ast.NotEq)


def guards(node: ast.stmt, context: Context) -> Iterator[ast.If]:
    """The `if` statements around a statement of the same function whose side it stands on."""
    child: ast.AST = node
    for parent in context.module.ancestors(node):
        if isinstance(parent, FUNCTIONS):
            return
        if isinstance(parent, ast.If) and child is not parent.test:
            yield parent
        child = parent


def lazy_guard(write: Write, context: Context) -> ast.If | None:
    """The `if` that lets a write happen only as long as its attribute is not there yet."""
    owner = self_name(write.method)
    if owner is None:
        return None
    for guard in guards(write.node, context):
        asked = missing(guard.test, owner)
        on_body = _holds(guard.body, write.node)
        if on_body and (write.attribute in asked or _turns_on(guard, asked, owner)):
            return guard
        if not on_body and write.attribute in missing(negated(guard.test), owner):
            return guard
    return None


def lazy_return(write: Write) -> bool:
    """Whether the method has already returned where its attribute is there."""
    owner = self_name(write.method)
    return owner is not None and any(
        isinstance(statement, ast.If)
        and leaves(statement.body)
        and write.attribute in missing(negated(statement.test), owner)
        for statement in write.method.body
        if statement.lineno < write.node.lineno
    )


def negated(test: ast.expr) -> ast.expr:
    """The opposite of a test."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Compare(left=left, ops=[ast.IsNot()], comparators=comparators):
            return ast.Compare(left, [ast.Is()], comparators)
        case _:
            return ast.UnaryOp(ast.Not(), test)


def missing(test: ast.expr, owner: str) -> set[str]:
    """The attributes that a test asks to be None, absent or false, by any of its operands."""
    match test:
        case ast.BoolOp(values=values):
            return {name for value in values for name in missing(value, owner)}
        case ast.Compare(
            left=left, ops=[ast.Is() | ast.Eq()], comparators=[ast.Constant(value=None | False)]
        ):
            return _one(attribute_of(left, owner))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _absent(operand, owner) | _one(attribute_of(operand, owner))
        case _:
            return set()


def _absent(test: ast.expr, owner: str) -> set[str]:
    match test:
        case ast.Call(
            func=ast.Name(id="hasattr" | "getattr"),
            args=[ast.Name(id=name), ast.Constant(value=str(attribute)), *_],
        ) if name == owner:
            return {attribute}
        case _:
            return set()


def _one(name: str | None) -> set[str]:
    return set() if name is None else {name}


def _turns_on(guard: ast.If, asked: set[str], owner: str) -> bool:
    """Whether a branch sets the flag that it asks for, as `self.ready = True` does."""
    return any(
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Constant)
        and bool(statement.value.value)
        and any(attribute_of(target, owner) in asked for target in statement.targets)
        for statement in guard.body
    )


def _holds(statements: list[ast.stmt], node: ast.stmt) -> bool:
    return any(inner is node for statement in statements for inner in ast.walk(statement))


def compares_size(test: ast.expr, written: set[str], owner: str) -> bool:
    """Whether a test compares sizes and one of them is an attribute, or the size of one."""
    return any(
        isinstance(compare, ast.Compare)
        and any(isinstance(op, _SIZES) for op in compare.ops)
        and any(_sized(part, owner) in written for part in [compare.left, *compare.comparators])
        for compare in ast.walk(test)
    )


def _sized(node: ast.expr, owner: str) -> str | None:
    """The attribute that is, or whose size is, a side of a comparison."""
    match node:
        case ast.Subscript(value=ast.Attribute(value=inner, attr="shape")):
            return _sized(inner, owner)
        case ast.Call(func=ast.Attribute(value=inner, attr="size" | "numel")):
            return _sized(inner, owner)
        case ast.Call(func=ast.Name(id="len"), args=[inner]):
            return _sized(inner, owner)
        case _:
            return attribute_of(node, owner)


def is_growing(write: Write) -> bool:
    """Whether a write makes its attribute longer, as `self.x = torch.cat([self.x, y])` does."""
    owner = self_name(write.method)
    if owner is None or write.way != "bind" or write.value is None:
        return False
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("cat", "concat", "concatenate")
        and any(attribute_of(part, owner) == write.attribute for part in ast.walk(node))
        for node in ast.walk(write.value)
    )
