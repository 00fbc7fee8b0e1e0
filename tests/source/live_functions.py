"""What the tests of rewriting loaded functions share."""

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from tpuport.source.rewrite.live import LiveRewrite, swapped


def line_of(function: Any, text: str) -> int:
    """The line of the file on which a function's source holds a text, which it does once."""
    code = function.__code__
    lines, first = inspect.getsourcelines(code)
    found = [first + number for number, line in enumerate(lines) if text in line]
    assert len(found) == 1
    return found[0]


def same_both_ways(function: Callable[..., Any], rewrite: LiveRewrite, *calls: tuple[Any, ...]):
    """Make sure that calls give the same with and without the rewrite in place."""
    before = [function(*args) for args in calls]
    with swapped([rewrite]):
        assert [function(*args) for args in calls] == before
    assert [function(*args) for args in calls] == before


def load(source: str, folder: Path, name: str = "forward") -> tuple[FunctionType, Path]:
    """A function of a file with this source."""
    path = folder / "loaded.py"
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
    return names[name], path
