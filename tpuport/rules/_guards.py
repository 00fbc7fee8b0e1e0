"""The branches around a write to `self`, and what they test before it happens."""

import ast
from collections.abc import Iterator

from tpuport.rules._state import Write, attribute_of, self_name
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.module import FUNCTIONS
from tpuport.source.syntax.statements import leaves

_SIZES = (ast.Gt, ast.Lt, ast.GtE, ast.LtE, ast.NotEq)


def guards(node: ast.stmt, context: Context) -> Iterator[ast.If]:
    """Yield the `if` statements of the same function that a statement is a side of."""
    child: ast.AST = node
    for parent in context.module.ancestors(node):
        if isinstance(parent, FUNCTIONS):
            return
        if isinstance(parent, ast.If) and child is not parent.test:
            yield parent
        child = parent


def lazy_guard(write: Write, context: Context) -> ast.If | None:
    """Return the `if` that lets a write happen only while its attribute is missing."""
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
    """Return whether the method has already returned if the attribute is set."""
    owner = self_name(write.method)
    return owner is not None and any(
        isinstance(statement, ast.If)
        and leaves(statement.body)
        and write.attribute in missing(negated(statement.test), owner)
        for statement in write.method.body
        if statement.lineno < write.node.lineno
    )


def negated(test: ast.expr) -> ast.expr:
    """Return the opposite of a test."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Compare(left=left, ops=[ast.IsNot()], comparators=comparators):
            return ast.Compare(left, [ast.Is()], comparators)
        case _:
            return ast.UnaryOp(ast.Not(), test)


def missing(test: ast.expr, owner: str) -> set[str]:
    """Return the attributes that a test, in any operand, asks to be None, absent or false."""
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
    """Return whether a branch sets the flag that its test asks for, as `self.ready = True` does."""
    return any(
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Constant)
        and bool(statement.value.value)
        and any(attribute_of(target, owner) in asked for target in statement.targets)
        for statement in guard.body
    )


def _holds(statements: list[ast.stmt], node: ast.stmt) -> bool:
    return any(inner is node for statement in statements for inner in ast.walk(statement))


def may_compare_sizes(test: ast.expr) -> bool:
    """Return whether a test compares anything by size: a quick look before `compares_size`."""
    return any(
        isinstance(part, ast.Compare) and any(isinstance(op, _SIZES) for op in part.ops)
        for part in ast.walk(test)
    )


def compares_size(test: ast.expr, written: set[str], owner: str) -> bool:
    """Return whether a test compares the size of an attribute, or an attribute as a size."""
    return any(
        isinstance(compare, ast.Compare)
        and any(isinstance(op, _SIZES) for op in compare.ops)
        and any(_sized(part, owner) in written for part in [compare.left, *compare.comparators])
        for compare in ast.walk(test)
    )


def _sized(node: ast.expr, owner: str) -> str | None:
    """Return the attribute that a side of a comparison is, or is the size of."""
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
    """Return whether a write makes its attribute longer: `self.x = torch.cat([self.x, y])`."""
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
