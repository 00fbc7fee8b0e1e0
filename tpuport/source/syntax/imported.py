"""Full names of imported things."""

import ast
from collections.abc import Collection, Iterable, Mapping


def imported_names(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Map each name that import statements bind to its full name: `F` to `torch.nn.functional`.

    Relative imports keep their dots: `from .layers import Block` maps `Block` to `.layers.Block`.
    """
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                found[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (f"{node.module}." if node.module else "")
            for alias in node.names:
                found[alias.asname or alias.name] = start + alias.name
    return found


def qualified_name(
    node: ast.expr, imports: Mapping[str, str], *, hidden: Collection[str] = ()
) -> str | None:
    """Return the full name of a thing reached through an import, or None.

    Args:
        node: Any expression; only dotted names have a full name.
        imports: The full name of each imported name of the file.
        hidden: Names that are rebound here, so that they no longer mean the import.
    """
    name = dotted_name(node)
    first, dot, rest = (name or "").partition(".")
    root = None if first in hidden else imports.get(first)
    return None if root is None else root + dot + rest


def dotted_name(node: ast.AST) -> str | None:
    """Return a dotted name as written, such as `a.b.c`; None for any other node."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None
