"""The places of layers, parameters and buffers in a module."""

from typing import Any

import torch

Modules = dict[str, tuple[Any, ...]]


def places_in(module: torch.nn.Module) -> tuple[Any, ...]:
    """Return the names of what a module itself holds, in order, and which modules these are.

    Code that loops over them depends on their order, and on how often a module is among them.
    """
    held = module._modules
    if not isinstance(held, dict):
        return ()  # A scripted module cannot be edited.
    order = (*held, *module._parameters, *module._buffers)
    return order, tuple(map(id, held.values()))


def exchanged(before: Modules, after: Modules) -> bool:
    """Return whether there are other modules now, by what a `StateTree` says of them.

    Another order, and parameters and buffers that a call registers, do not count.
    """
    was, now = ({fqn: one[:2] for fqn, one in held.items()} for held in (before, after))
    return was != now
