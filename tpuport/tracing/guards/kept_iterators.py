"""Iterators that a module keeps: a call that advances one gives another result each time."""

from typing import Any

from tpuport.foundation.pytree.kept_iterators import KeptIterator, is_kept
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.guards.host_randomness import reached


def stand_ins(module: Any) -> dict[int, KeptIterator]:
    """Return what stands for the iterators of a module in a copy of it, by their ids.

    A trace, and the run of eager PyTorch that it is compared with, would advance the user's own.
    """
    found: dict[int, KeptIterator] = {}
    for one in filter(is_kept, reached([module])):
        made = one if isinstance(one, KeptIterator) else KeptIterator(one, _refusal)
        found[id(made.of)] = made
    return found


def _refusal() -> Exception:
    return port_error(
        "the call advances an iterator that the module keeps; a program would give the item of its"
        " trace at every call",
        code="TPU405",
        remedy="keep a number or a buffer that counts (self.step += 1), and take the item by it; or"
        " leave the class to eager PyTorch: `tpuport run --eager NAME`",
    )
