"""Sizes of batches that a script has no setting for: numbers where it makes its data loaders."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

_LOADER, _PLACE = "DataLoader", 1


def written_batches(files: Iterable[Path]) -> list[int]:
    """Return the sizes of batches that are written as numbers in calls of `DataLoader`."""
    found: set[int] = set()
    for file in files:
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # the answer of `read` names it
        found.update(size for node in ast.walk(tree) for size in _sizes(node))
    return sorted(found)


def _sizes(node: ast.AST) -> Iterator[int]:
    if not isinstance(node, ast.Call):
        return
    name = node.func.attr if isinstance(node.func, ast.Attribute) else None
    name = node.func.id if isinstance(node.func, ast.Name) else name
    if name != _LOADER:
        return
    given = [one.value for one in node.keywords if one.arg == "batch_size"]
    for value in (*node.args[_PLACE : _PLACE + 1], *given):
        if isinstance(value, ast.Constant) and type(value.value) is int:
            yield value.value
