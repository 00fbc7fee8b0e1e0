"""Results of a call that no program can return: functions of its tensors, and iterators."""

import functools
from collections.abc import AsyncIterator, Coroutine, Iterator
from types import FunctionType, MethodType
from typing import Any

from tpuport.foundation import pytree
from tpuport.foundation.pytree.children import ATOMIC, children, content
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.tensor import TracedTensor

# No search for a tensor is longer.
_MOST_VALUES = 10_000


def refuse_functions(result: pytree.TreeSpec, *, runs_by_parts: bool) -> None:
    """Refuse functions in a result that reach tensors of the call, and objects with such functions.

    Iterators are refused, too: there would be one for all calls, which the first call uses up.

    Args:
        result: The structure of the result.
        runs_by_parts: Whether the module then runs by parts, as under `porting()`. If not, such a
            function raises when it is called, and what does not call it is no worse for it.

    Raises:
        PortError: There is one; it could not run after the call.
    """
    for value in pytree.statics_of(result):
        if _is_used_up(value):
            name = getattr(value, "__qualname__", type(value).__name__)
            raise port_error(
                f"the call returns an iterator ({name}), whose code would run after the program",
                code="TPU402",
                remedy="return a list or a tuple of what it gives, or port the methods that it"
                " calls (methods=, --program) instead of this one",
            )
        if runs_by_parts and _reaches(value):
            name = getattr(value, "__qualname__", f"object of {type(value).__name__}")
            raise port_error(
                f"the call returns a function ({name}) that refers to tensors of the program",
                code="TPU402",
                remedy="call it in the module that is ported, and return its results",
            )


def _is_used_up(value: Any) -> bool:
    """Return whether a value gives each of its items once: a generator, `zip`, a coroutine."""
    kinds = (Iterator, AsyncIterator, Coroutine)
    return type(value).__module__ in _OF_PYTHON and isinstance(value, kinds)


# Other iterators are objects of somebody's, which code may use again (files, loaders).
_OF_PYTHON = frozenset({"builtins", "itertools"})


def _reaches(value: Any) -> bool:
    """Return whether a function or object refers to a traced tensor or number."""
    seen: set[int] = set()
    pending, count = [value], 0
    while pending and count < _MOST_VALUES:
        one = pending.pop()
        count += 1
        if isinstance(one, (TracedTensor, *sym_numbers.SYMBOLIC)):
            return True
        if id(one) not in seen:
            seen.add(id(one))
            pending += _parts(one)
    return False


def _parts(value: Any) -> list[Any]:
    """Return what a function, container or object refers to."""
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        cells = [part for cell in value.__closure__ or () for part in content(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return [] if type(value) in ATOMIC else children(value).all
