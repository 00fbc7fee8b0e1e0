"""Imports that the importing code can do without, such as those inside `try`."""

import ast
import functools
import sys
from types import CodeType, FrameType

from tpuport.compat.imports.missing_packages import syntax_tree

_NAMED = frozenset({"ImportError", "ModuleNotFoundError"})
_BROAD = frozenset({"Exception", "BaseException", "bare"})


def importing_frame() -> tuple[FrameType | None, bool]:
    """Return the frame of the importing code, and whether it really imports.

    `importlib.util.find_spec` and the like ask without importing.
    """
    frame: FrameType | None = sys._getframe(1)
    imports = False
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if _is_machinery(file):
            imports = imports or name == "_find_and_load_unlocked"
            if name == "find_spec" and "util" in file:
                return frame, False
        elif not file.startswith(_HERE):
            return frame, imports
        frame = frame.f_back
    return None, imports


_HERE = __file__.rpartition("compat")[0]


def _is_machinery(file: str) -> bool:
    return file.startswith("<frozen importlib") or "importlib" in file.replace("\\", "/").split("/")


def copes(frame: FrameType | None) -> bool:
    """Return whether an ImportError raised at a frame's line would be caught and survived.

    It looks at the importing line, and outwards through the modules whose import led to it, up to
    the first function. In these modules only handlers that name ImportError count: one for
    Exception is how a script reports any failure.
    """
    explicit = False
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_machinery(file) and not file.startswith(_HERE):
            if frame.f_lineno in _guarded_lines(frame.f_code, explicit):
                return True
            explicit = True
            if frame.f_code.co_name != "<module>":
                return False
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=4096)
def _guarded_lines(code: CodeType, explicit: bool) -> frozenset[int]:
    caught = _NAMED if explicit else _NAMED | _BROAD
    lines: set[int] = set()
    for node in ast.walk(syntax_tree(code.co_filename)):
        if isinstance(node, ast.Try):
            guarded = any(_is_coping(handler, caught) for handler in node.handlers)
        elif isinstance(node, ast.With):
            guarded = any(_suppresses(item.context_expr, caught) for item in node.items)
        else:
            continue
        if guarded:
            lines.update(range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1))
    return frozenset(lines)


def _is_coping(handler: ast.ExceptHandler, caught: frozenset[str]) -> bool:
    """Return whether a handler catches ImportError and does not raise again."""
    raises = any(isinstance(statement, ast.Raise) for statement in handler.body)
    return _catches(handler.type, caught) and not raises


def _catches(kind: ast.expr | None, caught: frozenset[str]) -> bool:
    if isinstance(kind, ast.Tuple):
        return any(_catches(one, caught) for one in kind.elts)
    name = "bare" if kind is None else ast.unparse(kind).rpartition(".")[2]
    return name in caught


def _suppresses(call: ast.expr, caught: frozenset[str]) -> bool:
    return (
        isinstance(call, ast.Call)
        and ast.unparse(call.func).rpartition(".")[2] == "suppress"
        and any(_catches(one, caught) for one in call.args)
    )
