"""Python control flow on traced values, as rewritten code calls it.

A branch that a rule can rewrite becomes `tpuport.ops.cond` on its own lines. Any other is explored
at the innermost module (or at the ported function): the call is run once for each outcome and
`lax.cond` merges the two results. An outcome that raises is a check: it is lifted out of the
program, and raises at the caller when the condition holds.
"""

import builtins
import enum
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from tpuport.foundation.errors import PortError
from tpuport.foundation.pytree.snapshot import Snapshot
from tpuport.foundation.user_frames import user_line
from tpuport.tracing.control_flow.merge import (
    Forced,
    Unlike,
    is_of_numbers,
    merge,
    shared_write,
)
from tpuport.tracing.control_flow.reached import Closures, holds_iterator, reached_by
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.concretize import decide, identity_is_asked, raise_if
from tpuport.tracing.core.context import Trace, current
from tpuport.tracing.core.errors import inside_try
from tpuport.tracing.core.row_list import RowList
from tpuport.tracing.core.speculation import RestartTrace
from tpuport.tracing.core.tensor import TracedTensor, item
from tpuport.tracing.core.transforms import transforming
from tpuport.tracing.core.values import value_of


def traced_cond(
    test: Any, then: Callable[..., Any], orelse: Callable[..., Any], operands: tuple[Any, ...]
) -> Any:
    """Return `then(*operands)` if the traced `test` holds, else `orelse(*operands)`.

    The device decides, by `lax.cond`.

    Args:
        test: a traced tensor with one element, or a traced number.
        then: called with the operands; may write to tensors, may raise.
        orelse: likewise.
        operands: any values.

    Returns:
        What the side that holds returns; both must agree in structure, shapes and dtypes.
    """
    trace = current()
    transformed = transforming()
    value = _primal(test) if transformed else truth(test)
    if not isinstance(value, jax.core.Tracer) or trace is None:
        return then(*operands) if bool(value) else orelse(*operands)
    site, explorer = user_line(), trace.explorer
    # Under a transformation of torch, merged results would have no tangents.
    is_apart = explorer is not None and (transformed or site in explorer.plan.apart)
    if explorer is not None and (is_apart or holds_iterator(then, orelse)):
        return then(*operands) if explorer.explore(value) else orelse(*operands)
    # A side may change what it reaches in place (a list, an attribute), and both sides are run.
    roots = [operands, *reached_by(then, orelse)]
    snapshot = Snapshot(roots)

    def side(function: Callable[..., Any]) -> Callable[[], Any]:
        def run() -> Any:
            return function(*operands)

        if explorer is None:
            return run
        return functools.partial(explorer.run_inside, "branch", run, roots)

    merged = merge(
        *(trace, value, side(then), side(orelse)),
        site=site,
        apart=lambda: shared_write(site) if explorer is None else RestartTrace(apart=site),
        snapshot=snapshot,
        explorable=explorer is not None,
    )
    caught = isinstance(merged, Forced) and inside_try(merged.error) is not None
    if (caught or isinstance(merged, Unlike)) and explorer is not None:
        # Such as an int against None, or an error that is caught after a write: what follows is run
        # once for each outcome.
        return then(*operands) if explorer.explore(value) else orelse(*operands)
    if isinstance(merged, Forced):
        if trace.explorer is not None:
            trace.explorer.branches[site] = "lifted check"
        raise_if(merged.failed, merged.error)
        return then(*operands) if merged.outcome else orelse(*operands)
    if trace.explorer is not None:
        trace.explorer.branches[site] = "lax.cond"
    return merged


class Unasked(enum.Enum):
    """Stands for the value of a function that may not be called unasked."""

    FOUND = enum.auto()


def computed(function: Callable[[], Any]) -> Any:
    """Return what a function returns, or `Unasked.FOUND` if it may not be called unasked.

    It may not if it raises, makes a check, writes to tensors, draws random numbers or changes
    Python values. Then all of it is as before.
    """
    trace = current()
    if trace is None:
        return function()
    if holds_iterator(function):
        return Unasked.FOUND
    reached, draws, checks = Closures(function), trace.draws, len(trace.recorder.checks)
    with trace.recording(repeats=True) as effects:
        try:
            value = function()
        except PortError:
            raise
        except Exception:
            value = Unasked.FOUND
        wrote = bool(effects.before or effects.rebound or effects.wrote_on_host)
        acted = wrote or len(trace.recorder.checks) > checks or reached.changed()
        drew = any(a is not b for a, b in zip(trace.draws, draws, strict=True))
        if value is not Unasked.FOUND and not acted and not drew:
            return value
        effects.undo()
    reached.snapshot.restore()
    trace.draws = draws
    del trace.recorder.checks[checks:]
    return Unasked.FOUND


def _primal(test: Any) -> jax.Array:
    """Return the truth of what torch.func stands a tensor of its own for."""
    while isinstance(test, torch.Tensor) and is_functorch_wrapped_tensor(test):
        test = get_unwrapped(test)
    return truth(test)


def truth(test: Any) -> jax.Array:
    """Return the truth of a one-element tensor or a number, as a 0-d boolean jax value."""
    if isinstance(test, torch.Tensor):
        refuse_ambiguous(test)
        value = value_of(test).reshape(())
    elif isinstance(test, RowList):
        return truth(test.count)
    elif isinstance(test, sym_numbers.SYMBOLIC):
        return sym_numbers.truth(test)
    else:
        return jnp.asarray(bool(test))
    return value != 0


def refuse_ambiguous(test: torch.Tensor) -> None:
    """Raise what eager PyTorch raises for the truth of a tensor without exactly one element."""
    if test.numel() != 1:
        what = "no values" if not test.numel() else "more than one value"
        raise RuntimeError(f"Boolean value of Tensor with {what} is ambiguous")


def _made(trace: Trace, make_error: Callable[[], BaseException | None]) -> BaseException | None:
    """Return the exception that a check raises.

    If its text needs the value of a number that the program computes, it is one of that class with
    another text.
    """
    refusal, trace.makes_error = trace.recorder.refusal, True
    try:
        error = make_error()
        if not (isinstance(error, TypeError) and is_of_numbers(error)):
            return error
    except PortError:
        pass
    finally:
        trace.makes_error = False
    trace.recorder.refusal = refusal
    source = make_error.args[0] if isinstance(make_error, functools.partial) else make_error
    known = vars(builtins) | source.__globals__
    kinds = [known.get(name) for name in source.__code__.co_names]
    kind = next((k for k in kinds if isinstance(k, type) and issubclass(k, Exception)), ValueError)
    return kind.__new__(kind, "a check fails; its text needs values that the program computes")


def traced_check(test: Any, make_error: Callable[[], BaseException | None]) -> None:
    """Lift `if test: raise make_error()` out of the program.

    The caller raises when the condition held.
    """
    trace = current()
    value = truth(test)
    if not isinstance(value, jax.core.Tracer) or trace is None:
        if bool(value):
            error = make_error()
            if error is not None:
                raise error
        return
    site = user_line()
    error = _made(trace, make_error)
    if trace.explorer is not None:
        trace.explorer.branches[site] = "lifted check"
    if error is not None:
        raise_if(value, error() if isinstance(error, type) else error)


def traced_number(tensor: Any, kind: type) -> Any:
    """Return `float(t)`, `int(t)` or `bool(t)` of a traced tensor, as a traced Python number."""
    number = item(tensor) if isinstance(tensor, TracedTensor) else tensor
    if kind is bool and isinstance(tensor, RowList):
        number = tensor.count
    if kind is float:
        return sym_numbers.as_python(torch.sym_float(number))
    if kind is int:
        return torch.sym_int(number)
    if isinstance(number, bool):
        return number
    holds = sym_numbers.truth(number)
    return decide(holds) if identity_is_asked() else sym_numbers.number(holds, bool)
