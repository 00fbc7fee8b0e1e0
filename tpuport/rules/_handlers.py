"""Exception handlers around traced code, and what each does to the program."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from tpuport.rules._reports import ends_in_raise
from tpuport.source.rewrite.finding import Severity
from tpuport.source.rewrite.matching import Context, quote
from tpuport.source.syntax.module import FUNCTIONS
from tpuport.source.syntax.statements import walk_scope

_BROAD = frozenset({"Exception", "BaseException"})
# jax's errors for traced values are subclasses of these.
_OF_TRACERS = frozenset({"TypeError"})
# Linear algebra raises these for some values, such as a singular matrix.
_OF_VALUES = frozenset({"RuntimeError", "LinAlgError", "_LinAlgError"})
_READS = frozenset({"item", "tolist", "numpy", "cpu"})
_NUMBERS = frozenset({"float", "int", "bool", "complex"})
_FACTORIZATIONS = frozenset({"cholesky", "inverse", "solve", "inv", "pinverse", "lstsq"})


@dataclass(frozen=True)
class Danger:
    """A fault of a handler, as parts of a message around the code concerned."""

    what: str
    code: str
    then: str = ""
    severity: Severity = Severity.SILENT


def danger_of(node: ast.Try, handler: ast.ExceptHandler, context: Context) -> Danger | None:
    """Return what a handler does to the program; None if it is harmless or nothing is known."""
    classes = _classes(handler)
    if ends_in_raise(handler.body):
        return None
    body = list(_guarded(node))
    expressions = [part for part in body if isinstance(part, ast.expr)]
    is_broad = bool(classes & _BROAD)
    if is_broad or classes & _OF_TRACERS:
        read = next(filter(None, (_needed(n, context) for n in body)), None)
        if read is not None:
            then = ", and its fallback becomes the program"
            return Danger("hides the error that tracing raises for", _text(read), then)
    if is_broad or classes & _OF_VALUES:
        call = next((n for n in expressions if _may_fail(n, context)), None)
        if call is not None:
            return Danger("never runs for", _text(call), ": a program gives NaN and no error")
    if is_broad:
        call = next((n for n in expressions if _computes(n, context)), None)
        if call is not None:
            return Danger("hides whatever error tracing raises for", _text(call))
    return None


def _text(node: ast.expr) -> str:
    return quote(ast.unparse(node))


def _classes(handler: ast.ExceptHandler) -> frozenset[str]:
    """Return the last parts of the names of the exceptions that a handler catches."""
    match handler.type:
        case None:
            return frozenset({"BaseException"})
        case ast.Tuple(elts=parts):
            return frozenset(ast.unparse(part).rpartition(".")[2] for part in parts)
        case single:
            return frozenset({ast.unparse(single).rpartition(".")[2]})


def _guarded(node: ast.Try) -> Iterator[ast.AST]:
    """Return the nodes that a `try` guards, in source order, without those of an inner `try`."""
    skipped: set[ast.AST] = set()
    found = [
        inner
        for inner in walk_scope(node.body)
        if not isinstance(inner, (*FUNCTIONS, ast.Lambda, ast.ClassDef))
    ]
    for inner in found:
        if isinstance(inner, ast.Try) and inner.handlers:
            skipped.update(each for part in inner.body for each in ast.walk(part))
    kept = [inner for inner in found if inner not in skipped]
    return iter(sorted(kept, key=lambda n: (getattr(n, "lineno", 0), getattr(n, "col_offset", 0))))


def _needed(node: ast.AST, context: Context) -> ast.expr | None:
    """Return the expression whose traced value is needed here, which makes tracing raise."""
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            return test if context.asks_traced(test) else None
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=[]) if name in _READS:
            return node if context.is_traced(value) else None
        case ast.Call(func=ast.Name(id=name), args=[argument]) if name in _NUMBERS:
            return node if context.is_traced(argument) else None
        case _:
            return None


def _may_fail(node: ast.AST, context: Context) -> bool:
    """Return whether eager PyTorch raises here for some values of a traced tensor."""
    if not isinstance(node, ast.Call) or not context.is_traced(node):
        return False
    name = context.name(node.func)
    if name is not None:
        root, _, last = name.rpartition(".")
        return root in ("torch", "torch.linalg") and last in _FACTORIZATIONS
    return isinstance(node.func, ast.Attribute) and node.func.attr in _FACTORIZATIONS


def _computes(node: ast.AST, context: Context) -> bool:
    return isinstance(node, ast.Call) and context.is_traced(node)
