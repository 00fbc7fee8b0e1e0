"""Notebooks as one Python module, with a mapping back to their cells."""

import ast
import bisect
import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpuport.foundation.errors import UsageError

# Cell magics that run the rest of their cell as Python.
_PYTHON_CELLS = {"%%time", "%%timeit", "%%capture", "%%prun", "%%python", "%%python3"}
_ESCAPE = re.compile(r"\s*[%!?]")
_ESCAPED_VALUE = re.compile(r"(\s*[\w.,\s]+=\s*)[%!]\S")
_HELP = re.compile(r"\s*[\w.]+\?{1,2}\s*$")


@dataclass(frozen=True)
class Cell:
    """A code cell and its first line in the module.

    Attributes:
        number: Its place among all cells of the notebook, counted from 1.
        first: The line of the module at which it starts.
        lines: Its source as written.
        kept: The original of each line that is not Python, by its index in the cell.
    """

    number: int
    first: int
    lines: tuple[str, ...]
    kept: dict[int, str]


@dataclass(frozen=True)
class Notebook:
    """The code of a notebook.

    Attributes:
        text: All code cells below each other as one module; lines for IPython became `pass`.
        cells: The code cells that parse.
        broken: Number of each cell that does not parse, with the reason.
    """

    text: str
    cells: tuple[Cell, ...]
    broken: tuple[tuple[int, str], ...]

    def place(self, line: int) -> tuple[int, int]:
        """Return the number of the cell that contains a line of the module, and the line there."""
        at = bisect.bisect_right([cell.first for cell in self.cells], line) - 1
        return self.cells[at].number, line - self.cells[at].first + 1

    def line(self, line: int) -> str:
        """Return a line of the module as the notebook has it."""
        at = bisect.bisect_right([cell.first for cell in self.cells], line) - 1
        return self.cells[at].lines[line - self.cells[at].first]


class NotPythonError(Exception):
    """Raised for a notebook whose code is in another language."""


def read_notebook(text: str) -> Notebook:
    """Extract the code from a notebook's JSON.

    Raises:
        ValueError: the text is no notebook.
        NotPythonError: the notebook's language is not Python.
    """
    content = parse(text)
    language = _language(content)
    if language not in ("", "python", "ipython"):
        raise NotPythonError(f"a notebook in {language}, not in Python")
    cells: list[Cell] = []
    broken: list[tuple[int, str]] = []
    module: list[str] = []
    for number, cell in enumerate(content["cells"], start=1):
        if cell.get("cell_type") != "code":
            continue
        lines = source_of(cell).split("\n")
        python, kept = _without_magics(lines)
        if reason := _syntax_error("\n".join(python)):
            broken.append((number, reason))
            continue
        cells.append(Cell(number, len(module) + 1, tuple(lines), kept))
        module += python
    return Notebook("\n".join(module) + "\n", tuple(cells), tuple(broken))


def parse(text: str) -> dict[str, Any]:
    """Parse the JSON of a notebook.

    Raises:
        ValueError: the text is no notebook of format 4.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"no notebook: its JSON is broken in line {error.lineno}") from None
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise ValueError("no notebook of format 4: it has no list of cells")
    if not all(isinstance(cell, dict) for cell in content["cells"]):
        raise ValueError("no notebook of format 4: a cell is no object")
    return content


def source_of(cell: dict[str, Any]) -> str:
    """Return a cell's source, which notebooks store as one string or as a list of lines."""
    source = cell.get("source", "")
    text = "".join(map(str, source)) if isinstance(source, list) else str(source)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _language(content: dict[str, Any]) -> str:
    metadata = content.get("metadata")
    for key, name in (("language_info", "name"), ("kernelspec", "language")):
        found = metadata.get(key) if isinstance(metadata, dict) else None
        if isinstance(found, dict) and isinstance(found.get(name), str):
            return found[name].lower()
    return ""


def _syntax_error(text: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(text)
        except SyntaxError as error:
            return f"line {error.lineno}: {error.msg}"
        except (ValueError, RecursionError, MemoryError) as error:
            return str(error) or "too deeply nested"
    return ""


def _without_magics(lines: Sequence[str]) -> tuple[list[str], dict[int, str]]:
    """Replace the lines that IPython reads itself by `pass`; return those lines by index too."""
    first = next((line.split() for line in lines if line.strip()), [""])[0]
    if first.startswith("%%") and first not in _PYTHON_CELLS:
        return [""] * len(lines), dict(enumerate(lines))
    if not _syntax_error("\n".join(lines)):
        return list(lines), {}
    python: list[str] = []
    kept: dict[int, str] = {}
    continued = False
    for number, line in enumerate(lines):
        escaped = continued or _ESCAPE.match(line) is not None or _HELP.match(line) is not None
        assigned = _ESCAPED_VALUE.match(line)
        if escaped or assigned:
            kept[number] = line
        if assigned and not escaped:
            python.append(f"{assigned[1]}None")
        elif escaped:
            indent = "" if continued else line[: len(line) - len(line.lstrip())]
            python.append("" if continued else f"{indent}pass")
        else:
            python.append(line)
        continued = (escaped or assigned is not None) and line.endswith("\\")
    return python, kept


# Writing.

_MARK = "# tpuport: start of cell "
_KEPT = "  # tpuport: kept line "


def marked(notebook: Notebook) -> str:
    """Return the module with a comment before each cell, to split it there after rewriting."""
    parts = []
    for cell in notebook.cells:
        last = cell.first - 1 + len(cell.lines)
        body = notebook.text.split("\n")[cell.first - 1 : last]
        parts += [f"{_MARK}{cell.number}", *_with_placeholders(body, cell)]
    return "\n".join(parts) + "\n"


def marked_place(notebook: Notebook, line: int) -> tuple[int, int]:
    """Return the number of the cell that contains a line of `marked(notebook)`, and the line."""
    firsts = [cell.first + number for number, cell in enumerate(notebook.cells, start=1)]
    at = bisect.bisect_right(firsts, line) - 1
    return notebook.cells[at].number, line - firsts[at] + 1


def _with_placeholders(body: list[str], cell: Cell) -> list[str]:
    return [
        # At the top level a comment is enough, and it lets fixes add imports below it.
        f"{'' if line == 'pass' else line}{_KEPT}{cell.number}.{number}"
        if number in cell.kept
        else line
        for number, line in enumerate(body)
    ]


def write_notebook(text: str, notebook: Notebook, rewritten: str) -> str:
    """Return the notebook's JSON with the cells of a rewritten module, its formatting unchanged.

    Args:
        text: The original JSON.
        notebook: Its code.
        rewritten: The rewritten text of `marked(notebook)`.

    Raises:
        UsageError: the text cannot be split into cells any more, or writing the JSON would change
            its formatting.
    """
    content = parse(text)
    form = _formatting(text, content)
    pieces = _pieces(notebook, rewritten)
    for cell in notebook.cells:
        lines = _restored(pieces[cell.number], cell)
        target = content["cells"][cell.number - 1]
        if lines == list(cell.lines):
            continue
        joined = "\n".join(lines)
        as_list = isinstance(target.get("source"), list)
        target["source"] = joined.splitlines(keepends=True) if as_list else joined
    return _dump(content, form)


def _pieces(notebook: Notebook, rewritten: str) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    order: list[int] = []
    head: list[str] = []
    for line in rewritten.rstrip("\n").split("\n"):
        if line.startswith(_MARK):
            order.append(int(line.removeprefix(_MARK)))
            found[order[-1]] = []
        elif order:
            found[order[-1]].append(line)
        else:
            head.append(line)
    if order != [cell.number for cell in notebook.cells]:
        raise UsageError("not rewritten: the fixes move code from one cell of it into another")
    if order:
        # An import that a fix adds at the top of the module belongs to the first cell.
        found[order[0]] = [line for line in head if line.strip()] + found[order[0]]
    return found


def _restored(lines: list[str], cell: Cell) -> list[str]:
    result: list[str] = []
    seen: set[int] = set()
    for line in lines:
        _, mark, number = line.partition(f"{_KEPT}{cell.number}.")
        if mark:
            seen.add(int(number))
            line = cell.kept[int(number)]
        result.append(line)
    # Blank lines at a cell's end were stripped with the text's end: restore them.
    while len(result) < len(cell.lines) and not any(cell.lines[len(result) :]):
        result.append("")
    if seen != set(cell.kept):
        raise UsageError(
            f"not rewritten: a fix removes a line of cell {cell.number} that IPython reads"
        )
    return result


@dataclass(frozen=True)
class _Formatting:
    indent: int | str | None
    separators: tuple[str, str] | None
    ascii_only: bool
    end: str


def _formatting(text: str, content: dict[str, Any]) -> _Formatting:
    """Find the formatting with which writing the JSON reproduces the text."""
    end = text[len(text.rstrip()) :]
    found = re.search(r"\n([ \t]+)\S", text)
    indent: int | str | None = None
    if found:
        indent = found[1] if "\t" in found[1] else len(found[1])
    for separators in (None, (",", ":")):
        for ascii_only in (False, True):
            form = _Formatting(indent, separators, ascii_only, end)
            if _dump(content, form) == text:
                return form
    raise UsageError("not rewritten: its JSON is laid out in a way that writing would change")


def _dump(content: dict[str, Any], form: _Formatting) -> str:
    body = json.dumps(
        content, indent=form.indent, separators=form.separators, ensure_ascii=form.ascii_only
    )
    return body + form.end
