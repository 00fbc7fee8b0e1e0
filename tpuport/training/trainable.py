"""The choice of the parameters that a step trains."""

from collections.abc import Sequence

from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop import name_patterns
from tpuport.model.ported_model import PortedModel
from tpuport.tracing.scan_layers import stacked_params
from tpuport.tracing.state.overlaps import overlapping


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


def refuse_shared_memory(ported: PortedModel) -> None:
    """Refuse parameters that are views of one memory: an update of one would miss the others.

    Raises:
        UsageError: there are two of them.
    """
    every = dict(ported._module.named_parameters())
    trained = {name for one in ported.params for name in stacked_params.members_of(one) or [one]}
    for a, b in overlapping(every):
        if trained & {a, b}:
            raise UsageError(
                f"the parameters {a!r} and {b!r} share memory and are two parameters. What to do:"
                " tie them by assigning the parameter itself (a.weight = b.weight), not its .data"
            )
