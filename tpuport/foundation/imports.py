"""Imports on first use, which may come after the user's code has seeded its random numbers."""

import importlib
import random
import sys
from types import ModuleType


def imported(name: str) -> ModuleType:
    """Import a module, and leave the random numbers of Python and numpy as they were.

    `jax` draws five of numpy's when it is imported, and `rich` some of Python's, so that a script
    with `tpuport.convert` after its seeds would shuffle its data in another order.
    """
    before = random.getstate()
    numpy = sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()
    try:
        return importlib.import_module(name)
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(drawn)
