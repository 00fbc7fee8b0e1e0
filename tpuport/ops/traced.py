"""Which values are traced, and by whom. Imports no framework."""

import sys
from typing import Any


def is_traced(value: Any) -> bool:
    """Return whether a value is traced: a tensor or number of a program being traced."""
    if getattr(value, "is_traced", False) is True:
        return True
    return getattr(getattr(value, "node", None), "is_traced", False) is True or is_plain(value)


def is_plain(value: Any) -> bool:
    """Return whether a value is a tensor that torchax alone traces."""
    if not is_plain_torchax(value):
        return False
    array = value.source_jax() if hasattr(value, "source_jax") else value.jax()
    return isinstance(array, sys.modules["jax"].core.Tracer)


def is_plain_torchax(value: Any) -> bool:
    """Return whether a value is a torchax tensor that tpuport does not trace."""
    if not type(value).__module__.startswith("torchax."):
        return False
    return hasattr(value, "jax") and getattr(value, "is_traced", False) is not True
