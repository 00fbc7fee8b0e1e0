"""TPU113: an exception handler around the computation of a traced tensor."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from tpuport.rules._reports import ends_in_raise
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Safety, Severity
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


class TryAroundTensor(Rule):
    """An exception handler that decides what a program computes.

    ## What it does
    Finds `except` clauses in a step that do not raise again and

    - catch what jax raises where the code needs the value of a traced tensor;
    - wait for an error of linear algebra, such as a matrix that is not positive definite;
    - catch every exception around the computation of a traced tensor.

    ## Why is this bad?
    A handler runs, or does not, while the program is traced, for all inputs at once. The errors
    that jax raises for a traced value are a `TypeError`, so the handler takes them for its own
    case and the program silently computes the fallback. And a program raises no error for its
    values: a factorization that fails gives NaN, and the fallback never runs.

    ## Fix safety
    There is no automatic fix. Decide by a value that is known, or compute both ways and select with
    `torch.where`; `torch.linalg.cholesky_ex` and `inv_ex` return the failures as a tensor.

    ## References
    https://docs.jax.dev/en/latest/errors.html
    """

    CODE = "TPU113"
    MESSAGE = "`{clause}` {what} `{code}`{then}"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SILENT

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                try:
                    scale = 1 / (torch.linalg.det(x[:, :3]) + 2)
                    x = torch.linalg.cholesky(x @ x.mT - torch.eye(3, device=x.device))
                except torch.linalg.LinAlgError:
                    x, scale = torch.eye(3, device=x.device), 1
                return x * scale
            """,
            jit_error=None,
            harm="differs",
            left="no automatic fix",
        ),
        Example(
            before="""
            import math

            import torch


            def forward(x: torch.Tensor):
                try:
                    weights = [math.exp(v) for v in x[0].tolist()]
                except Exception:
                    weights = [0.0] * 4
                return x * sum(weights)
            """,
            jit_error=None,
            harm="differs",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                try:
                    if x.sum() > -100:
                        x = x + 1
                except (TypeError, ValueError):
                    pass
                return x
            """,
            jit_error=None,
            harm="differs",
            left="no automatic fix",
        ),
    )
    CLEAN = (
        """
        import torch

        try:
            import flash_attn
        except ImportError:
            flash_attn = None


        def forward(x: torch.Tensor, table: dict, sizes: list, name: str):
            try:
                x = x + table[name]
            except KeyError:
                x = x + 1
            try:
                n = int(sizes[0])
            except Exception:
                n = x.shape[0]
            try:
                x = x.reshape(n, -1)
            except Exception as error:
                raise ValueError(f"cannot make {n} rows of {x.shape}") from error
            try:
                y = torch.linalg.solve(torch.eye(3) * 2, torch.ones(3))
            except RuntimeError:
                y = None
            try:
                x = x * 2
            finally:
                table.clear()
            return x, y
        """,
    )

    def visit_Try(self, node: ast.Try, context: Context) -> None:
        if not context.in_step(node):
            return
        for handler in node.handlers:
            danger: _Danger | None = _danger_of(node, handler, context)
            if danger is not None:
                caught = f" {ast.unparse(handler.type)}" if handler.type is not None else ""
                context.report(
                    self,
                    handler.type or handler,
                    severity=danger.severity,
                    clause=f"except{caught}",
                    what=danger.what,
                    code=danger.code,
                    then=danger.then,
                )
                return


@dataclass(frozen=True)
class _Danger:
    """A fault of a handler, as parts of a message around the code concerned."""

    what: str
    code: str
    then: str = ""
    severity: Severity = Severity.SILENT


def _danger_of(node: ast.Try, handler: ast.ExceptHandler, context: Context) -> _Danger | None:
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
            return _Danger("hides the error that tracing raises for", _text(read), then)
    if is_broad or classes & _OF_VALUES:
        call = next((n for n in expressions if _may_fail(n, context)), None)
        if call is not None:
            return _Danger("never runs for", _text(call), ": a program gives NaN and no error")
    if is_broad:
        call = next((n for n in expressions if _computes(n, context)), None)
        if call is not None:
            return _Danger("hides whatever error tracing raises for", _text(call))
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
