"""Helpers that rewritten code calls where the original asked a tensor for its value.

In eager PyTorch every function here does exactly what the Python statement that it replaces does.
With a traced value it passes the decision to the program that is being traced, whether
`tpuport.convert` traces it or torchax alone does under `jax.jit`. Nothing is imported until a
traced value is met.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from tpuport.foundation.errors import TpuportError
from tpuport.ops.attention import attention
from tpuport.ops.device import cuda
from tpuport.ops.filled import filled
from tpuport.ops.masked import (
    count_elements,
    count_rows,
    inverse,
    masked,
    masked_select,
    mismatched,
    rowwise,
)
from tpuport.ops.state import grows

__all__ = [
    "are_checks_on",
    "attention",
    "both",
    "check",
    "cond",
    "count_elements",
    "count_rows",
    "cuda",
    "debug_checks",
    "either",
    "filled",
    "first_falsy",
    "first_truthy",
    "grows",
    "inverse",
    "is_traced",
    "item",
    "largest",
    "masked",
    "masked_select",
    "mismatched",
    "negate",
    "passes",
    "report",
    "rowwise",
    "smallest",
    "to_bool",
    "to_cpu",
    "to_float",
    "to_int",
    "to_list",
    "validate_args",
    "while_loop",
]


def is_traced(value: Any) -> bool:
    """Return whether a value is traced: a tensor or number of a program being traced."""
    if getattr(value, "is_traced", False) is True:
        return True
    return getattr(getattr(value, "node", None), "is_traced", False) is True or _is_plain(value)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a tensor that torchax alone traces."""
    torchax = sys.modules.get("torchax.tensor")
    if torchax is None or not isinstance(value, torchax.Tensor | torchax.View):
        return False
    if hasattr(value, "is_traced"):
        return False
    array = value.source_jax() if isinstance(value, torchax.View) else value.jax()
    return isinstance(array, torchax.jax.core.Tracer)


_checks_on: ContextVar[bool] = ContextVar("_checks_on", default=False)


@contextlib.contextmanager
def debug_checks() -> Iterator[None]:
    """Make programs that torchax alone traces in this context check their tests when they run.

    Otherwise such programs drop the checks. A program of `tpuport.convert` always checks.
    """
    token = _checks_on.set(True)
    try:
        yield
    finally:
        _checks_on.reset(token)


def are_checks_on() -> bool:
    """Return whether the program that torchax alone traces now keeps its checks."""
    return _checks_on.get()


def cond(
    test: Any,
    then: Callable[..., Any],
    orelse: Callable[..., Any],
    operands: tuple[Any, ...] = (),
) -> Any:
    """Return `then(*operands) if test else orelse(*operands)`.

    Args:
        test: Any value with a truth value; a traced one needs exactly one element.
        then: Function called with the operands if the test is true.
        orelse: Function called with the operands if the test is false.
        operands: The variables that a branch may change.

    Returns:
        The result of the branch that is taken. Under a traced test both branches are traced and
        must return the same structure, shapes and dtypes.
    """
    if is_traced(test):
        if _is_plain(test):
            from tpuport.ops.torchax.control_flow import traced_cond
        else:
            from tpuport.tracing.control_flow.cond import traced_cond

        return traced_cond(test, then, orelse, operands)
    return then(*operands) if test else orelse(*operands)


def while_loop(
    test: Callable[..., Any], body: Callable[..., Any], operands: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Run `while test(*operands): operands = body(*operands)`.

    Args:
        test: Function called with the loop's carried values before each iteration.
        body: Function called in each iteration; returns the carried values as a tuple.
        operands: The carried values at the start.

    Returns:
        The carried values at the end.
    """
    while True:
        again = test(*operands)
        if is_traced(again):
            if _is_plain(again):
                from tpuport.ops.torchax.control_flow import traced_while
            else:
                from tpuport.tracing.control_flow.while_loop import traced_while

            return traced_while(test, body, operands)
        if not again:
            return operands
        operands = body(*operands)


def check(test: Any, make_error: Callable[[], Any]) -> None:
    """Run `if test: raise make_error()`.

    Args:
        test: Any value with a truth value.
        make_error: Function that returns the exception to raise, or raises it; called only if the
            test is true. A trace calls it once, to know the exception that may be raised.
    """
    if is_traced(test):
        _traced_check(test, lambda: _error_of(make_error))
    elif test:
        raise make_error()


def _traced_check(test: Any, make_error: Callable[[], Any]) -> None:
    if _is_plain(test):
        from tpuport.ops.torchax.control_flow import traced_check
    else:
        from tpuport.tracing.control_flow.cond import traced_check
    traced_check(test, make_error)


def _error_of(make_error: Callable[[], Any]) -> Any:
    """Return the exception that a function returns or raises; pass on tpuport's own errors."""
    try:
        return make_error()
    except TpuportError:
        raise
    except Exception as error:  # this is what the user's code raises when the check fails
        return error


def report(test: Any, action: Callable[[], Any]) -> None:
    """Run `if test: action()`, for an action that only prints, warns or logs.

    Args:
        test: Any value with a truth value. Under a traced one nothing is reported.
        action: Function called only if the test is true.
    """
    if is_traced(test):
        _traced_check(test, lambda: None)
    elif test:
        action()


def passes(test: Any, make_message: Callable[[], Any] | None = None) -> bool:
    """Return True, or raise what `assert test, make_message()` raises.

    Args:
        test: Any value with a truth value.
        make_message: Function that returns the assertion's message; called only on failure.

    Returns:
        True. A traced test is checked when the program runs.

    Raises:
        AssertionError: the test is false.
    """

    def make_error() -> AssertionError:
        return AssertionError() if make_message is None else AssertionError(make_message())

    if is_traced(test):
        check(negate(test), make_error)
    elif not test:
        raise make_error()
    return True


def both(first: Any, second: Callable[[], Any]) -> Any:
    """Return `first and second()` where only the truth of the result counts, as in a test.

    With a traced `first`, `second` is always computed and the two truth values are combined.
    """
    if not is_traced(first):
        return first and second()
    other = second()
    if not is_traced(other):
        return first if other else False
    if _are_truths(first, other):
        return first & other
    return to_bool(first) & to_bool(other)


def either(first: Any, second: Callable[[], Any]) -> Any:
    """Return `first or second()` where only the truth of the result counts, as in a test.

    With a traced `first`, `second` is always computed and the two truth values are combined.
    """
    if not is_traced(first):
        return first or second()
    other = second()
    if not is_traced(other):
        return True if other else first
    if _are_truths(first, other):
        return first | other
    return to_bool(first) | to_bool(other)


def first_falsy(first: Any, second: Callable[[], Any]) -> Any:
    """Return `first and second()` where the result itself is used.

    With a traced `first`, `second` is always computed and one of the two is selected.
    """
    if not is_traced(first):
        return first and second()
    other = second()
    if _are_truths(first, other):
        return first & other
    return cond(first, lambda: other, lambda: first)


def first_truthy(first: Any, second: Callable[[], Any]) -> Any:
    """Return `first or second()` where the result itself is used.

    With a traced `first`, `second` is always computed and one of the two is selected.
    """
    if not is_traced(first):
        return first or second()
    other = second()
    if _are_truths(first, other):
        return first | other
    return cond(first, lambda: first, lambda: other)


def _are_truths(*values: Any) -> bool:
    """Return whether all values are 0-d boolean tensors, whose `&` is Python's `and`."""
    import torch

    return all(
        isinstance(value, torch.Tensor) and value.dtype is torch.bool and value.ndim == 0
        for value in values
    )


def negate(value: Any) -> Any:
    """Return `not value`."""
    if not is_traced(value):
        return not value
    if _is_plain(value):
        from tpuport.ops.torchax.control_flow import traced_not

        return traced_not(value)
    import torch

    return torch.sym_not(to_bool(value))


def to_float(value: Any) -> Any:
    """Return `float(value)`; for a traced tensor, a traced number."""
    return _number(value, float)


def to_int(value: Any) -> Any:
    """Return `int(value)`; for a traced tensor, a traced number."""
    return _number(value, int)


def to_bool(value: Any) -> Any:
    """Return `bool(value)`; for a traced tensor, a traced truth value."""
    return _number(value, bool)


def _number(value: Any, kind: type) -> Any:
    if is_traced(value):
        if _is_plain(value):
            from tpuport.ops.torchax.control_flow import traced_number
        else:
            from tpuport.tracing.control_flow.cond import traced_number

        return traced_number(value, kind)
    return kind(value)


def item(value: Any) -> Any:
    """Return `value.item()`; for a traced tensor, a traced number."""
    if _is_plain(value):
        from tpuport.ops.torchax import control_flow

        return control_flow.item(value)
    return value.item()


def to_list(value: Any) -> Any:
    """Return `value.tolist()`; for a traced tensor, nested lists of traced numbers."""
    if _is_plain(value):
        from tpuport.ops.torchax import control_flow

        return control_flow.to_list(value)
    return value.tolist()


def to_cpu(value: Any) -> Any:
    """Return `value.cpu()`; a traced tensor stays on its device, in the program."""
    return value if _is_plain(value) else value.cpu()


def largest(*values: Any) -> Any:
    """Return `max(*values)`; if a value is traced, the program compares them."""
    return _chosen(values, max, lambda value, best: value > best)


def smallest(*values: Any) -> Any:
    """Return `min(*values)`; if a value is traced, the program compares them."""
    return _chosen(values, min, lambda value, best: value < best)


def _chosen(
    values: tuple[Any, ...], choose: Callable[..., Any], is_better: Callable[[Any, Any], Any]
) -> Any:
    if not any(is_traced(value) for value in values):
        return choose(*values)
    best, *others = values
    for value in others:
        best = _selected(is_better(value, best), value, best)
    return best


def _selected(test: Any, value: Any, best: Any) -> Any:
    """Return `value if test else best`; under a traced test, a tensor if either is one."""
    import torch

    tensors = [isinstance(part, torch.Tensor) for part in (value, best)]
    if is_traced(test) and any(tensors) and not all(tensors):
        return torch.where(test, value, best)
    return cond(test, lambda: value, lambda: best)


def validate_args(*values: Any) -> bool | None:
    """Return what to pass as `validate_args` to a distribution of `torch.distributions`.

    Args:
        values: The parameters of the distribution.

    Returns:
        None, which selects PyTorch's default; False if a parameter is traced, because a check
        would need its value.
    """
    return False if any(map(is_traced, values)) else None
