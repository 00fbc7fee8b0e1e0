"""The names that code reads, and the objects that it reads them from."""

import functools
import os
import sys
import types
from collections.abc import Iterator
from operator import is_
from typing import Any

import torch

from tpuport.foundation.pytree.compare import same_value
from tpuport.foundation.user_frames import is_inside
from tpuport.source.rewrite.codegen import nested_codes
from tpuport.tracing.guards.attribute_proxy import attributes_of

ABSENT = object()
CALLABLES = (
    *(types.FunctionType, types.MethodType, functools.partial, functools._lru_cache_wrapper),
    *(staticmethod, classmethod, property, functools.cached_property),
)
# Methods that Python or torch calls on a class that code names.
OF_CLASSES = tuple("__init__ __new__ __post_init__ forward backward setup_context".split())
# Names that show that code may read the environment.
OF_ENVIRONMENT = frozenset("environ environb getenv getenvb expandvars".split())
# Names that tell a view from a tensor with its own storage: stand-ins of arguments are no views.
OF_MEMORY = frozenset(
    "_base _is_view storage_offset data_ptr storage untyped_storage as_strided is_set_to".split()
)
# Pytest is listed because an assertion that it rewrote names its state.
_LIBRARIES = frozenset("torch torchax jax jaxlib numpy tpuport builtins _pytest pytest".split())
# Methods that Python calls without a name in the code, but not to compute a block.
_QUIET = frozenset(
    "__init__ __new__ __repr__ __str__ __reduce__ __reduce_ex__ __getstate__ __setstate__ __copy__"
    " __deepcopy__ __del__ __init_subclass__ __class_getitem__ __sizeof__ __dir__".split()
)

is_library_file = functools.cache(is_inside)


@functools.lru_cache(maxsize=4096)
def is_library(module: str) -> bool:
    """Return whether no model keeps its state in the Python module of this name."""
    name = module.partition(".")[0]
    return name in _LIBRARIES or (name in sys.stdlib_module_names and name != "__main__")


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names that code reads: globals, attributes, and its identifier strings."""
    names: set[str] = set()
    for one in nested_codes(code):
        names.update(one.co_names)
        names.update(c for c in one.co_consts if isinstance(c, str) and c.isidentifier())
    return frozenset(names)


@functools.lru_cache(maxsize=4096)
def called_by_python(cls: type) -> tuple[str, ...]:
    """Return the methods of a class that operators call, not code by their name."""
    return tuple(
        name
        for base in cls.__mro__
        if not is_library(base.__module__)
        for name, value in vars(base).items()
        if name[:2] == "__" == name[-2:] and name not in _QUIET and isinstance(value, CALLABLES)
    )


def named(holder: Any) -> Any:
    """Return the attributes of globals, a class, a Python module or a torch module, by name."""
    if isinstance(holder, dict):
        return holder
    return attributes_of(holder) if isinstance(holder, torch.nn.Module) else vars(holder)


def content(cell: Any) -> Any:
    """Return the content of a closure's cell."""
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return ABSENT


def environment(of: None) -> dict[str, str]:
    """Return the environment variables."""
    return dict(os.environ)


def forward_of(cls: type) -> Any:
    """Return the forward function of a module class, or None for TorchScript's, which have none."""
    return getattr(cls, "forward", None)


def parts_of_callable(value: Any) -> list[Any]:
    """Return the functions and values that a call of this callable uses."""
    match value:
        case types.FunctionType():
            return [value]
        case types.MethodType():
            return [value.__func__, value.__self__]
        case property():
            return [value.fget, value.fset, value.fdel]
        case functools.cached_property():
            return [value.func]
        case functools._lru_cache_wrapper():
            return [value.__wrapped__]
        case _:
            return [value.__func__]


def wrapped_by(function: types.FunctionType) -> list[Any]:
    """Return the objects that a library's function wraps: a decorator has no other reference to
    them.
    """
    cells = [content(cell) for cell in function.__closure__ or ()]
    return [*cells, function.__dict__.get("__wrapped__")]


def submodules(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Return a module and all its submodules without calling their code."""
    stack, seen = [module], set[int]()
    while stack:
        one = stack.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            below = attributes_of(one).get("_modules", {})
            stack += [child for child in below.values() if child is not None]


# -- whether it is still the same ------------------------------------------------------------------


def gives_the_same(holder: Any, given: dict[str, Any]) -> bool:
    """Return whether a holder still has the same values under these names."""
    held = named(holder)
    now = [held.get(name, ABSENT) for name in given]
    return all(map(is_, now, given.values())) or all(map(same_value, now, given.values()))


def have_same_forwards(classes: list[Any], were: list[Any]) -> bool:
    """Return whether module classes, torch's own too, still have the same forward."""
    return list(map(forward_of, classes)) == were


def has_same_names(of: tuple[Any, set[str]], were: tuple[int, set[str]]) -> bool:
    """Return whether a holder has the same ones of some names; it may have more others."""
    holder, names = of
    # Usually nothing was added, which the length shows at once.
    return len(named(holder)) == were[0] or names & named(holder).keys() == were[1]
