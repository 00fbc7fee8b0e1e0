"""`tpuport.stack_blocks`: the weights of a model's repeated blocks as one array each."""

from tpuport.foundation.errors import UsageError
from tpuport.model.ported_state import PortedState
from tpuport.tracing.scan_layers.stacked_params import members_of, stack_names, stacked_leaf


def stack_blocks(ported: PortedState) -> list[str]:
    """Keep the weights of a model's repeated blocks as one array each, in place.

    On TPU the blocks are then one loop that reads the stacks without copying them, and a program
    compiles in the time of one block. `params` and `buffers` have the stacks by name
    (`layers[0:32].up.weight`). `ported.by_fqn()`, `to_torch()` and checkpoints still have each
    weight by its own fqn.

    Args:
        ported: The result of `tpuport.convert`. Load its weights and `tpuport.shard` it before.

    Returns:
        The names of the stacks; empty if no neighbours in a list of modules are alike.

    Raises:
        UsageError: The argument is no ported module.
    """
    if not isinstance(ported, PortedState):
        raise UsageError(
            f"stack_blocks takes what tpuport.convert gives; got a {type(ported).__name__}. What to"
            " do: tpuport.stack_blocks(tpuport.convert(model))"
        )
    names = stack_names(ported._module)
    made: list[str] = []
    for values in (ported.params, ported.buffers):
        for name in names:
            members = members_of(name)
            if all(member in values for member in members):
                # One at a time: the parts are dropped before the next stack is made.
                values[name] = stacked_leaf([values.pop(member) for member in members])
                made.append(name)
    ported._new_version()
    return made
