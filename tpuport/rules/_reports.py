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


def is_harmless_log(statement: ast.stmt) -> bool:
    """Return whether a statement only logs, and what it says is computed without an effect.

    Calls of the user's own functions may have any.
    """
    if not is_log(statement):
        return False
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Call)
    said = [*statement.value.args, *(keyword.value for keyword in statement.value.keywords)]
    calls = [one for part in said for one in ast.walk(part) if isinstance(one, ast.Call)]
    names = [one.func.id if isinstance(one.func, ast.Name) else "" for one in calls]
    return _HARMLESS.issuperset(names) and not any(
        isinstance(one, ast.NamedExpr | ast.Await) for part in said for one in ast.walk(part)
    )


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
