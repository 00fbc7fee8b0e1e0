"""Calls that register parameters, as code does that learns its sizes from its first input."""

from tpuport.foundation.errors import PortError
from tpuport.tracing.state.request import TraceResult


class NewParameters(PortError):
    """A call registers parameters: it runs in eager PyTorch, and later ones can be programs."""


def refuse_new_parameters(outcome: TraceResult) -> None:
    """Refuse a program that registers parameters, which would be none of the user's module.

    Raises:
        NewParameters: the call registers one, or another one under a name that it has.
    """
    names = [name for leaf in outcome.new_leaves if leaf.is_parameter for name in leaf.state]
    if outcome.python_changes is not None:
        names += outcome.python_changes.parameters
    if names:
        raise NewParameters(
            f"the call registers the parameter {min(names)!r}",
            code="TPU405",
            remedy="register it in __init__, or call the module once in eager PyTorch before it is"
            " ported, so that the parameter is there",
        )
