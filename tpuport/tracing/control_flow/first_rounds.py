"""The rounds of a loop that a trace runs first: how each of them changes the variables."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tpuport.foundation import pytree
from tpuport.foundation.errors import PortError
from tpuport.foundation.plain_loops import begins_unbound
from tpuport.tracing.control_flow.growth import Growth, Surroundings
from tpuport.tracing.control_flow.loop_sources import Source, is_traced
from tpuport.tracing.control_flow.merge import branch_leaf
from tpuport.tracing.core.active import Decider

_SEEN_ROUNDS = 2
FAILURES = (PortError, RuntimeError, TypeError, ValueError, IndexError)


def tried(
    source: Source, operands: tuple[Any, ...], peel: int, explorer: Decider | None
) -> tuple[Growth, tuple[Any, ...], int, bool]:
    """Return what `_observed` does, or that the branches of a round have no common result.

    They are explored around the loop then, in a new trace.
    """
    try:
        return _observed(source, operands, peel, explorer)
    except FAILURES as error:
        if explorer is None:
            raise
        return Growth(peel, why=reason(error)), operands, 0, True


def _observed(
    source: Source, operands: tuple[Any, ...], peel: int, explorer: Decider | None
) -> tuple[Growth, tuple[Any, ...], int, bool]:
    """Run some rounds. Return how each of them changes the variables, these, and their number.

    With an explorer, branches of a round are explored in it. The last value says that the loop has
    ended here, or by a traced value may have, which was left aside.
    """
    # What has no value yet grows to none: `None`, or a name that rounds bind.
    begun = [
        at for at, one in enumerate(operands) if one is not None and not begins_unbound((one,))
    ]
    ran, ended, before = 0, False, _sizes([operands[at] for at in begun])
    watches: list[Surroundings] = []
    growth = Growth(peel, why="it has few rounds")
    while not _true(source.is_over(ran, operands)):
        if ran >= peel:
            watches.append(Surroundings(source.functions, operands))
        round_ = partial(source.round, ran, operands)
        stop, operands = explored(explorer, round_, source.functions, operands)
        ran += 1
        for watch in watches:
            watch.note(operands)
        if is_traced(stop):
            ended = True
        elif stop:
            return growth, operands, ran, True
        if len(watches) >= _SEEN_ROUNDS:
            found = watches[-_SEEN_ROUNDS].growth(ran - _SEEN_ROUNDS)
            if not found.why or len(watches) == _SEEN_ROUNDS:
                growth = found
            if not found.why or ran == _SEEN_ROUNDS + 1:
                break
    grew = ended and before != _sizes([operands[at] for at in begun])
    return replace(growth, ends=grew), operands, ran, ended


def explored(
    explorer: Decider | None,
    round_: Callable[[], Any],
    functions: Sequence[Callable[..., Any]],
    operands: Any,
) -> Any:
    """Run a round before the others; with an explorer, its branches are explored in it."""
    if explorer is None:
        return round_()
    held = Surroundings(functions, operands).held
    return explorer.run_inside("round", round_, [operands, *held])


def _true(value: Any) -> bool:
    return is_traced(value) or bool(value)


def _sizes(operands: Any) -> list[Any]:
    """Return the sizes of the tensors among the operands."""
    leaves = pytree.flatten(operands, leaf=branch_leaf, shared=False)[0]
    return [tuple(torch.Tensor.size(leaf)) for leaf in leaves if isinstance(leaf, torch.Tensor)]


def reason(error: Exception) -> str:
    """Return the first line of what an error says."""
    text = error.message if isinstance(error, PortError) else str(error)
    return text.partition("\n")[0]
