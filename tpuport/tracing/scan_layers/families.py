"""The families of blocks that may be alike: of one class, with state of equal shapes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tpuport.tracing.state.module_state import named_owners

# Fewer blocks are not worth a loop.
MIN_BLOCKS = 3


@dataclass(eq=False)
class Member:
    """One block of a family.

    Attributes:
        fqn: Its name in the model.
        module: The block.
        family: The blocks that it may be like.
    """

    fqn: str
    module: torch.nn.Module
    family: "Family"

    @property
    def everyone(self) -> str:
        """Return the name of the family's blocks, such as `layers.*`."""
        prefix, dot, _ = self.fqn.rpartition(".")
        return f"{prefix}{dot}*"


@dataclass(eq=False)
class Family:
    """Blocks that may be alike, in the order of their calls in a plain loop."""

    members: list[Member] = field(default_factory=list)


def families(module: torch.nn.Module) -> list[Family]:
    """Find the blocks of a model that may be alike, in its lists, sequences and dicts of modules.

    Args:
        module: The traced copy of a model: its state is traced tensors.
    """
    found: list[Family] = []
    for prefix, owner in named_owners(module):
        if not isinstance(owner, (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)):
            continue
        by_kind: dict[Any, list[tuple[str, torch.nn.Module]]] = {}
        for name, child in owner.named_children():
            by_kind.setdefault(type(child), []).append((f"{prefix}.{name}".lstrip("."), child))
        for blocks in by_kind.values():
            if len(blocks) >= MIN_BLOCKS and any(b._modules for _, b in blocks):
                found += _families(blocks)
    return found


def _families(blocks: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[Family]:
    """Yield the families among blocks of one class: those with state of equal shapes."""
    by_state: dict[Any, list[tuple[str, torch.nn.Module]]] = {}
    for fqn, block in blocks:
        if block._modules:
            key = tuple((n, t.shape, t.dtype) for n, t in torch.nn.Module.named_parameters(block))
            by_state.setdefault(key, []).append((fqn, block))
    for alike in by_state.values():
        if len(alike) >= MIN_BLOCKS:
            family = Family()
            family.members += [Member(fqn, block, family) for fqn, block in alike]
            yield family
