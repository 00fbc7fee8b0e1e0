"""Global names of a script that lead to a module while a copy of the module runs."""

import contextlib
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from tpuport.tracing.state.module_state import state_tree


@contextlib.contextmanager
def of_copy(source: Any, copy: torch.nn.Module | None) -> Iterator[None]:
    """Let global names that stand for a module, its parts or its tensors stand for those of a copy.

    Hooks of a script, and functions that it puts in place of `forward`, find the module under the
    name that the script gave it, or in a list, dict or object with such a name. The copy would
    otherwise change the state of the original.

    Args:
        source: The module. Nothing is changed for another value.
        copy: Its copy.
    """
    # A comparison on a thread of its own runs beside the script, which must find its own module.
    is_beside = threading.current_thread() is not threading.main_thread()
    if copy is None or is_beside or not isinstance(source, torch.nn.Module):
        yield
        return
    if type(source) in weakref.ProxyTypes:  # as porting() refers to a module of the user
        source = source.__repr__.__self__
    copies = _copies(source, copy)
    changed: list[tuple[Any, Any, Any]] = []
    try:
        for names in _globals_of(copy):
            for holder in (names, *filter(None, map(_holder, list(names.values())))):
                for key, value in _items(holder):
                    if id(value) in copies:
                        holder[key] = copies[id(value)]
                        changed.append((holder, key, value))
        yield
    finally:
        for holder, key, value in reversed(changed):
            # Not what the call has put there itself.
            if any(one is copies[id(value)] for at, one in _items(holder) if at == key):
                holder[key] = value


def _holder(value: Any) -> Any:
    """Return the list or dict that a value is, or the attributes of an object of the script."""
    if type(value) in (list, dict):
        return value if len(value) <= _LARGEST else None
    if issubclass(type(value), _NO_HOLDERS):
        return None
    try:
        # Not by `getattr`, for which an object may have code of its own.
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return held if type(held) is dict else None


# What has more members is data.
_LARGEST = 4096
_NO_HOLDERS = (
    *(type, types.ModuleType, types.FunctionType),
    *(torch.nn.Module, torch.Tensor, *weakref.ProxyTypes),
)


def _items(holder: Any) -> list[tuple[Any, Any]]:
    return list(holder.items() if isinstance(holder, dict) else enumerate(holder))


def _copies(source: torch.nn.Module, copy: torch.nn.Module) -> dict[int, Any]:
    """Return the modules and tensors of the copy by the ids of those of the original."""
    named = dict(torch.nn.Module.named_modules(copy, remove_duplicate=False))
    found: dict[int, Any] = {}
    for name, module in torch.nn.Module.named_modules(source, remove_duplicate=False):
        if name in named:
            found[id(module)] = named[name]
    tensors = state_tree(copy).leaves
    for name, tensor in state_tree(source).leaves.items():
        if name in tensors:
            found[id(tensor)] = tensors[name]
    return found


def _globals_of(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the global names of the code of a module: of its classes, hooks and functions."""
    found: dict[int, dict[str, Any]] = {}
    for one in torch.nn.Module.modules(module):
        held = list(vars(one).values())
        code = inspect.getattr_static(type(one), "forward", None)
        for part in (code, *held, *_hooks(held)):
            function = part.func if isinstance(part, functools.partial) else part
            function = function.__func__ if isinstance(function, types.MethodType) else function
            if isinstance(function, types.FunctionType):
                home = str(function.__globals__.get("__name__", ""))
                if home.split(".")[0] not in ("torch", "tpuport"):
                    found[id(function.__globals__)] = function.__globals__
    return list(found.values())


def _hooks(held: list[Any]) -> list[Any]:
    return [hook for part in held if isinstance(part, dict) for hook in part.values()]
