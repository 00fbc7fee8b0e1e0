"""The parameters, arguments and results of a call that eager's backward pass needs unchanged."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from tpuport.foundation import pytree
from tpuport.model.parity.verify import Reference
from tpuport.tracing.state.module_state import state_tree


class Saved(NamedTuple):
    """What eager saved for backward.

    Attributes:
        names: the parameters.
        arguments: the arguments, by number.
        results: the results, by number.
        left: other tensors of the module after the call, by name.
        total: how many results there are.
        signs: the results of which it needs only where they are positive, by number.
    """

    names: frozenset[str] = frozenset()
    arguments: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()
    left: frozenset[str] = frozenset()
    total: int = 0
    signs: frozenset[int] = frozenset()


def saved_inputs(found: Reference) -> Saved:
    """Return what eager saved for backward.

    Writing to one of them before the backward pass is an error of eager's.
    """
    results = pytree.flatten(found.out)[0]
    out = [leaf for leaf in results if isinstance(leaf, torch.Tensor)]
    with torch._C.DisableTorchFunction():
        nodes = list(_nodes(out))
        saved = {_memory(tensor) for node in nodes for tensor in _saved(node)} - {None}
        others = [node for node in nodes if node.name() != _OF_SIGNS]
        in_full = {_memory(tensor) for node in others for tensor in _saved(node)}
        module = found.module
        named = (
            []
            if module is None
            else torch.nn.Module.named_parameters(module, remove_duplicate=False)
        )
        left = {} if module is None else state_tree(module).leaves
        names = frozenset(name for name, p in named if _memory(p) in saved)
        return Saved(
            names,
            _in(saved, pytree.flatten(found.given, objects=True)[0]),
            _in(saved, results),
            frozenset(n for n, t in left.items() if n not in names and _is_in(saved, t)),
            len(results),
            _in(saved - in_full, results),
        )


# ReLU keeps its result.
_OF_SIGNS = "ReluBackward0"


def _in(saved: set[int | None], leaves: list[Any]) -> frozenset[int]:
    return frozenset(i for i, leaf in enumerate(leaves) if _is_in(saved, leaf))


def _is_in(saved: set[int | None], leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and _memory(leaf) in saved


def _nodes(out: list[torch.Tensor]) -> Iterator[Any]:
    """Yield the nodes of the graph that leads to some results."""
    waiting: list[Any] = [tensor.grad_fn for tensor in out]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            yield node


def _saved(node: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a node keeps, without the check of their versions."""
    for name in dir(node):
        if name.startswith("_raw_saved"):
            one = getattr(node, name)
            for saved in one if isinstance(one, (list, tuple)) else (one,):
                if isinstance(saved.data, torch.Tensor):
                    yield saved.data


def _memory(tensor: torch.Tensor) -> int | None:
    """Return a number that tensors in the same memory share; sparse tensors have none."""
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else None
