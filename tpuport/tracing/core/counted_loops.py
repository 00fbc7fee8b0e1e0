"""Loops whose items are known by their numbers: over ranges, and rows of tensors."""

import ast
import functools
import linecache
from types import FrameType, ModuleType
from typing import Any

from tpuport.tracing.core.tensor import TracedTensor

# Attributes and methods of a tensor that give no tensors.
_NO_ROWS = {"shape", "size", "stride", "tolist", "item", "numpy"}


def is_counted(frame: FrameType, line: int) -> bool:
    """Return whether a loop that a frame runs seems to be over a range or rows of a traced tensor.

    Which it is shows when the rewritten loop runs.
    """
    text = linecache.getline(frame.f_code.co_filename, line)
    if "range(" in text:
        return True
    over = _over(text.strip())
    return over is not None and _has_rows(over, frame)


@functools.cache
def _over(text: str) -> ast.expr | None:
    """Return what a line `for x in y:` goes over; None for another line."""
    for whole in (text, f"{text}\n    pass"):
        try:
            (node,) = ast.parse(whole).body
        except (SyntaxError, ValueError):
            continue
        return node.iter if isinstance(node, ast.For) else None
    return None


def _has_rows(node: ast.expr, frame: FrameType) -> bool:
    match node:
        case ast.Attribute(attr=name) if name in _NO_ROWS:
            return False
        case ast.Call(func=ast.Name(id="enumerate" | "zip"), args=given):
            return any(_has_rows(one, frame) for one in given)
        case ast.Call(func=ast.Attribute(value=value), args=given):
            is_function = isinstance(_value(value, frame), ModuleType)
            return any(_has_rows(one, frame) for one in (given if is_function else [value]))
        case ast.Name() | ast.Attribute() if isinstance(_value(node, frame), TracedTensor):
            return True
        case ast.Attribute(value=value) | ast.Subscript(value=value):
            return _has_rows(value, frame)
        case _:
            return False


def _value(node: ast.expr, frame: FrameType) -> Any:
    """Return what a dotted name stands for now, without running code; None if that is not known."""
    match node:
        case ast.Name(id=name):
            return frame.f_locals.get(name, frame.f_globals.get(name))
        case ast.Attribute(value=owner, attr=name):
            held = getattr(_value(owner, frame), "__dict__", {})
            inner = [held.get(one) or {} for one in ("_parameters", "_buffers", "_modules")]
            places = (held, *inner)
            return next((place[name] for place in places if name in place), None)
        case _:
            return None
