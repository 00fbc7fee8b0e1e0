"""The choice of the parameters that a step trains."""

from collections.abc import Sequence

from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop import name_patterns
from tpuport.model.ported_model import PortedModel
from tpuport.tracing.scan_layers import stacked_params


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
    members = {name: stacked_params.members_of(name) or [name] for name in ported.params}
    every = [member for names in members.values() for member in names]
    name_patterns.refuse_unmatched(asked, every, "trainable parameter")
    chosen = set()
    for name, names in members.items():
        hits = [any(name_patterns.matches(one, member) for one in asked) for member in names]
        if any(hits) and not all(hits):
            raise UsageError(
                f"trainable={trainable!r} is about a part of the weights stacked as {name!r}. What"
                " to do: train without tpuport.stack_blocks"
            )
        if any(hits):
            chosen.add(name)
    return frozenset(chosen)
