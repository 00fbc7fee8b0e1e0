"""Functions that a module keeps, and the state of the module that they refer to."""

import types
from collections.abc import Iterable
from typing import Any

import torch

from tpuport.foundation.pytree.children import attributes_of, children, content, walk
from tpuport.foundation.pytree.clone import is_state, state_below


def rebind_functions(root: Any, replaced: Iterable[tuple[Any, Any]]) -> None:
    """Let functions below a module refer to the state that took the place of what they hold.

    A hook that fills a dict of its module holds this dict in its closure or as a default value.

    Args:
        root: The module; its functions are changed.
        replaced: Attributes before and after.
    """
    new_of: dict[int, Any] = {}
    for old, new in replaced:
        _match(old, new, new_of)
    if not new_of:
        return
    for value in walk([root], _parts):
        if not isinstance(value, types.FunctionType):
            continue
        for cell in value.__closure__ or ():
            for held in content(cell):
                if id(held) in new_of:
                    cell.cell_contents = new_of[id(held)]
        if value.__defaults__:
            value.__defaults__ = tuple(new_of.get(id(one), one) for one in value.__defaults__)
        if value.__kwdefaults__:
            named = value.__kwdefaults__.items()
            value.__kwdefaults__ = {name: new_of.get(id(one), one) for name, one in named}


def _match(old: Any, new: Any, new_of: dict[int, Any]) -> None:
    """Note which container or object took the place of which, those inside of them too."""
    is_other = old is not new and type(old) is type(new) and id(old) not in new_of
    if not is_other or not is_state(old) or isinstance(old, (torch.Tensor, torch.nn.Module)):
        return
    new_of[id(old)] = new
    if isinstance(old, dict):
        for key in old.keys() & new.keys():
            _match(dict.__getitem__(old, key), dict.__getitem__(new, key), new_of)
    elif not isinstance(old, set):  # which has no order
        for one, other in zip(children(old).parts, children(new).parts, strict=False):
            _match(one, other, new_of)
    held, made = attributes_of(old), attributes_of(new)
    for name in held.keys() & made.keys():
        _match(held[name], made[name], new_of)


def _parts(value: Any) -> list[Any]:
    """Return what a module's state and the functions in it lead to."""
    if isinstance(value, types.FunctionType):
        return [part for cell in value.__closure__ or () for part in content(cell)]
    return state_below(value)
