"""Replacements of `PORTING` scope that call torch's own function outside of every context."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from tpuport.compat.emulated.settings import active
from tpuport.foundation.patching.shim import Replacement


def inside(eager: Any, ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `ours` in a porting context, else `eager`."""

    # The choice is made at each call: user code keeps the function that it imported in a context.
    @functools.wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (eager if active() is None else ours)(*args, **kwargs)

    call.__name__ = getattr(eager, "__name__", ours.__name__)
    return call


def functions(owner: Any, table: Mapping[str, Callable[..., Any]]) -> list[Replacement]:
    """Return a replacement of each function in the table that this torch has."""
    return [
        Replacement(owner, name, inside(getattr(owner, name), ours))
        for name, ours in table.items()
        if hasattr(owner, name)
    ]
