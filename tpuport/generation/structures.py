"""Structures that pass between the programs of a generation by a name, and their tensors as a list.

A cache is an object of many parts. To take it apart and put it together again between two programs
of each call took as long as a small model computes.
"""

from typing import Any

import torch

from tpuport.foundation import pytree
from tpuport.tracing.core.arguments import program_leaf

# The structures that were taken apart, by key and by name.
_BY_KEY: dict[Any, str] = {}
_BY_NAME: dict[str, pytree.TreeSpec] = {}


def taken_apart(value: Any, what: str) -> tuple[list[Any], str]:
    """Return the tensors in a value, and the name of the rest: equal structures have one.

    Args:
        value: Any structure.
        what: What it is, for messages that say why a program was traced again.
    """
    leaves, spec = pytree.flatten(value, leaf=program_leaf, objects=True)
    name = _BY_KEY.get(spec.key)
    if name is None:
        name = what if what not in _BY_NAME else f"{what} ({len(_BY_NAME)})"
        _BY_KEY[spec.key] = name
        # What is compared by identity is kept; tensors of a trace are not.
        kept = [one for one in spec.keep if not program_leaf(one)]
        _BY_NAME[name] = pytree.TreeSpec(spec.node, spec.key, kept)
    return leaves, name


def put_together(leaves: list[Any], name: str) -> Any:
    """Return a structure around other tensors."""
    return pytree.unflatten(_BY_NAME[name], leaves)


def described(processors: Any) -> str:
    """Return what logits processors do, in a line."""
    return ", ".join(f"{type(one).__name__}({_settings(one)})" for one in processors) or "none"


def _settings(processor: Any) -> str:
    held = vars(processor).items()
    return ", ".join(f"{n}={v}" for n, v in held if not isinstance(v, torch.Tensor))
