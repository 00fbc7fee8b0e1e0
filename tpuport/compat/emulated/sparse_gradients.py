"""Gradients of tables that eager PyTorch makes sparse: `nn.Embedding(sparse=True)`."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jax.extend import core

from tpuport.foundation.errors import PortError
from tpuport.tracing.core.paths import has_rule_of
from tpuport.tracing.core.sparse_rows import inner_lookups, is_lookup
from tpuport.tracing.core.view_steps import replace_value


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
    dense = _numbered(jaxpr.outvars, numbers)
    for eqn in jaxpr.eqns:
        # Rows that `max_norm` scales are still the table's.
        if has_rule_of(eqn, replace_value.__name__):
            old, new = (_numbered([atom], numbers) for atom in eqn.invars)
            numbers.update((eqn.outvars[0], number) for number in old)
            dense |= new
        elif is_lookup(eqn):
            for number in _numbered(eqn.invars[:1], numbers):
                found.setdefault(number, []).append(eqn.invars[3])
        elif eqn.primitive.name != "stop_gradient":
            dense |= _numbered(eqn.invars, numbers)
    return {number: uses for number, uses in found.items() if number not in dense}


def _numbered(atoms: Iterable[Any], numbers: dict[Any, int]) -> set[int]:
    """Return the numbers of the inputs among variables and literals of a program."""
    return {numbers[a] for a in atoms if isinstance(a, core.Var) and a in numbers}


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
