"""The parameters and arguments of a call that eager's backward pass needs unchanged."""

from collections.abc import Iterator
from typing import Any

import torch

from tpuport.foundation import pytree
from tpuport.model.parity.verify import Reference


def saved_inputs(found: Reference) -> tuple[frozenset[str], frozenset[int]]:
    """Return what eager saved for backward: parameters by name, arguments by number.

    Writing to one of them before the backward pass is an error of eager's.
    """
    out = [leaf for leaf in pytree.flatten(found.out)[0] if isinstance(leaf, torch.Tensor)]
    with torch._C.DisableTorchFunction():
        saved = {_memory(tensor) for node in _nodes(out) for tensor in _saved(node)} - {None}
        module = found.module
        named = (
            []
            if module is None
            else torch.nn.Module.named_parameters(module, remove_duplicate=False)
        )
        names = frozenset(name for name, p in named if _memory(p) in saved)
        leaves = enumerate(pytree.flatten(found.given, objects=True)[0])
        tensors = ((i, leaf) for i, leaf in leaves if isinstance(leaf, torch.Tensor))
        return names, frozenset(i for i, tensor in tensors if _memory(tensor) in saved)


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
