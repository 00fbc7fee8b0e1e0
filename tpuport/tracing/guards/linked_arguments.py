"""Arguments that belong to the module, too: hooks hold them, or its submodules are their keys.

A cache may be a dict whose keys are layers, which the caller passes to the model and which hooks of
these layers fill. A copy of the module gets the copy of the argument in the closures of its hooks,
and its own layers as keys; after the call the keys are the caller's again.
"""

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tpuport.foundation import pytree
from tpuport.foundation.errors import PortError
from tpuport.foundation.pytree.children import Children, children, refill
from tpuport.foundation.pytree.tree import Identity
from tpuport.foundation.user_frames import place_of
from tpuport.tracing.core.errors import error_here
from tpuport.tracing.guards.code_reads import content
from tpuport.tracing.state.hook_state import parts_of_hook

_REGISTRIES = ("_forward_pre_hooks", "_forward_hooks")


@dataclass(frozen=True)
class LinkedCell:
    """A variable in the closure of a hook that holds an argument.

    Attributes:
        fqn: The module of the hook.
        registry: Which of its hooks.
        place: The hook's place among them.
        cell: The place of the variable in its closure.
        container: The number of the container among the arguments.
    """

    fqn: str
    registry: str
    place: int
    cell: int
    container: int


class Links:
    """What ties the arguments of a call to its module.

    Args:
        module: The module of the caller.
        cells: The variables in closures of its hooks that hold arguments.
    """

    def __init__(self, module: torch.nn.Module, cells: tuple[LinkedCell, ...]) -> None:
        self.cells = cells
        self._module = weakref.ref(module)

    def around(self, function: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
        """Return a method of a copy of the module that is called with copies of the arguments."""

        # Without the attributes of a module, which would count as read.
        @functools.wraps(function, updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            original = self._module()
            assert original is not None
            theirs = dict(original.named_modules())
            own = {id(theirs[fqn]): one for fqn, one in module.named_modules() if fqn in theirs}
            back = {id(one): theirs[fqn] for fqn, one in module.named_modules() if fqn in theirs}
            _rename((args, kwargs), own)
            with self._linked(module, _containers((args, kwargs))):
                made = function(*args, **kwargs)
            _rename((args, kwargs, made), back)
            return made

        return run

    @contextlib.contextmanager
    def _linked(self, module: torch.nn.Module, containers: dict[int, Any]) -> Iterator[None]:
        """Put hooks on a module whose closures hold these arguments."""
        before = []
        for (fqn, registry, place), cells in self.by_hook().items():
            hooks = getattr(module.get_submodule(fqn), registry)
            key, hook = list(hooks.items())[place]
            closure = list(hook.__closure__)
            for one in cells:
                closure[one.cell] = types.CellType(containers[one.container])
            before.append((hooks, key, hook))
            hooks[key] = _with_cells(hook, tuple(closure))
        try:
            yield
        finally:
            for hooks, key, hook in before:
                hooks[key] = hook

    def by_hook(self) -> dict[tuple[str, str, int], list[LinkedCell]]:
        """Return the variables by hook: its module, which of its hooks, and its place."""
        found: dict[tuple[str, str, int], list[LinkedCell]] = {}
        for one in self.cells:
            found.setdefault((one.fqn, one.registry, one.place), []).append(one)
        return found


def links_of(module: torch.nn.Module, arguments: Any) -> Links | None:
    """Return what ties the arguments of a call to its module; None if nothing does.

    Raises:
        PortError: A hook reaches an argument, of which a program has a copy, in another way.
    """
    hooks = [
        (fqn, registry, place, hook)
        for fqn, one in module.named_modules()
        for registry in _REGISTRIES
        for place, hook in enumerate(getattr(one, registry).values())
    ]
    has_dict = _has_dict(arguments)
    if not hooks and not has_dict:
        return None
    given = {id(value): index for index, value in _containers(arguments).items()}
    cells: list[LinkedCell] = []
    for fqn, registry, place, hook in hooks:
        others: list[Any] = [hook]
        if isinstance(hook, types.FunctionType):
            held = [content(cell) for cell in hook.__closure__ or ()]
            linked = {index for index, value in enumerate(held) if id(value) in given}
            cells += [
                LinkedCell(fqn, registry, place, index, given[id(held[index])])
                for index in sorted(linked)
            ]
            others = [value for index, value in enumerate(held) if index not in linked]
            others += [hook.__defaults__, hook.__kwdefaults__, vars(hook)]
        if any(id(value) in given for value in pytree.walk(others, parts_of_hook)):
            raise _held(fqn or type(module).__name__, hook)
    return Links(module, tuple(cells)) if cells or has_dict else None


def _held(name: str, hook: Any) -> PortError:
    return error_here(
        f"a hook of {name} holds an argument of this call, of which a program has a copy",
        code="TPU406",
        place=place_of(hook),
        remedy="write to the argument in `forward`, or call the parts of the module by themselves",
    )


def linked_cells(module: torch.nn.Module, links: Links | None) -> list[types.CellType]:
    """Return the variables in closures of a module's hooks that hold arguments."""
    found = []
    for (fqn, registry, place), cells in ({} if links is None else links.by_hook()).items():
        hook = list(getattr(module.get_submodule(fqn), registry).values())[place]
        found += [hook.__closure__[one.cell] for one in cells]
    return found


def hook_keys(module: torch.nn.Module, links: Links | None) -> list[Any]:
    """Return what tells the hooks of a module apart from others: by their ids.

    Hooks that hold an argument are those of any other call if all else in their closures is.
    """
    known = {} if links is None else links.by_hook()
    linked = {at: {one.cell: one.container for one in cells} for at, cells in known.items()}
    return [
        (fqn, registry, tuple(
            _key(number, hook, linked.get((fqn, registry, place)))
            for place, (number, hook) in enumerate(getattr(one, registry).items())
        ))
        for fqn, one in module.named_modules()
        for registry in _REGISTRIES
        if getattr(one, registry)
    ]  # fmt: skip


def _key(number: int, hook: Any, linked: dict[int, int] | None) -> Any:
    if linked is None:
        return number
    held = [
        linked[index] if index in linked else _identity(content(cell))
        for index, cell in enumerate(hook.__closure__)
    ]
    defaults = (hook.__defaults__, hook.__kwdefaults__)
    return hook.__code__, id(hook.__globals__), tuple(map(_identity, defaults)), tuple(held)


def _identity(value: Any) -> Any:
    """Return a key that is equal for this object only, and keeps no module alive."""
    if value is None or type(value) in (bool, int, str):
        return type(value), value
    try:
        return weakref.ref(value)
    except TypeError:
        return Identity(value)


def _with_cells(
    function: types.FunctionType, cells: tuple[types.CellType, ...]
) -> types.FunctionType:
    made = types.FunctionType(
        *(function.__code__, function.__globals__, function.__name__),
        *(function.__defaults__, cells),
    )
    made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
    made.__dict__.update(function.__dict__)
    return made


def _containers(arguments: Any) -> dict[int, Any]:
    """Return the containers and objects among the arguments that a call may change, by number."""
    found = pytree.flatten(arguments, objects=True)[1].containers
    return {index: value for index, value in found.items() if not isinstance(value, tuple)}


def _has_dict(arguments: Any) -> bool:
    """Return whether an argument is a dict, whose keys may be layers."""
    args, kwargs = arguments
    return any(isinstance(one, dict) for one in (*args, *kwargs.values()))


def _rename(values: Any, modules: dict[int, torch.nn.Module]) -> None:
    """Give the dicts among some values other modules for keys."""
    for value in _containers(values).values():
        if not isinstance(value, dict):
            continue
        held: Children = children(value)
        keys = [modules.get(id(key), key) for key in held.keys or ()]
        if any(new is not old for new, old in zip(keys, held.keys or (), strict=True)):
            refill(value, held._replace(keys=keys))
