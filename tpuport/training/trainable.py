"""The choice of the parameters that a step trains."""

from collections.abc import Sequence

from tpuport.errors import UsageError
from tpuport.model import patterns
from tpuport.model.blocks import at_rest
from tpuport.model.ported import PortedModel


def trained_names(ported: PortedModel, trainable: str | Sequence[str] | None) -> frozenset[str]:
    """Return the names in `params` of the parameters that are trained.

    Raises:
        UsageError: a pattern matches nothing, or a part of a stack.
    """
    if trainable is None:
        return frozenset(ported.params)
    asked = [trainable] if isinstance(trainable, str) else list(trainable)
    if not asked:
        raise UsageError("trainable: expected patterns of parameters, got none")
    members = {name: at_rest.members_of(name) or [name] for name in ported.params}
    every = [member for names in members.values() for member in names]
    patterns.refuse_unmatched(asked, every, "trainable parameter")
    chosen = set()
    for name, names in members.items():
        hits = [any(patterns.matches(one, member) for one in asked) for member in names]
        if any(hits) and not all(hits):
            raise UsageError(
                f"trainable={trainable!r} is about a part of the weights stacked as {name!r}. What"
                " to do: train without tpuport.stack_blocks"
            )
        if any(hits):
            chosen.add(name)
    return frozenset(chosen)
