"""The trace that runs in this thread, as the modules below `Trace` see it.

Tensors, traced numbers and errors have to reach the running trace, and the trace is made of them.
They ask for it here, by the part of it that they use; everybody else calls
`context.current`.
"""

import threading
from collections.abc import Callable
from types import CodeType
from typing import Any, Protocol

import jax

_LOCAL = threading.local()


class Attempts(Protocol):
    """The part of `speculation.SpeculationLog` that others use."""

    host_state: bool
    draws_on_host: bool
    chooses: bool
    apart: set[str]
    views: set[str]
    drawn_arrays: set[tuple[str, int]]
    varying: set[str]
    loops: dict[Any, Any]
    branching: set[str]
    whole: bool

    def is_new(self, code: CodeType, line: int, column: int | None = None) -> bool:
        """Return whether a line has yet to be rewritten in a function with this code."""
        ...

    def ask_for_rewrite(self) -> None:
        """Request that the line running now be rewritten, the first time it is met."""
        ...


class Decider(Protocol):
    """The part of `path_explorer.Explorer` that modules below it use."""

    branches: dict[str, str]
    calls: list[str]
    units: list[Any]
    unrolled: list[str]

    @property
    def plan(self) -> Attempts:
        """Return what earlier attempts at this trace learned."""
        ...

    def decide(self, value: jax.Array) -> bool:
        """Return the truth of a traced value on the path being explored."""
        ...

    def explore(self, value: jax.Array) -> bool:
        """Return the truth of a traced value that no rewrite of the line can avoid."""
        ...

    def choose(self, value: jax.Array, low: int, high: int) -> int:
        """Return a traced number within bounds, on the path being explored."""
        ...

    def run_module(self, name: str, thunk: Callable[[], Any], roots: list[Any]) -> Any:
        """Run a module call, exploring both outcomes of branches that it takes on traced values."""
        ...

    def run_inside(self, kind: str, thunk: Callable[[], Any], roots: list[Any]) -> Any:
        """Run the body of a jax primitive, in which its branches have to be explored."""
        ...


class BlockTracer(Protocol):
    """The part of `scan_layers.BlockCalls` that modules below it use."""

    members: dict[int, Any]
    records: dict[Any, Any]

    def call(
        self, member: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]
    ) -> Any:
        """Call a block as a function that it shares with the calls that are equal to it."""
        ...

    def release(self) -> None:
        """Drop the tracers that a finished trace still holds."""
        ...


class RefusalRecorder(Protocol):
    """The part of `context.Recorder` that errors use."""

    refusal: Exception | None
    restart: BaseException | None
    text: str | None


class ActiveTrace(Protocol):
    """The part of `context.Trace` that tensors, traced numbers and errors use."""

    effects: list[Any]
    arguments: set[int]
    offsets_read: set[int]
    joins: dict[Any, Any]
    loop_samples: dict[Any, int]
    read_arrays: Any
    makes_error: bool
    regions: list[int]
    closed: bool
    dynamic: bool
    has_numbers: bool

    @property
    def explorer(self) -> Decider | None:
        """Return the decider of branches on traced values; None if they are not explored."""
        ...

    @property
    def recorder(self) -> RefusalRecorder:
        """Return the recorder, which holds what the trace writes down for its caller."""
        ...

    def created(self, storage: Any) -> None:
        """Record a new storage."""
        ...

    def created_number(self, node: Any) -> None:
        """Record a new traced number."""
        ...

    def promote(self, tensor: Any) -> Any:
        """Return what stands for a tensor of the host, whose memory is traced from here on."""
        ...

    def add_leaf(self, tensor: Any) -> str:
        """Record a tensor that `backward()` gives a gradient, and return a name for its value."""
        ...

    def writing(self, storage: Any) -> None:
        """Note a storage about to be written."""
        ...

    @property
    def error_code(self) -> Any:
        """Return where the number of the first failed check is kept; None without checks."""
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
