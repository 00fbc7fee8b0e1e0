"""Changes of a user's module between two calls of it."""

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tpuport.foundation import pytree
from tpuport.foundation.interop.device_mark import mark_of
from tpuport.foundation.pytree.clone import Cloner
from tpuport.foundation.user_frames import place_of
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.errors import error_here
from tpuport.tracing.guards.linked_arguments import Links, hook_keys
from tpuport.tracing.state.module_state import StateTree


def key_of(leaf: Any) -> Any:
    """Return a key that changes when a tensor gets another value, or None for a number."""
    if not isinstance(leaf, torch.Tensor):
        return None
    mark = mark_of(leaf)
    version = None if leaf.is_inference() else leaf._version
    where = (id(leaf),) if mark is None else (mark.serial, mark.writes)
    return (*where, version, leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype)


def refuse_backward_hooks(module: torch.nn.Module) -> None:
    """Refuse backward hooks, which would have to see gradients inside a program.

    Raises:
        PortError: a hook below the module asks for them.
    """
    for name, one in module.named_modules():
        for hook in (*one._backward_hooks.values(), *one._backward_pre_hooks.values()):
            raise error_here(
                f"{name or type(module).__name__} has a backward hook, and the gradients inside a"
                " program are not seen one by one",
                code="TPU406",
                place=place_of(hook),
                remedy="leave its class to eager PyTorch: porting(eager=(...)), or --eager",
            )


@dataclass(frozen=True)
class Frame:
    """Everything about a module that needs another program when it changes.

    `tied` has the names of tensors that have several, and `shared` of those that share memory, if
    that counts. `outside` says which of the tensors that code reads outside a name is of.
    """

    statics: dict[str, Any]
    modules: dict[str, Any]
    hooks: list[Any]
    trained: list[bool]
    set_on: dict[str, Any]
    linked: Any
    tied: dict[str, list[str]] = field(default_factory=dict)
    shared: tuple[Any, ...] = ()
    outside: dict[str, int] = field(default_factory=dict)

    def without(self, names: frozenset[str]) -> "Frame":
        """Return it without some attributes, by their full names."""
        starts = tuple(name + end for name in names for end in ("[", "."))

        def is_left(path: str) -> bool:
            return path not in names and not path.startswith(starts)

        tied = {name: list(filter(is_left, found)) for name, found in self.tied.items()}
        return dataclasses.replace(
            self,
            statics={name: key for name, key in self.statics.items() if name not in names},
            set_on={path: key for path, key in self.set_on.items() if is_left(path)},
            tied={name: found for name, found in tied.items() if found and is_left(name)},
            outside={name: index for name, index in self.outside.items() if is_left(name)},
        )


def frame_of(tree: StateTree, module: torch.nn.Module, links: Links | None = None) -> Frame:
    """Return everything about a module that needs another program when it changes."""
    hooks = hook_keys(module, links)
    trained = [p.requires_grad for p in torch.nn.Module.parameters(module)]
    linked = () if links is None else links.cells
    return Frame(tree.statics, tree.modules, hooks, trained, tree.set_on, linked)


def differences(before: StateTree, after: StateTree) -> Iterator[str]:
    """Find the names of Python state that changed."""
    yield from changed_names(before.statics, after.statics)
    yield from changed_names(before.set_on, after.set_on)


def named(changed: Iterator[str]) -> list[str]:
    """Return names for a report, in which the training mode of all modules is one entry."""
    names = list(changed)
    rest = [name for name in names if name.rpartition(".")[2] != "training"]
    return rest if len(rest) == len(names) else ["training mode", *rest]


def changed_names(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Find the keys whose values changed."""
    for name in dict.fromkeys([*before, *after]):
        if before.get(name, ...) != after.get(name, ...):
            yield name


def changed_numbers(before: StateTree, after: StateTree) -> Iterator[str]:
    """Find the changed names that are ints or floats before and after, and not bools."""
    for name in differences(before, after):
        kinds = {type(before.values.get(name)), type(after.values.get(name))}
        if kinds in ({int}, {float}) and not isinstance(after.values[name], sym_numbers.SYMBOLIC):
            yield name


def put(places: Iterable[tuple[torch.nn.Module, torch.nn.Module, str]], cloner: Cloner) -> None:
    """Copy attributes from the ported copy of a module to the user's module.

    Args:
        places: the user's module, the copy, and the name of a parameter, a buffer or any other
            attribute, also of one that was deleted.
        cloner: maps modules and tensors of the copy to the user's modules and real tensors.
    """
    given = _GivenBack(cloner)
    for theirs, ours, attribute in places:
        for holder in ("_parameters", "_buffers", "__dict__"):
            new, old = getattr(ours, holder), getattr(theirs, holder)
            if attribute in new:
                old[attribute] = given.back(old.get(attribute), new[attribute])
            else:
                old.pop(attribute, None)
        if attribute in ours._non_persistent_buffers_set:
            theirs._non_persistent_buffers_set.add(attribute)
    given.finish()


class _GivenBack:
    """The objects that a script holds, filled with the content that a call gave their copies.

    Attributes and values by key keep their identity. The elements of a list are new, unless they
    are in an attribute or under a key too.

    Args:
        cloner: maps modules and tensors of the copy to the user's modules and real tensors.
    """

    def __init__(self, cloner: Cloner) -> None:
        self._cloner = cloner
        # The objects that were filled, by the id of the copies with their content.
        self._known: dict[int, Any] = {}
        self._sequences: list[Any] = []

    def back(self, old: Any, copied: Any) -> Any:
        """Return the object that was in a place, filled with the content of a copy."""
        return self._filled(old, self._cloner.clone(copied))

    def finish(self) -> None:
        """Put the objects that were filled into lists that hold their copies."""
        for one in self._sequences:
            if any(id(part) in self._known for part in one):
                _refill(one, [self._known.get(id(part), part) for part in one])

    def _filled(self, old: Any, new: Any) -> Any:
        bare = (torch.Tensor, torch.nn.Module)
        if old is new or type(old) is not type(new) or isinstance(new, bare):
            return new
        if id(new) in self._known:
            return self._known[id(new)]
        if isinstance(new, (list, set, deque)):
            _refill(old, list(new))
            self._sequences.append(old)
        elif not isinstance(new, (dict, torch.optim.Optimizer)) and not pytree.is_plain(new):
            return new
        self._known[id(new)] = old
        if isinstance(new, dict):
            base = pytree.dict_class(old)
            content = {key: self._filled(old.get(key), value) for key, value in base.items(new)}
            base.clear(old)
            for key, value in content.items():
                base.__setitem__(old, key, value)
        held, made = pytree.attributes_of(old), pytree.attributes_of(new)
        for name in held.keys() - made.keys():
            object.__delattr__(old, name)
        for name, value in made.items():
            object.__setattr__(old, name, self._filled(held.get(name), value))
        return old


def _refill(value: Any, parts: list[Any]) -> None:
    if isinstance(value, list):
        value[:] = parts
    else:
        value.clear()
        value.update(parts) if isinstance(value, set) else value.extend(parts)
