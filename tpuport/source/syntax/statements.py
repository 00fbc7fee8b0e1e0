"""Control flow of single statements: whether they leave a block, return or catch exceptions."""

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeGuard

from tpuport.source.syntax.module import FUNCTIONS

# Context managers known to let exceptions through. Any other may swallow one, as
# `contextlib.suppress` does, and then run the statement after the `with`.
_TRANSPARENT_ROOTS = ("torch.", "th.", "jax.", "F.", "nn.")
_TRANSPARENT_NAMES = frozenset(
    {
        "autocast",
        "device",
        "enable_grad",
        "inference_mode",
        "no_grad",
        "nullcontext",
        "open",
        "profile",
        "record_function",
        "sdpa_kernel",
        "set_grad_enabled",
        "Lock",
        "autocast_context",
        "catch_warnings",
        "closing",
        "redirect_stdout",
        "profiler_record",
    }
)


def may_swallow(statement: ast.With | ast.AsyncWith) -> bool:
    """Return whether a `with` may swallow an exception of its body and continue after it."""
    return not all(_is_transparent(item.context_expr) for item in statement.items)


def _is_transparent(expression: ast.expr) -> bool:
    if isinstance(expression, ast.Call):
        expression = expression.func
    name = ast.unparse(expression)
    return name.startswith(_TRANSPARENT_ROOTS) or name.rpartition(".")[2] in _TRANSPARENT_NAMES


def leaves(statements: Sequence[ast.stmt]) -> bool:
    """Return whether statements never reach their end, as they return, raise or leave a loop."""
    return any(_leaves(statement) for statement in statements)


def _leaves(statement: ast.stmt) -> bool:
    match statement:
        case ast.Return() | ast.Raise() | ast.Break() | ast.Continue():
            return True
        case ast.If():
            return leaves(statement.body) and leaves(statement.orelse)
        case ast.With() | ast.AsyncWith():
            return leaves(statement.body) and not may_swallow(statement)
        case ast.Try() | ast.TryStar():
            if leaves(statement.finalbody):
                return True
            tried = leaves(statement.body) or leaves(statement.orelse)
            return tried and all(leaves(handler.body) for handler in statement.handlers)
        case _:
            return False


def exits_loop(statements: Iterable[ast.stmt]) -> ast.stmt | None:
    """Return the first `break` or `continue` that belongs to a loop around these statements."""
    return next(loop_exits(statements), None)


def loop_exits(statements: Iterable[ast.stmt]) -> Iterator[ast.Break | ast.Continue]:
    """Yield every `break` and `continue` that belongs to a loop around these statements."""
    for statement in statements:
        if isinstance(statement, ast.Break | ast.Continue):
            yield statement
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            if field == "body" and isinstance(statement, ast.While | ast.For | ast.AsyncFor):
                continue  # those belong to this inner loop
            yield from loop_exits(_statements(statement, field))


def _statements(node: ast.AST, field: str) -> list[ast.stmt]:
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return []
    return [
        statement
        for inner in getattr(node, field, [])
        for statement in (inner.body if field in ("handlers", "cases") else [inner])
    ]


def returns(statements: Iterable[ast.stmt]) -> bool:
    """Return whether statements contain a `return` of the function around them."""
    return any(isinstance(node, ast.Return) for node in walk_scope(statements))


def walk_scope(code: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield every node that runs in the scope of the code, without the inside of nested ones."""
    pending = list(code)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
            pending.extend(ast.iter_child_nodes(node))


def is_ops_call(node: ast.AST) -> TypeGuard[ast.Call]:
    """Return whether a node calls `tpuport.ops.something`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "tpuport.ops"
    )
