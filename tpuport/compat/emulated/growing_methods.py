"""Methods of modules with a loop around their own calls, of which each has other sizes.

A loop that makes a tensor longer (`generate`) is compiled once as one program. One over sizes that
the module holds (the scales of an image) is compiled round by round in any case.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType

_JOINING = frozenset({"cat", "concat", "concatenate", "hstack"})
# Their own loops are not the script's: transformers' has programs of its own.
_LIBRARIES = ("torch.", "transformers.")
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def growing_methods(cls: type) -> list[str]:
    """Return the names of a class's own methods that make a tensor longer over a range."""
    return [name for name, function in _own(cls) if _joins(function.__code__)
            and any(map(_is_growing, _loops(function)))]  # fmt: skip


def _joins(code: CodeType) -> bool:
    return "range" in code.co_names and not _JOINING.isdisjoint(code.co_names)


def sized_methods(cls: type) -> list[str]:
    """Return the names of a class's own methods that loop over sizes which the module holds."""
    return [name for name, function in _own(cls) if any(map(_is_over_sizes, _loops(function)))]


def _own(cls: type) -> Iterator[tuple[str, FunctionType]]:
    if cls.__module__.startswith(_LIBRARIES):
        return
    for name, value in vars(cls).items():
        function = inspect.unwrap(value) if isinstance(value, FunctionType) else None
        if name == "forward" or not isinstance(function, FunctionType):
            continue
        # What is suspended in between (a stream of tokens) runs in the script.
        if not function.__code__.co_flags & _SUSPENDS:
            yield name, function


@functools.cache
def _loops(function: FunctionType) -> list[ast.For]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return []  # made by a string or a cell, whose text is not kept
    return [node for node in ast.walk(tree) if isinstance(node, ast.For)]


def _is_over_sizes(loop: ast.For) -> bool:
    """Return whether a loop goes over numbers of `self`, and makes sizes of them.

    `for i, n in enumerate(self.sizes)`, with `x.reshape(-1, n, n)` and calls of its modules.
    """
    match loop.iter:
        case ast.Call(func=ast.Name(id="enumerate"), args=[ast.Attribute() as held]):
            target = loop.target.elts[-1] if isinstance(loop.target, ast.Tuple) else None
        case ast.Attribute() as held:
            target = loop.target
        case _:
            return False
    if not isinstance(held.value, ast.Name) or held.value.id != "self":
        return False
    if not isinstance(target, ast.Name):
        return False
    inside = [node for statement in loop.body for node in ast.walk(statement)]
    return any(map(_calls_itself, inside)) and any(_sized_by(inside, target.id))


# Methods that take sizes.
_SIZED = frozenset({"view", "reshape", "expand", "repeat", "unflatten", "interpolate"})


def _sized_by(nodes: list[ast.AST], name: str) -> Iterator[ast.AST]:
    """Yield the calls with sizes that have a number among them."""
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr=method), args=arguments) if method in _SIZED:
                if any(isinstance(one, ast.Name) and one.id == name for one in arguments):
                    yield node
            case _:
                pass


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
