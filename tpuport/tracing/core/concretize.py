"""Concrete answers that Python needs of a traced value: its truth, a number, a raised error."""

from typing import Any

import jax
import jax.core

from tpuport.foundation.user_frames import user_line
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


def raise_if(failed: jax.Array, error: Exception) -> None:
    """Raise an error where `failed` holds, as eager does.

    It is a lifted check, or a branch where the user's code catches exceptions.
    """
    trace = innermost()
    assert trace is not None
    if inside_try():
        if decide(failed):
            raise error
        return
    trace.check(failed, error, user_line())


def concrete_number(value: jax.Array, kind: type) -> Any:
    """Return a Python number that must be known while tracing (a size, a range, a list index).

    Raises:
        PortError: it depends on the program's inputs.
    """
    if not isinstance(value, jax.core.Tracer):
        return kind(value)
    trace = innermost()
    if trace is not None and trace.explorer is not None:
        plan = trace.explorer.plan
        plan.ask_for_rewrite()
        # It may depend on the state alone: trace again with small state kept concrete.
        if not plan.host_state:
            raise RestartTrace(host_state=True)
    raise port_error(
        f"a Python {kind.__name__} was made of a value that depends on the program's inputs",
        code="TPU103",
        remedy=(
            "pass it as a Python number (it is then static), or keep it a tensor and use torch"
            " operations on it"
        ),
    )
