"""Branches, loops and checks on values, for rewritten code."""

import functools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from tpuport.foundation.errors import TpuportError
from tpuport.foundation.plain_loops import begins_unbound, bound, looped, unbound_error
from tpuport.ops.numbers import negate, to_bool
from tpuport.ops.traced import is_plain, is_plain_torchax, is_traced


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
        if is_plain(test):
            from tpuport.ops.torchax.control_flow import traced_cond as plain_cond

            return plain_cond(test, then, orelse, operands)
        from tpuport.tracing.control_flow.cond import traced_cond

        return traced_cond(test, then, orelse, operands)
    return then(*operands) if test else orelse(*operands)


def while_loop(
    test: Callable[..., Any],
    body: Callable[..., Any],
    operands: tuple[Any, ...],
    *,
    grows: bool = False,
    stops: bool = False,
    tells: bool = False,
) -> tuple[Any, ...]:
    """Run `while test(*operands): operands = body(*operands)`.

    Args:
        test: Function called with the loop's carried values before each iteration.
        body: Function called in each iteration; returns the carried values as a tuple.
        operands: The carried values at the start, by `if_bound` for what only iterations may bind.
        grows: Whether an iteration makes a tensor longer; it may change Python values, too.
        stops: Whether the body returns, before the carried values, whether the loop goes on.
        tells: Whether to return, after the carried values, whether the test has ended the loop.

    Returns:
        The carried values at the end.

    Raises:
        UnboundLocalError: there is no iteration, and only iterations bind a carried value.
    """
    if stops or tells:
        run = _left_while if stops else _ended_while
        going, *made = run(test, body, operands, grows=grows)
        return (*made, going) if tells else tuple(made)
    if grows and _holds_traced(operands):
        from tpuport.tracing.control_flow.growing_loop import counted_while

        return counted_while(test, body, operands)
    if begins_unbound(operands):
        again = test(*operands)
        if not is_traced(again) and not again:
            return bound(operands)
        check(negate(again), unbound_error)
        operands = _first_iteration(test, body, operands)
    return _bound_while(test, body, operands)


def _bound_while(
    test: Callable[..., Any], body: Callable[..., Any], operands: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Run a loop whose carried values have types before its first iteration."""
    ran = 0
    while True:
        again = test(*operands)
        if is_plain(again):
            from tpuport.ops.torchax.control_flow import traced_while

            return traced_while(test, body, operands)
        if is_traced(again) and not ran:
            from tpuport.tracing.control_flow.while_loop import traced_while

            return traced_while(test, body, operands)
        if is_traced(again) or (again and not ran and _inside_trace()):
            from tpuport.tracing.control_flow.while_loop import begun_while

            made = begun_while(test, body, operands, is_known=not is_traced(again))
            if made is not None:
                return made
        if not again:
            return operands
        operands = body(*operands)
        ran += 1


def _left_while(
    test: Callable[..., Any],
    body: Callable[..., Any],
    operands: tuple[Any, ...],
    *,
    grows: bool,
) -> tuple[Any, ...]:
    """Run a loop whose body returns first whether it goes on, which is carried before the rest."""

    def goes_on(going: Any, *carried: Any) -> Any:
        return both(going, lambda: test(*carried))

    def iteration(going: Any, *carried: Any) -> Any:
        del going
        return body(*carried)

    return while_loop(goes_on, iteration, (True, *operands), grows=grows)


def _ended_while(
    test: Callable[..., Any],
    body: Callable[..., Any],
    operands: tuple[Any, ...],
    *,
    grows: bool,
) -> tuple[Any, ...]:
    """Run a loop that its test alone ends, and return that before the carried values."""
    return (True, *while_loop(test, body, operands, grows=grows))


def _first_iteration(
    test: Callable[..., Any], body: Callable[..., Any], operands: tuple[Any, ...]
) -> tuple[Any, ...]:
    if not _inside_trace():
        return body(*operands)
    from tpuport.tracing.control_flow.while_loop import first_round

    return first_round(test, body, operands)


def _inside_trace() -> bool:
    active = sys.modules.get("tpuport.tracing.core.active")
    return active is not None and active.innermost() is not None


def for_each(
    rows: Any,
    body: Callable[..., Any],
    operands: tuple[Any, ...],
    written: tuple[Any, ...] = (),
) -> tuple[Any, ...]:
    """Run `for row in rows: operands = body(row, *operands)`.

    Args:
        rows: What the loop goes over. The number of a traced tensor's rows may depend on data.
        body: Function called with each row and the loop's carried values; returns these as a tuple.
        operands: The carried values at the start.
        written: Other objects that the body writes to.

    Returns:
        The carried values at the end.
    """
    is_joined = isinstance(rows, (zip, enumerate)) and _inside_trace()
    if is_joined or getattr(rows, "is_traced", False) is True:
        from tpuport.tracing.control_flow.for_rows import traced_for

        return traced_for(rows, body, operands, written)
    for row in rows:
        operands = body(row, *operands)
    return operands


def for_range(
    numbers: range,
    body: Callable[..., Any],
    operands: tuple[Any, ...],
    *,
    stops: bool = False,
    tells: bool = False,
) -> tuple[Any, ...]:
    """Run `for number in numbers: operands = body(number, *operands)`.

    Args:
        numbers: What the loop counts.
        body: Function called with each number and the loop's carried values; returns these as a
            tuple. In a program of many rounds, or of a tensor that each round makes longer, which
            becomes a buffer, the body is compiled once where that is proved to be the same.
        operands: The carried values at the start.
        stops: Whether the body returns, before the carried values, whether the loop ends after it.
        tells: Whether to return, after the carried values, whether the body has ended the loop.

    Returns:
        The carried values at the end.

    Raises:
        UnboundLocalError: there is no iteration, and only iterations bind a carried value.
    """
    if _holds_traced(operands) or _inside_trace():
        from tpuport.tracing.control_flow.growing_loop import traced_range

        return bound(traced_range(numbers, body, operands, stops=stops, tells=tells))
    return bound(looped(numbers, body, operands, stops=stops, tells=tells))


def for_items(
    items: Any,
    body: Callable[..., Any],
    operands: tuple[Any, ...],
    *,
    stops: bool = False,
    tells: bool = False,
) -> tuple[Any, ...]:
    """Run `for item in items: operands = body(item, *operands)`.

    Args:
        items: What the loop goes over. If they are the many rows of a tensor, the body is compiled
            once where that is proved to be the same.
        body: Function called with each item and the loop's carried values; returns these as a
            tuple.
        operands: The carried values at the start.
        stops: Whether the body returns, before the carried values, whether the loop ends after it.
        tells: Whether to return, after the carried values, whether the body has ended the loop.

    Returns:
        The carried values at the end.

    Raises:
        UnboundLocalError: there is no iteration, and only iterations bind a carried value.
    """
    if _inside_trace():
        from tpuport.tracing.control_flow.growing_loop import traced_items

        return bound(traced_items(items, body, operands, stops=stops, tells=tells))
    return bound(looped(items, body, operands, stops=stops, tells=tells))


def _holds_traced(value: Any) -> bool:
    """Return whether a value, or a part of a container, belongs to a trace of tpuport's."""
    if isinstance(value, (list, tuple)):
        return any(_holds_traced(part) for part in value)
    if isinstance(value, dict):
        return any(_holds_traced(part) for part in value.values())
    return is_traced(value) and not is_plain(value)


def check(test: Any, make_error: Callable[[], Any]) -> None:
    """Run `if test: raise make_error()`.

    Args:
        test: Any value with a truth value.
        make_error: Function that returns the exception to raise, or raises it; called only if the
            test is true. A trace calls it once, to know the exception that may be raised.
    """
    if is_traced(test):
        _traced_check(test, partial(_error_of, make_error))
    elif test:
        raise make_error()


def _traced_check(test: Any, make_error: Callable[[], Any]) -> None:
    if is_plain(test):
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

    With a traced `first`, the two truth values are combined if `second` only computes.
    """
    if not is_traced(first):
        return first and second()
    other = _computed(first, second)
    if other is _EFFECTS:
        return cond(first, lambda: to_bool(second()), lambda: False)
    if not is_traced(other):
        return first if other else False
    if _are_truths(first, other):
        return first & other
    return to_bool(first) & to_bool(other)


def either(first: Any, second: Callable[[], Any]) -> Any:
    """Return `first or second()` where only the truth of the result counts, as in a test.

    With a traced `first`, the two truth values are combined if `second` only computes.
    """
    if not is_traced(first):
        return first or second()
    other = _computed(first, second)
    if other is _EFFECTS:
        return cond(first, lambda: True, lambda: to_bool(second()))
    if not is_traced(other):
        return True if other else first
    if _are_truths(first, other):
        return first | other
    return to_bool(first) | to_bool(other)


def first_falsy(first: Any, second: Callable[[], Any]) -> Any:
    """Return `first and second()` where the result itself is used.

    With a traced `first`, one of the two is selected.
    """
    if not is_traced(first):
        return first and second()
    other = _computed(first, second)
    if other is _EFFECTS:
        return cond(first, second, lambda: first)
    if _are_truths(first, other):
        return first & other
    return cond(first, lambda: other, lambda: first)


def first_truthy(first: Any, second: Callable[[], Any]) -> Any:
    """Return `first or second()` where the result itself is used.

    With a traced `first`, one of the two is selected.
    """
    if not is_traced(first):
        return first or second()
    other = _computed(first, second)
    if other is _EFFECTS:
        return cond(first, lambda: first, second)
    if _are_truths(first, other):
        return first | other
    return cond(first, lambda: first, lambda: other)


_EFFECTS = object()


def _computed(first: Any, second: Callable[[], Any]) -> Any:
    """Return `second()`, or `_EFFECTS` where a program has to call it on one side only."""
    if is_plain(first):
        return second()
    from tpuport.tracing.control_flow.cond import Unasked, computed

    value = computed(second)
    return _EFFECTS if value is Unasked.FOUND else value


def _are_truths(*values: Any) -> bool:
    """Return whether all values are 0-d boolean tensors, whose `&` is Python's `and`."""
    import torch

    return all(
        isinstance(value, torch.Tensor) and value.dtype is torch.bool and value.ndim == 0
        for value in values
    )


def largest(*values: Any) -> Any:
    """Return `max(*values)`; if a value is traced, the program compares them.

    One value is what has them, as for Python's `max`.
    """
    return _chosen(values, max, lambda value, best: value > best)


def smallest(*values: Any) -> Any:
    """Return `min(*values)`; if a value is traced, the program compares them.

    One value is what has them, as for Python's `min`.
    """
    return _chosen(values, min, lambda value, best: value < best)


def _chosen(
    values: tuple[Any, ...], choose: Callable[..., Any], is_better: Callable[[Any, Any], Any]
) -> Any:
    if len(values) == 1:
        values = tuple(values[0])
    if not any(is_traced(value) for value in values):
        return choose(values)
    import torch

    if all(type(value) in (int, torch.SymInt) for value in values):
        # Its bounds are known, so that a size of so many is no larger than the smallest of them.
        return functools.reduce({max: torch.sym_max, min: torch.sym_min}[choose], values)
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


def grows(test: Any) -> Any:
    """Return the test of a branch that makes a table in `self` longer.

    Args:
        test: Whether the table is too short.

    Returns:
        The test itself, also under `tpuport.convert`, which decides it from the known sizes. Under
        torchax alone a traced test gives False: the tables of a program keep their sizes, so they
        have to be long enough when it is traced. Past the end of a table that is too short,
        indexing and `gather` read the last row, while `embedding` and `index_select` give NaN;
        with `tpuport.ops.debug_checks` the program raises an `IndexError`.
    """
    if not is_plain_torchax(test) or not is_traced(test):
        return test
    from tpuport.ops.torchax.control_flow import traced_check

    error = IndexError("a table in self is too short, and a program cannot make it longer")
    traced_check(test, lambda: error)
    return False
