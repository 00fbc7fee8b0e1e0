"""Concrete answers that Python needs of a traced value: its truth, a number, a raised error."""

import dis
import functools
import math
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import jax
import jax.core

from tpuport.foundation.user_frames import is_inside, user_frame, user_line
from tpuport.source.rewrite.text_use import is_looked_at
from tpuport.tracing.core.active import innermost
from tpuport.tracing.core.errors import inside_try, port_error
from tpuport.tracing.core.speculation import RestartTrace


def decide(value: jax.Array) -> bool:
    """Return the truth of a 0-d jax value: of a traced one, its outcome on the explored path.

    Raises:
        PortError: the value is traced and nothing can explore it here.
    """
    if not isinstance(value, jax.core.Tracer):
        return bool(value)
    trace = innermost()
    if trace is None or trace.explorer is None:
        raise port_error(
            "the truth of a traced value was asked for (if, while, assert, and, not)",
            code="TPU101",
            remedy="use torch.where for a choice between tensors, or decide by a Python value",
        )
    return trace.explorer.decide(value)


def identity_is_asked() -> bool:
    """Return whether running code of the user's has `is True`, `is False` or such a `case`.

    A traced truth value is not the object True, so such code needs the truth itself.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if _asks_identity(frame.f_code) and not is_inside(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


@functools.cache
def _asks_identity(code: CodeType) -> bool:
    steps = list(dis.get_instructions(code))
    return any(
        step.opname == "IS_OP" and any(isinstance(s.argval, bool) for s in steps[max(i - 2, 0) : i])
        for i, step in enumerate(steps)
    )


def raise_if(failed: Callable[[], Any] | jax.Array, error: BaseException) -> None:
    """Raise an error where `failed` (or what it returns) holds, as eager does.

    It is a lifted check, or a branch where the user's code catches the exception.
    """
    trace = innermost()
    assert trace is not None
    is_caught = inside_try(error) is not None
    if not is_caught and trace.error_code is None:
        return
    value = failed() if callable(failed) else failed
    if not isinstance(value, jax.core.Tracer):
        if value:
            raise error
    elif not is_caught:
        trace.check(value, error, user_line())
    elif trace.explorer is None:
        raise port_error(
            "an error that depends on values may be caught here",
            code="TPU101",
            remedy="move the `try` out of the code that is traced",
        )
    elif trace.explorer.explore(value):
        raise error


def refuse_rows() -> Exception:
    """Return the error for a loop over rows whose number depends on data, as no rule rewrote it."""
    trace = innermost()
    if trace is not None and trace.explorer is not None:
        trace.explorer.plan.ask_for_rewrite()
    return port_error(
        "a loop over rows whose number depends on data",
        code="TPU203",
        remedy=(
            "let a `for` statement go over the tensor itself, and let its body write the results"
            " into a tensor that has its full size before the loop (out[idx] += ...,"
            " out.index_add_(...)), or bind them to names that have a value before it; no `break`,"
            " `return` or list.append()"
        ),
    )


def text_is_looked_at() -> bool:
    """Return whether the user's code that runs looks at the text that it makes of a value."""
    frame = user_frame()
    return frame is not None and is_looked_at(frame.f_code, frame.f_lasti)


# More choices than these would take too many paths.
_MOST_CHOICES = 16


def concrete_number(
    value: jax.Array, kind: type, low: float = -math.inf, high: float = math.inf
) -> Any:
    """Return a Python number that must be known while tracing (a size, a range, a list index).

    An int within narrow bounds is explored, one path for each number, where nothing else helped.

    Raises:
        PortError: it depends on the program's inputs.
    """
    if not isinstance(value, jax.core.Tracer):
        return kind(value)
    trace = innermost()
    if trace is not None and trace.explorer is not None and not trace.makes_error:
        plan = trace.explorer.plan
        plan.ask_for_rewrite()
        # It may depend on the state alone: trace again with small state kept concrete.
        if not plan.host_state:
            raise RestartTrace(host_state=True)
        if plan.chooses and kind is int and high - low < _MOST_CHOICES:
            return trace.explorer.choose(value, int(low), int(high))
    raise port_error(
        f"a Python {kind.__name__} was made of a value that depends on the program's inputs",
        code="TPU103",
        remedy=(
            "pass it as a Python number (it is then static), or keep it a tensor and use torch"
            " operations on it"
        ),
    )
