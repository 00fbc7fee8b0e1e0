"""The refusals of loops that cannot be one program."""

from tpuport.foundation.errors import PortError
from tpuport.tracing.control_flow.growth import Growth
from tpuport.tracing.control_flow.loop_sources import CountedSource, Source
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.loop_sites import not_whole

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


def refuse_rounds(source: Source, growth: Growth, whole: bool, site: str) -> None:
    """Refuse a loop that cannot be one program, if its rounds cannot be compiled one by one."""
    if isinstance(source, CountedSource):
        raise no_count(growth.why, site)
    if whole:
        raise not_whole(growth.why, site)
    if growth.ends:
        raise no_ends(growth.why, site)
