"""First calls of a ported run whose gradients are left to the comparison of the runs."""

import contextlib
from collections.abc import Iterator
from typing import Any

from tpuport.model.parity.gradients import left_out

LEFT = "tpuport.verify.left_gradients:left_to_comparison"


@contextlib.contextmanager
def left_to_comparison(settings: dict[str, Any]) -> Iterator[None]:
    """Let first calls in the block compare values only: gradients of the runs are compared too."""
    del settings
    with left_out():
        yield
