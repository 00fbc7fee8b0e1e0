"""Replacements of `PORTING` scope that are torch's own again outside of every context."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from tpuport.running.settings import active
from tpuport.shim import Replacement


def inside(eager: Any, ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours` in a porting context, else `eager`: user code keeps what it imported."""

    @functools.wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (eager if active() is None else ours)(*args, **kwargs)

    call.__name__ = getattr(eager, "__name__", ours.__name__)
    return call


def functions(owner: Any, table: Mapping[str, Callable[..., Any]]) -> list[Replacement]:
    """A replacement of each function of a module that this torch has."""
    return [
        Replacement(owner, name, inside(getattr(owner, name), ours))
        for name, ours in table.items()
        if hasattr(owner, name)
    ]
