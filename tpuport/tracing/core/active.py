"""The trace that runs in this thread, as the modules below `Trace` see it.

Tensors, traced numbers and errors have to reach the running trace, and the trace is made of them.
They ask for it here, by the part of it that they use; everybody else calls
`tpuport.tracing.core.context.current`.
"""

import threading
from typing import Any, Protocol

import jax

_LOCAL = threading.local()


class Attempts(Protocol):
    """The part of `plan.Plan` that decisions use."""

    host_state: bool

    def ask_for_rewrite(self) -> None:
        """Request that the line running now be rewritten, the first time it is met."""
        ...


class Decider(Protocol):
    """The part of `explorer.Explorer` that decisions use."""

    @property
    def plan(self) -> Attempts:
        """What earlier attempts at this trace learned."""
        ...

    def decide(self, value: jax.Array) -> bool:
        """Return the truth of a traced value on the path being explored."""
        ...


class ActiveTrace(Protocol):
    """The part of `trace.Trace` that tensors, traced numbers and errors use."""

    refusal: Exception | None
    regions: list[int]
    closed: bool
    dynamic: bool
    has_numbers: bool

    @property
    def explorer(self) -> Decider | None:
        """Decider of branches on traced values, where the program may explore them."""
        ...

    def created(self, storage: Any) -> None:
        """Record a new storage."""
        ...

    def created_number(self, node: Any) -> None:
        """Record a new traced number."""
        ...

    def writing(self, storage: Any) -> None:
        """Note a storage about to be written."""
        ...

    def check(self, failed: jax.Array, error: BaseException, site: str) -> None:
        """Note that the program fails with `error` when `failed`."""
        ...


def innermost() -> ActiveTrace | None:
    """Return the innermost trace running in this thread, if any."""
    stack = getattr(_LOCAL, "stack", None)
    return stack[-1] if stack else None


def push(trace: ActiveTrace) -> None:
    """Make a trace the innermost one of this thread."""
    stack = getattr(_LOCAL, "stack", None)
    if stack is None:
        stack = _LOCAL.stack = []
    stack.append(trace)


def pop() -> None:
    """Leave the innermost trace of this thread."""
    _LOCAL.stack.pop()
