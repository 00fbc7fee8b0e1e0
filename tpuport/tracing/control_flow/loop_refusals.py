"""The refusals of loops that cannot be one program."""

from tpuport.foundation.errors import PortError
from tpuport.tracing.core.errors import port_error

_CANNOT = "the loop cannot be one program: "


def no_ends(why: str, site: str) -> PortError:
    """Return the refusal of a loop that a traced value ends, with a tensor of unknown length."""
    return port_error(
        "a loop that a traced value ends, and whose tensors or lists grow, cannot be one program:"
        f" {why.removeprefix(_CANNOT)}",
        code="TPU612",
        place=site,
        remedy="write the results into a tensor that has its full size before the loop, or look for"
        " the end on the host, between calls of a program of some rounds",
    )


def no_count(why: str, site: str | None = None) -> PortError:
    """Return the refusal of a loop over a range whose end depends on data."""
    return port_error(
        "a loop over a range whose end depends on data cannot be one program:"
        f" {why.removeprefix(_CANNOT)}",
        code="TPU104",
        place=site,
        remedy="let each round do the same to tensors of one size, or append to a list that"
        " torch.stack or torch.cat joins after the loop",
    )


def unproved(why: str) -> PortError:
    """Return what keeps a loop from being one program."""
    return port_error(
        f"{_CANNOT}{why}",
        code="TPU104",
        remedy="write the results into a tensor that has its full size before the loop",
    )
