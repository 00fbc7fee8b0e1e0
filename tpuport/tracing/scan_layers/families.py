"""The families of blocks that are alike: of one class and structure, with state of equal shapes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tpuport.foundation import pytree
from tpuport.foundation.pytree.compare import same_value
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.guards.watch import OWN, Record, Watcher, is_unchanged
from tpuport.tracing.state.hook_state import HOOKS
from tpuport.tracing.state.module_state import named_owners, state_tree

# Fewer blocks are not worth a loop.
MIN_BLOCKS = 3


@dataclass(eq=False)
class Member:
    """One block of a family.

    Attributes:
        fqn: Its name in the model.
        module: The block.
        family: The blocks that it is like.
        modules: The block and the modules in it, each with its name within the block.
        held: Records of what they held when the trace began.
        state: Its tensors by their name within the block.
        varying: Attributes that differ between the family's blocks, by (module, attribute).
    """

    fqn: str
    module: torch.nn.Module
    family: "Family"
    modules: list[tuple[str, torch.nn.Module]]
    held: list[Record]
    state: dict[str, TracedTensor]
    varying: dict[tuple[str, str], Any]

    @property
    def everyone(self) -> str:
        """Return the name of the family's blocks, such as `layers.*`."""
        prefix, dot, _ = self.fqn.rpartition(".")
        return f"{prefix}{dot}*"

    @property
    def has_hooks(self) -> bool:
        """Return whether calls of it, or of a module in it, run hooks."""
        of_all = torch.nn.modules.module
        if of_all._global_forward_hooks or of_all._global_forward_pre_hooks:
            return True
        return any(m.__dict__.get(hooks) for _, m in self.modules for hooks in HOOKS)

    @property
    def is_changed(self) -> bool:
        """Return whether the content of its modules has changed since the trace began."""
        return not is_unchanged(self.held)


@dataclass(eq=False)
class Family:
    """Blocks that are alike, in the order of their calls in a plain loop.

    Attributes:
        members: The blocks.
        attributes: Names of Python attributes in which they differ, by (module, attribute). If a
            block's code reads them, only blocks with the same values are alike.
    """

    members: list[Member] = field(default_factory=list)
    attributes: set[tuple[str, str]] = field(default_factory=set)


@dataclass
class _Outline:
    """The facts that two blocks must share, and the attributes in which they may differ."""

    modules: list[tuple[str, torch.nn.Module]]
    key: Any
    plain: dict[tuple[str, str], Any]


def families(module: torch.nn.Module, leaves: Iterable[Any]) -> list[Family]:
    """Find the blocks of a model that are alike, in its lists, sequences and dicts of modules.

    Args:
        module: The traced copy of a model: its state is traced tensors.
        leaves: That state.
    """
    found: list[Family] = []
    watcher = Watcher()
    views = any(_is_view(leaf) for leaf in leaves)
    for prefix, owner in named_owners(module):
        if not isinstance(owner, (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)):
            continue
        by_kind: dict[Any, list[tuple[str, torch.nn.Module]]] = {}
        for name, child in owner.named_children():
            by_kind.setdefault(type(child), []).append((f"{prefix}.{name}".lstrip("."), child))
        for blocks in by_kind.values():
            if len(blocks) >= MIN_BLOCKS and any(b._modules for _, b in blocks):
                found += _families(blocks, watcher, views)
    return found


def _keeps_statistics(module: torch.nn.Module) -> bool:
    """Return whether the module writes a buffer at each call."""
    norm = isinstance(module, torch.nn.modules.batchnorm._NormBase)
    return norm and module.training and bool(module.track_running_stats)


def _families(
    blocks: list[tuple[str, torch.nn.Module]], watcher: Watcher, views: bool
) -> Iterator[Family]:
    """Yield the families among some blocks."""
    outlined: dict[Any, list[tuple[str, torch.nn.Module, _Outline]]] = {}
    for fqn, block in blocks:
        outline = _outline(block, views) if any(block.children()) else None
        if outline is not None:
            outlined.setdefault(outline.key, []).append((fqn, block, outline))
    for alike in outlined.values():
        if len(alike) < MIN_BLOCKS:
            continue
        family = Family()
        names = list(alike[0][2].plain)
        for name in names:
            first = alike[0][2].plain[name]
            if any(not same_value(first, outline.plain[name]) for _, _, outline in alike[1:]):
                family.attributes.add(name)
        for fqn, block, outline in alike:
            varying = {name: outline.plain[name] for name in family.attributes}
            held = watcher.records(module for _, module in outline.modules)
            state = _state(outline.modules)
            member = Member(fqn, block, family, outline.modules, held, state, varying)
            family.members.append(member)
        yield family


def _state(modules: list[tuple[str, torch.nn.Module]]) -> dict[str, TracedTensor]:
    found: dict[str, TracedTensor] = {}
    seen: set[int] = set()
    for holder in ("_parameters", "_buffers"):
        for fqn, module in modules:
            for name, value in module.__dict__[holder].items():
                if isinstance(value, TracedTensor) and id(value) not in seen:
                    seen.add(id(value))
                    found[f"{fqn}.{name}" if fqn else name] = value
    return found


def _outline(block: torch.nn.Module, views: bool) -> _Outline | None:
    """Return what decides whether a block is like another, or None for one that must run by itself.

    Args:
        block: The block.
        views: Whether some state of the model is a view.
    """
    shared = set()
    plain: dict[tuple[str, str], Any] = {}
    parts: list[Any] = []
    modules = list(named_owners(block, repeated=True))
    for fqn, module in modules:
        cls = type(module)
        if id(module) in shared or _keeps_statistics(module):
            return None
        if "__getattribute__" in cls.__dict__ or "forward" in module.__dict__:
            return None
        shared.add(id(module))
        parts.append((fqn, cls, module.training))
        for holder in (module._parameters, module._buffers):
            parts += [(fqn, name, _kind(value)) for name, value in holder.items()]
        # Containers name their children by attributes of their own.
        for name, value in module.__dict__.items():
            if name not in OWN:
                plain[fqn, name] = value
    if views and any(_is_view(leaf) for leaf in state_tree(block).leaves.values()):
        return None
    return _Outline(modules, (tuple(parts), tuple(plain)), plain)


def _kind(value: Any) -> Any:
    """Return the properties of a parameter or buffer that affect the code that runs."""
    if not isinstance(value, torch.Tensor):
        return type(value)
    held = vars(value)
    public = [name for name in held if name[0] != "_"]
    extra = tuple((name, pytree.hashable(held[name], [])) for name in sorted(public))
    if not isinstance(value, TracedTensor):
        return (id(value), extra)
    return (value.bound_shape, value.dtype, value.stride(), value._frozen, extra)


def _is_view(leaf: Any) -> bool:
    return isinstance(leaf, TracedTensor) and bool(leaf._chain)
