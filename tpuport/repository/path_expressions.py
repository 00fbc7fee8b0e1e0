"""What an expression for a path says: `str(Path(__file__).parent / "config")`; nothing is run."""

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path

_UNCHANGED = {"resolve", "absolute", "as_posix"}


def path_of(node: ast.expr | None, file: Path, constants: Mapping[str, ast.expr]) -> str | None:
    """Return the path or name that an expression has; None if it cannot be seen.

    Args:
        node: The expression.
        file: The file in which it is.
        constants: What names at the top of the file are bound to.
    """

    def of(one: ast.expr) -> str | None:
        return path_of(one, file, constants)

    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id="__file__"):
            return str(file)
        case ast.Name(id=name) if name in constants:
            others = {key: value for key, value in constants.items() if key != name}
            return path_of(constants[name], file, others)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _joined([of(left), of(right)])
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            found = of(left), of(right)
            return None if found[0] is None or found[1] is None else found[0] + found[1]
        case ast.Attribute(attr="parent" | "stem" | "name" as attribute, value=value):
            base = of(value)
            return None if base is None else str(getattr(Path(base), attribute))
        case ast.Subscript(
            value=ast.Attribute(attr="parents", value=value), slice=ast.Constant(value=int(level))
        ):
            base = of(value)
            above = () if base is None else Path(base).parents
            return str(above[level]) if 0 <= level < len(above) else None
        case ast.Call():
            return _called(node, file, constants)
    return None


def _called(node: ast.Call, file: Path, constants: Mapping[str, ast.expr]) -> str | None:
    values = [path_of(one, file, constants) for one in node.args]
    match node.func:
        case ast.Attribute(attr="joinpath", value=value):
            return _joined([path_of(value, file, constants), *values])
        case ast.Attribute(attr="join"):
            return _joined(values)
        case ast.Attribute(attr="dirname"):
            return str(Path(values[0]).parent) if len(values) == 1 and values[0] else None
        case ast.Attribute(attr=name, value=value) if name in _UNCHANGED:
            return path_of(value, file, constants)
    # `str()`, `Path()`, `os.path.abspath()`
    return values[0] if len(values) == 1 else None


def _joined(parts: Sequence[str | None]) -> str | None:
    known = [one for one in parts if one is not None]
    return str(Path(*known)) if known and len(known) == len(parts) else None
