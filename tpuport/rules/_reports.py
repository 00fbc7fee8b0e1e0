"""Branches that only report: they raise or log, and compute nothing."""

import ast
from collections.abc import Sequence

from tpuport.source.syntax.statements import exits_loop, returns

_LOG_METHODS = frozenset(
    {
        "critical",
        "debug",
        "error",
        "exception",
        "fatal",
        "info",
        "log",
        "trace",
        "warn",
        "warn_explicit",
        "warning",
        "warning_advice",
        "warning_once",
        "success",
        "write",
    }
)
_LOG_OWNERS = ("log", "logger", "logging", "warnings", "tqdm")


def is_log(statement: ast.stmt) -> bool:
    """Return whether a statement only prints, warns or logs, as `logger.info(...)` does."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Name(id=name))):
            return name in ("print", "warn", "warn_once") or name.startswith("rank_zero_")
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr=method))):
            return method in _LOG_METHODS and _is_log_owner(owner)
        case _:
            return False


def _is_log_owner(owner: ast.expr) -> bool:
    match owner:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.lower().strip("_") in _LOG_OWNERS
        case ast.Call(func=ast.Attribute(attr="getLogger") | ast.Name(id="getLogger")):
            return True
        case _:
            return False


# Builtins that change nothing, for what a log line says.
_HARMLESS = frozenset({"float", "int", "len", "repr", "round", "str", "tuple", "type"})
# Methods of tensors, numbers and text that change nothing; those of other objects may.
_PURE = frozenset({"abs", "item", "max", "mean", "min", "norm", "size", "sum", "tolist", "format"})


def is_harmless_log(statement: ast.stmt) -> bool:
    """Return whether a statement only logs, and what it says is computed without an effect.

    Calls of functions of the user may have one. It may log under a test, as in every tenth round.
    """
    match statement:
        case ast.If(test=test, body=body, orelse=orelse):
            return _is_harmless(test) and all(map(is_harmless_log, [*body, *orelse]))
        case ast.Expr(value=ast.Call(args=args, keywords=keywords)):
            return is_log(statement) and all(
                map(_is_harmless, [*args, *(k.value for k in keywords)])
            )
        case _:
            return False


def _is_harmless(node: ast.expr) -> bool:
    """Return whether an expression calls nothing but what is known to change nothing."""
    for part in ast.walk(node):
        match part:
            case ast.Call(func=ast.Name(id=name)) if name in _HARMLESS:
                pass
            case ast.Call(func=ast.Attribute(attr=name)) if name in _PURE:
                pass
            case ast.Call() | ast.NamedExpr() | ast.Await() | ast.Yield() | ast.YieldFrom():
                return False
            case _:
                pass
    return True


def leading_logs(statements: Sequence[ast.stmt]) -> int:
    """Return the number of statements at the start that only log."""
    count = 0
    while count < len(statements) and is_log(statements[count]):
        count += 1
    return count


def ends_in_raise(statements: Sequence[ast.stmt]) -> bool:
    """Return whether statements always end by raising at their last line."""
    if not statements or not isinstance(statements[-1], ast.Raise):
        return False
    return not returns(statements) and exits_loop(statements) is None


def is_report(node: ast.If) -> bool:
    """Return whether a side of a branch raises, or the branch starts by logging."""
    return ends_in_raise(node.body) or leading_logs(node.body) > 0 or ends_in_raise(node.orelse)
