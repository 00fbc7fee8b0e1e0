"""Methods of modules with a loop around their own calls, of which each has other sizes.

A loop that makes a tensor longer (`generate`) is compiled once as one program. One over sizes that
the module holds (the scales of an image) is compiled round by round in any case.
"""

import ast
import dis
import inspect
import textwrap
import weakref
from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tpuport.source.rewrite.codegen import nested_codes

_JOINING = frozenset({"cat", "concat", "concatenate", "hstack"})
# Their own loops are not the script's: transformers' has programs of its own.
_LIBRARIES = ("torch.", "transformers.")
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class LoopingMethods(NamedTuple):
    """The names of a class's own methods with such a loop.

    Attributes:
        sized: those that loop over sizes which the module holds.
        growing: those that make a tensor longer over a range.
    """

    sized: list[str]
    growing: list[str]


def looping_methods(cls: type) -> LoopingMethods:
    """Return the methods of a class with such a loop.

    Each `porting()` asks for all classes of modules of the process, so a function is read once.
    """
    found = LoopingMethods([], [])
    if cls.__module__.startswith(_LIBRARIES):
        return found
    for name, value in vars(cls).items():
        if type(value) is FunctionType and name != "forward":
            loops = _KNOWN.get(value)
            if loops is None:
                loops = _KNOWN[value] = _loops_of(value)
            if loops is not _NEITHER:
                found.sized.extend([name] * loops.over_sizes)
                found.growing.extend([name] * loops.grows)
    return found


class _Loops(NamedTuple):
    over_sizes: bool
    grows: bool


_NEITHER = _Loops(False, False)
_KNOWN: "weakref.WeakKeyDictionary[FunctionType, _Loops]" = weakref.WeakKeyDictionary()


def _loops_of(value: FunctionType) -> _Loops:
    function = inspect.unwrap(value)
    # What is suspended in between (a stream of tokens) runs in the script.
    if not isinstance(function, FunctionType) or function.__code__.co_flags & _SUSPENDS:
        return _NEITHER
    names = function.__code__.co_names
    joins = "range" in names and not _JOINING.isdisjoint(names)
    codes = list(nested_codes(function.__code__))
    sizes = any(not _SIZED.isdisjoint(code.co_names) for code in codes)
    # Its text is read only if its code has such names, and a loop.
    if not (joins or sizes) or not any(_FOR in code.co_code[::2] for code in codes):
        return _NEITHER
    loops = [loop for loop in _for_loops(function) if not _prints(loop)]
    found = _Loops(any(map(_is_over_sizes, loops)), joins and any(map(_is_growing, loops)))
    return found if any(found) else _NEITHER


_FOR = dis.opmap["FOR_ITER"]


def _prints(loop: ast.For) -> bool:
    """Return whether a loop prints, which a program would do while it is traced alone."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        for node in ast.walk(loop)
    )


def tells_others(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the argument of a call that the method's loops tell of each round: a streamer.

    Args:
        method: The method of a module.
        args: Its arguments, with the module.
        kwargs: Its keyword arguments.
    """
    function = inspect.unwrap(method)
    told = _TOLD.get(function)
    if told is None:
        told = _TOLD[function] = frozenset(_told(function))
    if not told:
        return None
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return None  # the call itself says what is wrong
    values = {**given, **given.get("kwargs", {})}
    return next((name for name in told if not isinstance(values.get(name), _KNOWN_VALUES)), None)


_TOLD: "weakref.WeakKeyDictionary[Any, frozenset[str]]" = weakref.WeakKeyDictionary()
# What a program has as an argument, with what the call does to it.
_KNOWN_VALUES = (type(None), torch.Tensor, torch.nn.Module, list, dict, set, int, float, str)


def _told(function: FunctionType) -> Iterator[str]:
    """Yield the names that a statement of a loop calls for its effect: `streamer.put(token)`."""
    for loop in _for_loops(function):
        for node in ast.walk(loop):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                target: ast.expr = node.value.func
                while isinstance(target, ast.Attribute):
                    target = target.value
                if isinstance(target, ast.Name) and target.id != "self":
                    yield target.id


def _for_loops(function: FunctionType) -> list[ast.For]:
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
