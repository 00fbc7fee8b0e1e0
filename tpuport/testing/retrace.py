"""Counts how often a function is traced, and names the argument that made it happen again."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

Signature = dict[str, str]


class RetraceError(AssertionError):
    """A function that was traced more often than it should be."""


class TraceCounter:
    """Counts the calls of a function; under `jax.jit` or `tpuport.convert` those are its traces.

    Args:
        function: The function to call. Hand the counter, or `counted`, to what traces it.

    Attributes:
        signatures: What each call was given, by path such as `args[0]` or `kwargs['mask'].x`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.signatures: list[Signature] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and note what with."""
        self.signatures.append(signature(args, kwargs))
        return self.function(*args, **kwargs)

    @property
    def counted(self) -> Callable[..., Any]:
        """The counter as a plain function, for callers that insist on one."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return counted

    @property
    def count(self) -> int:
        """How often the function was called."""
        return len(self.signatures)

    def check(self, at_most: int = 1) -> None:
        """Make sure that the function was not called more often than expected.

        Raises:
            RetraceError: it was; the message says what differed between the last two calls.
        """
        if self.count <= at_most:
            return
        changes = differences(*self.signatures[-2:])
        reason = "; ".join(changes) or "its arguments are the same as before"
        raise RetraceError(
            f"Expected {at_most} trace(s), got {self.count}. In the last one: {reason}."
        )


def signature(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
    """What tracing depends on: dtype and shape of tensors and arrays, other values as they are."""
    leaves = [*_leaves("args", list(args)), *_leaves("kwargs", dict(kwargs))]
    return {path: _describe(value) for path, value in leaves}


def differences(before: Signature, after: Signature) -> list[str]:
    """What changed between two calls, one sentence for each path."""
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
