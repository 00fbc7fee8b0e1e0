"""Counter of a function's traces, which names the argument that caused a retrace."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

Signature = dict[str, str]


class RetraceError(AssertionError):
    """Raised when a function was traced more often than expected."""


class TraceCounter:
    """Counter of calls of a function; under `jax.jit` or `tpuport.convert` those are its traces.

    Args:
        function: The function to call. Pass the counter, or `counted`, to the tracing code.

    Attributes:
        signatures: The arguments of each call by path, such as `args[0]` or `kwargs['mask'].x`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.signatures: list[Signature] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the arguments, and call the function."""
        self.signatures.append(signature(args, kwargs))
        return self.function(*args, **kwargs)

    @property
    def counted(self) -> Callable[..., Any]:
        """Return the counter as a plain function, for callers that require one."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return counted

    @property
    def count(self) -> int:
        """Return the number of calls."""
        return len(self.signatures)

    def check(self, at_most: int = 1) -> None:
        """Check that the function was not called more often than expected.

        Raises:
            RetraceError: it was; the message names the differences between the last two calls.
        """
        if self.count <= at_most:
            return
        changes = differences(*self.signatures[-2:])
        reason = "; ".join(changes) or "its arguments are the same as before"
        raise RetraceError(
            f"Expected {at_most} trace(s), got {self.count}. In the last one: {reason}."
        )


def signature(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
    """Describe arguments as tracing sees them: dtype and shape of arrays, other values by repr."""
    leaves = [*_leaves("args", list(args)), *_leaves("kwargs", dict(kwargs))]
    return {path: _describe(value) for path, value in leaves}


def differences(before: Signature, after: Signature) -> list[str]:
    """Describe the changes between two calls, one clause for each path."""
    changed: list[str] = []
    for path in {**before, **after}:
        old, new = before.get(path, "absent"), after.get(path, "absent")
        if old != new:
            changed.append(f"{path} was {old}, now {new}")
    return changed


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(f"{path}[{index}]", item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _leaves(f"{path}.{field.name}", getattr(value, field.name))
    else:
        yield path, value


def _describe(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return repr(value)
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
