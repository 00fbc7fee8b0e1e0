"""Imports on first use, which may come after the user's code has seeded its random numbers."""

import gc
import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn garbage collection off inside.

    A collection of the oldest generation visits all objects that imports made, which takes longer
    than tracing a large model. A trace leaves few cycles, and they are collected afterwards.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """Turn garbage collection off inside, where large packages are imported.

    What they make stays. To look through it again and again took a quarter of the time of importing
    torch and jax.
    """
    with uncollected():
        try:
            yield
        finally:
            # To the oldest generation: the first collection would look through all of it else.
            if gc.get_freeze_count() == 0:
                gc.freeze()
                gc.unfreeze()


def imported(name: str) -> ModuleType:
    """Import a module, and leave the random numbers of Python and numpy as they were.

    `jax` draws five of numpy's when it is imported, and `rich` some of Python's, so that a script
    with `tpuport.convert` after its seeds would shuffle its data in another order.
    """
    before = random.getstate()
    numpy = sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()
    try:
        with importing():
            return importlib.import_module(name)
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(drawn)
