"""What code reads by name, and of what."""

import functools
import os
import sys
import types
from collections.abc import Iterator
from operator import is_
from typing import Any

import torch

from tpuport.diagnosis.frames import is_inside
from tpuport.model.blocks.held import attributes_of
from tpuport.model.blocks.same_values import same_value
from tpuport.source.codegen import nested_codes

ABSENT = object()
CALLABLES = (
    *(types.FunctionType, types.MethodType, functools.partial, functools._lru_cache_wrapper),
    *(staticmethod, classmethod, property, functools.cached_property),
)
# What Python or torch calls of a class that code names.
OF_CLASSES = tuple("__init__ __new__ __post_init__ forward backward setup_context".split())
# What reads the environment: a name in the code that may.
OF_ENVIRONMENT = frozenset("environ environb getenv getenvb expandvars".split())
# What tells a view from a tensor of its own: stand-ins of arguments are none.
OF_MEMORY = frozenset(
    "_base _is_view storage_offset data_ptr storage untyped_storage as_strided is_set_to".split()
)
# pytest: an assertion that it rewrote names its state.
_LIBRARIES = frozenset("torch torchax jax jaxlib numpy tpuport builtins _pytest pytest".split())
# What Python calls without a name in the code, but for no computation of a block.
_QUIET = frozenset(
    "__init__ __new__ __repr__ __str__ __reduce__ __reduce_ex__ __getstate__ __setstate__ __copy__"
    " __deepcopy__ __del__ __init_subclass__ __class_getitem__ __sizeof__ __dir__".split()
)

is_library_file = functools.cache(is_inside)


@functools.lru_cache(maxsize=4096)
def is_library(module: str) -> bool:
    """Whether it is a Python module, by its name, that no model keeps its state in."""
    name = module.partition(".")[0]
    return name in _LIBRARIES or (name in sys.stdlib_module_names and name != "__main__")


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """The names that code reads: globals, attributes, and those that it may look up by a string."""
    names: set[str] = set()
    for one in nested_codes(code):
        names.update(one.co_names)
        names.update(c for c in one.co_consts if isinstance(c, str) and c.isidentifier())
    return frozenset(names)


@functools.lru_cache(maxsize=4096)
def called_by_python(cls: type) -> tuple[str, ...]:
    """The methods of a class that operators call, not code by their name."""
    return tuple(
        name
        for base in cls.__mro__
        if not is_library(base.__module__)
        for name, value in vars(base).items()
        if name[:2] == "__" == name[-2:] and name not in _QUIET and isinstance(value, CALLABLES)
    )


def named(holder: Any) -> Any:
    """What is read by name of globals, a class, a Python module or a module of torch."""
    if isinstance(holder, dict):
        return holder
    return attributes_of(holder) if isinstance(holder, torch.nn.Module) else vars(holder)


def content(cell: Any) -> Any:
    """What a closure's cell holds."""
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return ABSENT


def environment(of: None) -> dict[str, str]:
    """The variables of the environment."""
    return dict(os.environ)


def forward_of(cls: type) -> Any:
    """The code of a kind of modules; None for those of TorchScript, which have none in Python."""
    return getattr(cls, "forward", None)


def parts_of_callable(value: Any) -> list[Any]:
    """The functions and values that a call of something calls and passes on."""
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
    """What a function of a library knows that somebody made it for: a decorator's has no other."""
    cells = [content(cell) for cell in function.__closure__ or ()]
    return [*cells, function.__dict__.get("__wrapped__")]


def submodules(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """A module and all below it, none of them asked."""
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
    """Whether a holder still gives by name what it gave."""
    held = named(holder)
    now = [held.get(name, ABSENT) for name in given]
    return all(map(is_, now, given.values())) or all(map(same_value, now, given.values()))


def have_same_forwards(classes: list[Any], were: list[Any]) -> bool:
    """Whether kinds of modules, torch's own too, still run the same code."""
    return list(map(forward_of, classes)) == were


def has_same_names(of: tuple[Any, set[str]], were: tuple[int, set[str]]) -> bool:
    """Whether a holder has the same ones of some names, of which it may have got more."""
    holder, names = of
    # Most of the time nothing was added, which is soon seen.
    return len(named(holder)) == were[0] or names & named(holder).keys() == were[1]
