"""Methods of modules that make a tensor longer in a loop around their own calls: `generate`.

Each call in such a loop has another length. As one program the loop is compiled once.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType

_JOINING = frozenset({"cat", "concat", "concatenate", "hstack"})
# Their own loops are not the script's: transformers' has programs of its own.
_LIBRARIES = ("torch.", "transformers.")


def growing_methods(cls: type) -> list[str]:
    """Return the names of a class's own methods that hold such a loop over a range."""
    if cls.__module__.startswith(_LIBRARIES):
        return []
    return [name for name, value in vars(cls).items() if name != "forward" and _grows(value)]


def _grows(value: object) -> bool:
    function = inspect.unwrap(value) if isinstance(value, FunctionType) else None
    if not isinstance(function, FunctionType):
        return False
    code = function.__code__
    if "range" not in code.co_names or _JOINING.isdisjoint(code.co_names):
        return False
    return _holds_loop(function)


@functools.cache
def _holds_loop(function: FunctionType) -> bool:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return False  # made by a string or a cell, whose text is not kept
    return any(_is_growing(node) for node in ast.walk(tree) if isinstance(node, ast.For))


def _is_growing(loop: ast.For) -> bool:
    match loop.iter:
        case ast.Call(func=ast.Name(id="range")):
            inside = [node for statement in loop.body for node in ast.walk(statement)]
            return any(map(_calls_itself, inside)) and any(_joined(inside))
        case _:
            return False


def _calls_itself(node: ast.AST) -> bool:
    """Return whether a node calls the module, or one that it holds."""
    target = node.func if isinstance(node, ast.Call) else None
    while isinstance(target, ast.Attribute | ast.Subscript):
        target = target.value
    return isinstance(target, ast.Name) and target.id == "self"


def _joined(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the names that are joined to themselves: `x = torch.cat([x, y])`."""
    for node in nodes:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(
                    func=ast.Attribute(attr=function),
                    args=[ast.List(elts=parts) | ast.Tuple(elts=parts), *_],
                ),
            ) if function in _JOINING:
                if any(isinstance(part, ast.Name) and part.id == name for part in parts):
                    yield name
            case _:
                pass
