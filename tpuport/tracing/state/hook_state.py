"""Hooks that a call registers on modules or removes: they are state, as attributes are.

Hugging Face's models register some on their layers at the first call that asks for hidden states,
and set an attribute that says so.
"""

import copy
import types
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from tpuport.foundation import pytree
from tpuport.tracing.core.errors import port_error

# Registries of the functions that torch runs around a module's forward and backward.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# These, and the attributes in which torch keeps the options of a hook.
_OF_HOOKS = tuple(name for name in torch.nn.Module().__dict__ if "hook" in name)


def hooks_of(module: torch.nn.Module) -> tuple[Any, ...] | None:
    """Return the hooks on a module, for comparison; None if there are none."""
    held = module.__dict__
    if not any(held.get(name) for name in HOOKS):
        return None
    return tuple(tuple(held.get(name, {}).items()) for name in HOOKS)


def kept_hooks(module: torch.nn.Module, fqn: str, before: tuple[Any, ...] | None) -> dict[str, Any]:
    """Return the hook attributes of a module's traced copy, to be set on the module itself.

    Args:
        module: the copy, after a call.
        fqn: its fqn.
        before: its hooks before the call.

    Raises:
        PortError: a hook that the call registered holds a module or a tensor, which belong to the
            copy.
    """
    old = {id(function) for hooks in before or () for _, function in hooks}
    for hooks in hooks_of(module) or ():
        for _, function in hooks:
            if id(function) not in old and _holds(function, _STATE):
                name = getattr(function, "__qualname__", type(function).__qualname__)
                raise port_error(
                    f"the call put a hook ({name}) on {fqn or 'the model'!r} that holds a module"
                    " or a tensor",
                    code="TPU405",
                    remedy="register hooks before the model is converted, or take them off again",
                )
    held = module.__dict__
    return {name: copy.copy(held[name]) for name in _OF_HOOKS if name in held}


def refuse_handles(changed: dict[str, Any]) -> None:
    """Refuse attributes to which a call has assigned the handle of a hook.

    Args:
        changed: values of the attributes that the call changed, by name.

    Raises:
        PortError: there is one; it would remove a hook of the traced copy.
    """
    for name, value in changed.items():
        if _holds(value, (RemovableHandle,)):
            raise port_error(
                f"the call keeps the handle of a hook in {name!r}",
                code="TPU405",
                remedy="register hooks before the model is converted, or take them off again",
            )


_STATE = (torch.nn.Module, torch.Tensor)


def _holds(whole: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether an object, or one that it refers to, is an instance of `kinds`."""
    return any(isinstance(value, kinds) for value in pytree.walk([whole], parts_of_hook))


def parts_of_hook(value: Any) -> list[Any]:
    """Return what a hook, or an object that it refers to, holds; modules and tensors are ends."""
    if isinstance(value, pytree.CALLABLES):
        return pytree.held_by_callable(value)
    if isinstance(value, (*_STATE, type, types.ModuleType)):
        return []
    return pytree.children(value).all
