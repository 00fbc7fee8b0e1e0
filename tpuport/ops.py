"""What rewritten code calls where the original asked a tensor for its value.

In eager PyTorch every function here does exactly what the Python statement that it replaces does.
With a traced value it hands the decision to the program that is being traced, whether
`tpuport.convert` traces it or torchax alone does under `jax.jit`. Nothing is imported until a
traced value is met.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from tpuport.errors import TpuportError
from tpuport.ops_attention import attention
from tpuport.ops_device import cuda
from tpuport.ops_filled import filled
from tpuport.ops_masked import (
    count_elements,
    count_rows,
    inverse,
    masked,
    masked_select,
    mismatched,
    rowwise,
)
from tpuport.ops_state import grows

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
    """Whether a value belongs to a program being traced: a traced tensor or a traced number."""
    if getattr(value, "is_traced", False) is True:
        return True
    return getattr(getattr(value, "node", None), "is_traced", False) is True or _is_plain(value)


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor that torchax alone traces."""
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
    """Make programs that torchax alone traces in this context do their checks when they run.

    Otherwise they drop them. A program of `tpuport.convert` always checks.
    """
    token = _checks_on.set(True)
    try:
        yield
    finally:
        _checks_on.reset(token)


def are_checks_on() -> bool:
    """Whether the program being traced by torchax alone does its checks."""
    return _checks_on.get()


def cond(
    test: Any,
    then: Callable[..., Any],
    orelse: Callable[..., Any],
    operands: tuple[Any, ...] = (),
) -> Any:
    """`then(*operands) if test else orelse(*operands)`.

    Args:
        test: Any value with a truth; a traced one needs exactly one element.
        then: Called with the operands if the test holds.
        orelse: Called with the operands if it does not.
        operands: The variables that a side may change.

    Returns:
        What the side that is taken returns. Under a traced test both sides are traced and must
        return the same structure, shapes and dtypes.
    """
    if is_traced(test):
        if _is_plain(test):
            from tpuport.model.plain_torchax import traced_cond
        else:
            from tpuport.model.branching import traced_cond

        return traced_cond(test, then, orelse, operands)
    return then(*operands) if test else orelse(*operands)


def while_loop(
    test: Callable[..., Any], body: Callable[..., Any], operands: tuple[Any, ...]
) -> tuple[Any, ...]:
    """`while test(*operands): operands = body(*operands)`.

    Args:
        test: Called before each round with what the loop carries.
        body: Called in each round; returns what the loop carries as a tuple.
        operands: What the loop carries when it starts.

    Returns:
        What the loop carries when it ends.
    """
    while True:
        again = test(*operands)
        if is_traced(again):
            if _is_plain(again):
                from tpuport.model.plain_torchax import traced_while
            else:
                from tpuport.model.looping import traced_while

            return traced_while(test, body, operands)
        if not again:
            return operands
        operands = body(*operands)


def check(test: Any, make_error: Callable[[], Any]) -> None:
    """`if test: raise make_error()`.

    Args:
        test: Any value with a truth.
        make_error: Called only if the test holds. It returns the exception to raise, or raises it.
            While tracing it is called once, to know the exception that the program may raise.
    """
    if is_traced(test):
        _traced_check(test, lambda: _error_of(make_error))
    elif test:
        raise make_error()


def _traced_check(test: Any, make_error: Callable[[], Any]) -> None:
    if _is_plain(test):
        from tpuport.model.plain_torchax import traced_check
    else:
        from tpuport.model.branching import traced_check
    traced_check(test, make_error)


def _error_of(make_error: Callable[[], Any]) -> Any:
    """The exception that a function returns or raises; our own errors are not the user's."""
    try:
        return make_error()
    except TpuportError:
        raise
    except Exception as error:  # this is what the user's code raises when the check fails
        return error


def report(test: Any, action: Callable[[], Any]) -> None:
    """`if test: action()`, for an action that only prints, warns or logs.

    Args:
        test: Any value with a truth. Under a traced one nothing is reported.
        action: Called only if the test holds.
    """
    if is_traced(test):
        _traced_check(test, lambda: None)
    elif test:
        action()


def passes(test: Any, make_message: Callable[[], Any] | None = None) -> bool:
    """What `assert` asks in place of `assert test, make_message()`.

    Args:
        test: Any value with a truth.
        make_message: Makes the assertion's message; called only if the test does not hold.

    Returns:
        True. A traced test is checked when the program runs.

    Raises:
        AssertionError: the test does not hold.
    """

    def make_error() -> AssertionError:
        return AssertionError() if make_message is None else AssertionError(make_message())

    if is_traced(test):
        check(negate(test), make_error)
    elif not test:
        raise make_error()
    return True


def both(first: Any, second: Callable[[], Any]) -> Any:
    """`first and second()` where only the truth of the result counts, as in a test.

    With a traced `first` the second is always computed, and the two truths are combined.
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
    """`first or second()` where only the truth of the result counts, as in a test.

    With a traced `first` the second is always computed, and the two truths are combined.
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
    """`first and second()` where the result itself is used.

    With a traced `first` the second is always computed, and one of the two is selected.
    """
    if not is_traced(first):
        return first and second()
    other = second()
    if _are_truths(first, other):
        return first & other
    return cond(first, lambda: other, lambda: first)


def first_truthy(first: Any, second: Callable[[], Any]) -> Any:
    """`first or second()` where the result itself is used.

    With a traced `first` the second is always computed, and one of the two is selected.
    """
    if not is_traced(first):
        return first or second()
    other = second()
    if _are_truths(first, other):
        return first | other
    return cond(first, lambda: first, lambda: other)


def _are_truths(*values: Any) -> bool:
    """Whether values are 0-d boolean tensors, whose `&` is the `and` of Python."""
    import torch

    return all(
        isinstance(value, torch.Tensor) and value.dtype is torch.bool and value.ndim == 0
        for value in values
    )


def negate(value: Any) -> Any:
    """`not value`."""
    if not is_traced(value):
        return not value
    if _is_plain(value):
        from tpuport.model.plain_torchax import traced_not

        return traced_not(value)
    import torch

    return torch.sym_not(to_bool(value))


def to_float(value: Any) -> Any:
    """`float(value)`; of a traced tensor a number that is still part of the program."""
    return _number(value, float)


def to_int(value: Any) -> Any:
    """`int(value)`; of a traced tensor a number that is still part of the program."""
    return _number(value, int)


def to_bool(value: Any) -> Any:
    """`bool(value)`; of a traced tensor a truth that is still part of the program."""
    return _number(value, bool)


def _number(value: Any, kind: type) -> Any:
    if is_traced(value):
        if _is_plain(value):
            from tpuport.model.plain_torchax import traced_number
        else:
            from tpuport.model.branching import traced_number

        return traced_number(value, kind)
    return kind(value)


def item(value: Any) -> Any:
    """`value.item()`; of a traced tensor a number that is still part of the program."""
    if _is_plain(value):
        from tpuport.model import plain_torchax

        return plain_torchax.item(value)
    return value.item()


def to_list(value: Any) -> Any:
    """`value.tolist()`; of a traced tensor nested lists of numbers that are still part of it."""
    if _is_plain(value):
        from tpuport.model import plain_torchax

        return plain_torchax.to_list(value)
    return value.tolist()


def to_cpu(value: Any) -> Any:
    """`value.cpu()`; a traced tensor stays part of the program."""
    return value if _is_plain(value) else value.cpu()


def largest(*values: Any) -> Any:
    """`max(*values)`; compared in the program if one of them is traced."""
    return _chosen(values, max, lambda value, best: value > best)


def smallest(*values: Any) -> Any:
    """`min(*values)`; compared in the program if one of them is traced."""
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
    """`value if test else best`; of a tensor and a number a tensor, since a program has to say."""
    import torch

    tensors = [isinstance(part, torch.Tensor) for part in (value, best)]
    if is_traced(test) and any(tensors) and not all(tensors):
        return torch.where(test, value, best)
    return cond(test, lambda: value, lambda: best)


def validate_args(*values: Any) -> bool | None:
    """What to pass for `validate_args` to a distribution of `torch.distributions`.

    Args:
        values: Its parameters.

    Returns:
        None, which asks for PyTorch's default; False if a parameter is traced, because a check
        would need its value.
    """
    return False if any(map(is_traced, values)) else None
