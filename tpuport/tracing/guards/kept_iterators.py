"""Iterators that a module keeps: a call that advances one gives another result each time."""

from tpuport.foundation.errors import PortError
from tpuport.tracing.core.errors import port_error


def advances_iterator() -> PortError:
    """Return the refusal of a call that advances an iterator of its module.

    A trace, and the run of eager PyTorch that it is compared with, would advance the user's own.
    """
    return port_error(
        "the call advances an iterator that the module keeps; a program would give the item of its"
        " trace at every call",
        code="TPU405",
        remedy="keep a number or a buffer that counts (self.step += 1), and take the item by it; or"
        " leave the class to eager PyTorch: `tpuport run --eager NAME`",
    )
