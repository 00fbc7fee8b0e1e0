"""What is noticed of a user's module between two calls of it."""

from collections.abc import Iterator
from typing import Any

import torch

from tpuport.errors import PortError
from tpuport.model import numbers
from tpuport.model.state import StateTree
from tpuport.running.tags import mark_of


def key_of(leaf: Any) -> Any:
    """What is different once a tensor has another value, or None for a number."""
    if not isinstance(leaf, torch.Tensor):
        return None
    mark = mark_of(leaf)
    version = None if leaf.is_inference() else leaf._version
    where = (id(leaf),) if mark is None else (mark.serial, mark.writes)
    return (*where, version, leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype)


def refuse_backward_hooks(module: torch.nn.Module) -> None:
    """Gradients inside a program are not seen one by one.

    Raises:
        PortError: a hook below the module asks for them.
    """
    for name, one in module.named_modules():
        if one._backward_hooks or one._backward_pre_hooks:
            raise PortError(
                f"{name or type(module).__name__} has a backward hook, and the gradients inside a"
                " program are not seen one by one",
                code="TPU406",
                remedy="leave its class to eager PyTorch: porting(eager=(...)), or --eager",
            )


def frame_of(tree: StateTree, module: torch.nn.Module) -> Any:
    """Everything about a module that makes another program when it changes."""
    hooks = [
        (name, tuple(owner._forward_hooks), tuple(owner._forward_pre_hooks))
        for name, owner in module.named_modules()
        if owner._forward_hooks or owner._forward_pre_hooks
    ]
    trained = [p.requires_grad for p in module.parameters()]
    return (tree.statics, tree.modules, hooks, trained)


def differences(before: StateTree, after: StateTree) -> Iterator[str]:
    """Names of the Python state that is not what it was."""
    yield from changed_names(before.statics, after.statics)


def named(changed: Iterator[str]) -> list[str]:
    """Names as a report says them: a mode that all modules share is one."""
    names = list(changed)
    rest = [name for name in names if name.rpartition(".")[2] != "training"]
    return rest if len(rest) == len(names) else ["training mode", *rest]


def changed_names(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Keys whose values are not what they were."""
    for name in dict.fromkeys([*before, *after]):
        if before.get(name, ...) != after.get(name, ...):
            yield name


def changed_numbers(before: StateTree, after: StateTree) -> Iterator[str]:
    """Those that are Python numbers before and after, and not a switch."""
    for name in differences(before, after):
        kinds = {type(before.values.get(name)), type(after.values.get(name))}
        if kinds in ({int}, {float}) and not isinstance(after.values[name], numbers.SYMBOLIC):
            yield name
