"""Insertion of the imports that rewritten code needs, at the top of a file or in a function."""

import ast
from collections.abc import Iterable

from tpuport.source.rewrite.finding import NotFixable
from tpuport.source.syntax.module import FUNCTIONS, Module
from tpuport.source.syntax.text import Edit, Passage, SourceText


def check(module: Module, names: Iterable[str], *, inside: bool, place: int = 0) -> None:
    """Check that modules can be imported without hiding a name of the user's.

    Args:
        module: The file.
        names: Dotted names of modules; each binds its first part.
        inside: Whether the import goes inside the function.
        place: Offset of the first text that uses them.

    Raises:
        NotFixable: the file uses such a name for something else, or imports it further down.
    """
    for name in () if inside else names:
        places = [module.start(node) for node in _top_imports(module, name)]
        if places and place < min(places):
            raise NotFixable(f"the file imports {name} further down only")
    for root in {name.partition(".")[0] for name in names}:
        taken = module.binds_otherwise(root) or (not inside and _bound_locally(module, root))
        if taken:
            raise NotFixable(f"the file uses the name {root} for something else")


def _bound_locally(module: Module, root: str) -> bool:
    return any(
        _imports(node, root) and module.function(node) is not None
        for node in module.nodes
        if isinstance(node, ast.Import)
    )


def _imports(node: ast.Import, name: str) -> bool:
    return any((alias.asname or alias.name).partition(".")[0] == name for alias in node.names)


def add(module: Module, names: Iterable[str], *, inside: bool) -> SourceText:
    """Return the file's text with the missing imports added.

    Args:
        module: The file.
        names: Dotted names of modules.
        inside: Whether to import at the start of the file's only function.
    """
    missing = [name for name in sorted(names) if inside or not _top_imports(module, name)]
    if not missing:
        return module.text
    lines = [f"import {name}" for name in missing]
    edit = _inside_edit(module, lines) if inside else _top_edit(module, lines)
    made = module.copy(0, len(module.text.text), [edit])
    return SourceText(made.text, [line.origin for line in made.lines], module.text.original)


def _top_imports(module: Module, name: str) -> list[ast.Import]:
    return [
        node
        for node in module.tree.body
        if isinstance(node, ast.Import)
        and any(alias.name == name and alias.asname is None for alias in node.names)
    ]


def _top_edit(module: Module, lines: list[str]) -> Edit:
    """Insert lines after the imports that the file starts with, else before its first statement."""
    body = module.tree.body
    start = 1 if body and _is_docstring(body[0]) else 0
    end = start
    while end < len(body) and isinstance(body[end], ast.Import | ast.ImportFrom):
        end += 1
    if end > start:
        return _edit_after(body[end - 1], module, lines)
    first = body[start]
    if _shares_line(module, module.start(first)):
        return _edit_after(body[start - 1], module, lines)
    line = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", []))])
    while line > 1 and module.text.lines[line - 2].startswith("#"):
        line -= 1
    if line == 1:  # these comments are about the file
        while module.text.lines[line - 1].startswith("#"):
            line += 1
    offset = module.text.line_start(line)
    gap = "\n\n\n" if isinstance(first, (*FUNCTIONS, ast.ClassDef)) else "\n\n"
    return Edit(offset, offset, Passage.of("\n".join(lines) + gap, module.text.origin(line)))


def _edit_after(last: ast.stmt, module: Module, lines: list[str]) -> Edit:
    """Insert lines below a statement, or on its line if another statement follows it there."""
    line, end = last.end_lineno or last.lineno, module.span(last)[1]
    rest = module.text.text[end : module.text.line_end(line)].strip(" \t;")
    if rest and not rest.startswith("#"):
        return Edit(end, end, Passage.of("; " + "; ".join(lines), module.text.origin(line)))
    offset = module.text.line_end(line)
    return Edit(offset, offset, Passage.of("\n" + "\n".join(lines), module.text.origin(line)))


def _inside_edit(module: Module, lines: list[str]) -> Edit:
    """Insert lines before the first statement of the outermost function, after its docstring."""
    function = next(node for node in module.nodes if isinstance(node, FUNCTIONS))
    body = function.body
    first = body[1] if len(body) > 1 and _is_docstring(body[0]) else body[0]
    line = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", []))])
    offset = module.start(first)
    if line < first.lineno:
        offset = module.text.line_start(line) + len(module.text.indentation(line))
    one_line = first.lineno == function.lineno or _shares_line(module, offset)
    gap = "; " if one_line else "\n" + module.text.indentation(first.lineno)
    origin = module.text.origin(function.lineno)
    passage = Passage.of(gap.join(lines) + gap, origin)
    return Edit(offset, offset, passage)


def _shares_line(module: Module, offset: int) -> bool:
    line = module.text.line_at(offset)
    return bool(module.text.text[module.text.line_start(line) : offset].strip())


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
