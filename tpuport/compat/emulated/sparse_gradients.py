"""Gradients of tables that eager PyTorch makes sparse: `nn.Embedding(sparse=True)`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jax.extend import core

from tpuport.foundation.errors import PortError
from tpuport.tracing.core.sparse_rows import inner_lookups, is_lookup


def sparse_lookups(jaxpr: Any) -> dict[int, list[Any]]:
    """Return the variables that count the uses of rows, by the number of the input that is read.

    A table that the program also reads in another way has a dense gradient, as in eager PyTorch.

    Raises:
        PortError: a lookup is in a loop, a branch or a checkpointed region.
    """
    if any(True for _ in inner_lookups(jaxpr)):
        raise PortError(
            "an embedding with sparse=True is read in a loop, a branch on data or a checkpointed"
            " region, where its gradient cannot be made sparse as eager PyTorch makes it",
            code="TPU403",
            remedy="read it outside of the region, or make it with sparse=False if the optimizer"
            " takes dense gradients",
        )
    numbers = {var: number for number, var in enumerate(jaxpr.invars)}
    found: dict[int, list[Any]] = {}
    dense = {numbers[atom] for atom in jaxpr.outvars if atom in numbers} if numbers else set()
    for eqn in jaxpr.eqns:
        read = [numbers[a] for a in eqn.invars if isinstance(a, core.Var) and a in numbers]
        if is_lookup(eqn) and eqn.invars[0] in numbers:
            table, *read = read
            found.setdefault(table, []).append(eqn.invars[3])
        dense.update(read)
    return {number: uses for number, uses in found.items() if number not in dense}


def with_sparse(
    gradients: list[torch.Tensor | None], sparse: Sequence[tuple[int, int]], reads: Sequence[Any]
) -> list[torch.Tensor | None]:
    """Return gradients with some made sparse.

    Args:
        gradients: the dense ones.
        sparse: the numbers of those to make sparse, each with its number of lookups.
        reads: for each lookup, how often each row was read.
    """
    made, rest = list(gradients), list(reads)
    for number, count in sparse:
        uses, rest = rest[:count], rest[count:]
        dense = made[number]
        if dense is None:
            continue
        rows = torch.from_numpy(np.flatnonzero(sum(map(np.asarray, uses))))
        made[number] = torch.sparse_coo_tensor(
            rows[None], dense[rows], dense.shape, check_invariants=False, is_coalesced=True
        )
    return made
