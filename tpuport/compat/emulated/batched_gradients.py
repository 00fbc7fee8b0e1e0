"""Backward passes of several gradients at once (`torch.autograd.grad(is_grads_batched=True)`)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._functorch import is_legacy_batchedtensor

# Functions that torch has in C++ for its vectorizing map.
_C: Any = torch._C._VariableFunctions  # type: ignore[attr-defined]


def row_by_row(
    pull: Callable[[Sequence[torch.Tensor | None]], Sequence[torch.Tensor | None]],
    gradients: Sequence[torch.Tensor | None],
) -> Sequence[torch.Tensor | None]:
    """Return what `pull` makes of gradients; of a batch of them, what it makes of each, as a batch.

    Torch batches the gradients by its own vectorizing map, which a program cannot see into.

    Args:
        pull: Maps the gradients of results to those of inputs. Where a graph is made, it is by
            operations that torch differentiates.
        gradients: The gradients of the results; None is zero.
    """
    is_batch = [g is not None and is_legacy_batchedtensor(g) for g in gradients]
    if not any(is_batch):
        return pull(gradients)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    # The size is for tensors that are no batch.
    pairs: list[tuple[Any, bool]] = [
        (_C._remove_batch_dim(g, level, 1, 0) if batched else g, batched)
        for g, batched in zip(gradients, is_batch, strict=True)
    ]
    size = next(len(g) for g, batched in pairs if batched)
    rows = [pull([g[i] if batched else g for g, batched in pairs]) for i in range(size)]
    made = zip(*rows, strict=True)
    return [_batch(column, level) for column in made]


def _batch(rows: Sequence[Any], level: int) -> torch.Tensor | None:
    """Return tensors as a batch of torch's vectorizing map; None stays, as no row has one."""
    if any(row is None for row in rows):
        return None
    return _C._add_batch_dim(torch.stack(list(rows)), 0, level)
