"""Traversal of the jaxprs within jaxprs."""

from collections.abc import Iterator
from typing import Any

from jax.extend import core

PALLAS = "pallas_call"


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """Yield the jaxprs among an equation's parameters, closed or not."""
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, core.Jaxpr | core.ClosedJaxpr):
                yield one


def sub_jaxprs(eqn: Any) -> Iterator[Any]:
    """Return the jaxprs among an equation's parameters, opened."""
    return map(open_jaxpr, inner_jaxprs(eqn))


def open_jaxpr(jaxpr: Any) -> Any:
    """Return the jaxpr of a closed one, or an open one itself."""
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
