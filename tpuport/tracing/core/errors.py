"""The line of the user's code that is running, and errors that name it."""

import ast
import linecache
import os
import sys
from dataclasses import dataclass
from types import FrameType

import torch

from tpuport.foundation.errors import PortError
from tpuport.foundation.user_frames import inside_prefixes, user_frame
from tpuport.tracing.core.active import ActiveTrace, innermost

_TRACING = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRACER = os.path.join(_TRACING, "session", "tracer.py")
_FUNCTIONS = os.path.join(_TRACING, "patches", "autograd_function.py")
_INSIDE = inside_prefixes()
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
LEAVE_TO_EAGER = "`tpuport run --eager NAME` leaves that class to eager PyTorch"


@dataclass(frozen=True)
class _Guarded:
    """The body of a `try`, or of a `with suppress(...)`, and what it catches.

    `caught` are the expressions of the classes, None for all.
    """

    start: int
    end: int
    line: int
    caught: tuple[ast.expr | None, ...]


def _running_line() -> tuple[str | None, int | None]:
    """Return the line of the traced code that is running; the trace's caller has no part in it."""
    frame = user_frame()
    inner: FrameType | None = sys._getframe(1)
    while inner is not None and inner is not frame:
        if inner.f_code.co_filename == TRACER:
            return None, None
        inner = inner.f_back
    return (None, None) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _split(place: str) -> tuple[str | None, int | None]:
    file, _, line = place.rpartition(":")
    return (file, int(line)) if line.isdigit() else (None, None)


def inside_try(error: BaseException) -> str | None:
    """Return the place of the `try` in the user's code that would catch an error raised now.

    None if there is none, or if its handler raises the error again. Classes that cannot be read
    here count as those that catch it.
    """
    frame: FrameType | None = sys._getframe(1)
    # jax runs a backward when the trace has ended: what calls jax has no part in it.
    explorer = getattr(innermost(), "explorer", None)
    is_own = explorer is not None and not explorer.alone
    ends = (TRACER,) if is_own else (TRACER, _FUNCTIONS)
    while frame is not None and frame.f_code.co_filename not in ends:
        # Functions without a table of exceptions have no `try`.
        if frame.f_code.co_exceptiontable:
            for guarded in _guarded(frame.f_code.co_filename):
                if guarded.start <= frame.f_lineno <= guarded.end:
                    if any(_catches(expr, frame, error) for expr in guarded.caught):
                        return f"{frame.f_code.co_filename}:{guarded.line}"
        frame = frame.f_back
    return None


def _catches(expr: ast.expr | None, frame: FrameType, error: BaseException) -> bool:
    """Return whether a handler of these classes, as its function names them, catches an error."""
    if expr is None:
        return True
    if any(isinstance(node, (ast.Call, ast.NamedExpr, ast.Await)) for node in ast.walk(expr)):
        return True
    code = compile(ast.Expression(expr), frame.f_code.co_filename, "eval")
    try:
        return isinstance(error, eval(code, frame.f_globals, frame.f_locals))
    except (NameError, AttributeError, TypeError, LookupError):
        return True


def _guarded(file: str) -> list[_Guarded]:
    """Return the bodies in a file, where exceptions are caught; none in tpuport and libraries."""
    if file.startswith(_INSIDE):
        return []
    lines = linecache.getlines(file)
    known = _BODIES.get(file)
    if known is None or known[0] is not lines:
        known = _BODIES[file] = (lines, _bodies(lines))
    return known[1]


# The bodies of each file, with the lines that they were found in.
_BODIES: dict[str, tuple[list[str], list[_Guarded]]] = {}


def _bodies(lines: list[str]) -> list[_Guarded]:
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        tree = None
    if not lines or tree is None:
        # Without source any function that has a table of exceptions may catch them.
        return [_Guarded(0, sys.maxsize, 0, (None,))]
    found = []
    for node in ast.walk(tree):
        caught: tuple[ast.expr | None, ...] = ()
        if isinstance(node, (ast.Try, ast.TryStar)):
            caught = tuple(h.type for h in node.handlers if not _raises_again(h))
            caught = (None,) if _leaves(node.finalbody) else caught
        elif isinstance(node, ast.With):
            caught = tuple(expr for item in node.items for expr in _suppressed(item.context_expr))
        else:
            continue
        if caught:
            end = node.body[-1].end_lineno or node.body[-1].lineno
            found.append(_Guarded(node.body[0].lineno, end, node.lineno, caught))
    return found


def _raises_again(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler always ends in a bare `raise`."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None and not _leaves(handler.body)


def _leaves(body: list[ast.stmt]) -> bool:
    """Return whether statements may leave the `try` that they belong to, so that it ends there."""
    ways = (ast.Return, ast.Break, ast.Continue)
    return any(isinstance(node, ways) for statement in body for node in ast.walk(statement))


def _suppressed(call: ast.expr) -> list[ast.expr]:
    """Return the classes of `contextlib.suppress(...)`."""
    name = getattr(call, "func", None)
    is_suppress = getattr(name, "attr", getattr(name, "id", None)) == "suppress"
    return list(call.args) if isinstance(call, ast.Call) and is_suppress else []


def error_here(
    message: str,
    *,
    code: str | None = None,
    remedy: str,
    cause: BaseException | None = None,
    place: str | None = None,
) -> PortError:
    """Return a PortError at the user's line that is running now, or at a place as `file:line`.

    It refuses nothing by itself: it is for a check of the program. What is found when the code has
    run has no line here: the tracer gives it that of the method.
    """
    file, line = _split(place) if place else _running_line()
    source = linecache.getline(file, line).strip() if file and line else None
    remedy = _for_packages(remedy, file)
    error = PortError(message, code=code, file=file, line=line, source_line=source, remedy=remedy)
    error.__cause__ = cause
    return error


def _for_packages(remedy: str, file: str | None) -> str:
    """Return a remedy with a way out for those who cannot edit the package that a file is in."""
    in_package = file is not None and any(part in file for part in _PACKAGES)
    if not in_package or "--eager" in remedy:
        return remedy
    return f"{remedy}; in code that is not yours: {LEAVE_TO_EAGER}"


# How the note of an error begins that a program raises for the values of a call.
FOR_VALUES = "raised for the values of this call by "


def port_error(
    message: str,
    *,
    code: str | None = None,
    remedy: str,
    cause: BaseException | None = None,
    place: str | None = None,
) -> PortError:
    """Return a PortError as `error_here` does, and let it refuse the trace."""
    error = error_here(message, code=code, remedy=remedy, cause=cause, place=place)
    # A bare `except` in the user's code must not turn a refusal into another path of the program.
    trace = innermost()
    if trace is not None:
        trace.recorder.refusal = trace.recorder.refusal or error
    return error


def refuse_other_memory(trace: ActiveTrace | None, tensor: torch.Tensor) -> None:
    """Refuse to give an argument other memory (`x.data = y`, `x.set_(y)`): the caller's keeps its.

    Raises:
        PortError: the tensor is an argument of the call.
    """
    if trace is not None and id(tensor) in trace.arguments:
        raise port_error(
            f"an argument of shape {tuple(tensor.shape)} gets the memory of another tensor",
            code="TPU406",
            remedy="write to it in place (x.copy_(...)), or return the other tensor; under"
            " porting(), leave the class to eager PyTorch: --eager",
        )


def refuse_flag_in_branch(trace: ActiveTrace | None) -> None:
    """Refuse to change whether a parameter requires grad where data decides if that runs."""
    if trace is not None and len(trace.regions) > 1:
        raise port_error(
            "requires_grad of a parameter is changed in a branch or loop on traced values",
            code="TPU403",
            remedy="change it before the branch, or outside of the call",
        )
