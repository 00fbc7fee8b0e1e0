"""Python control flow on traced values: what rewritten code calls.

A branch that a rule can rewrite becomes `tpuport.ops.cond` on its own lines. Any other is explored
at the innermost module (or at the whole function): the call is run once for each outcome and the
two results meet in `lax.cond`. An outcome that raises is a check: it is lifted out of the program,
and raises at the caller when the condition holds.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import torch

from tpuport.model import numbers, structure
from tpuport.model.locate import port_error, user_line
from tpuport.model.merging import Forced, branch_leaf, leaf_meta, leaf_value, merge, number_kind
from tpuport.model.snapshot import Snapshot
from tpuport.model.tensor import TracedTensor, wrap
from tpuport.model.trace import current
from tpuport.model.values import value_of


def traced_cond(
    test: Any, then: Callable[..., Any], orelse: Callable[..., Any], operands: tuple[Any, ...]
) -> Any:
    """`then(*operands)` if the traced `test` holds, else `orelse(*operands)`, decided on the
    device.

    Args:
        test: a traced tensor with one element, or a traced number.
        then: called with the operands; may write to tensors, may raise.
        orelse: likewise.
        operands: any values.

    Returns:
        What the side that holds returns; both must agree in structure, shapes and dtypes.
    """
    trace = current()
    value = truth(test)
    if not isinstance(value, jax.core.Tracer) or trace is None:
        return then(*operands) if bool(value) else orelse(*operands)
    site = user_line()
    # A side may change a list or dict among its operands in place.
    snapshot = Snapshot([operands])

    def side(function: Callable[..., Any]) -> Callable[[], Any]:
        if trace.explorer is None:
            return lambda: function(*operands)
        return lambda: trace.explorer.run_inside("branch", lambda: function(*operands), [operands])

    merged = merge(trace, value, side(then), side(orelse), site=site, snapshot=snapshot)
    if isinstance(merged, Forced):
        if trace.explorer is not None:
            trace.explorer.branches[site] = "lifted check"
        return then(*operands) if merged.outcome else orelse(*operands)
    if trace.explorer is not None:
        trace.explorer.branches[site] = "lax.cond"
    return merged


def truth(test: Any) -> jax.Array:
    """The 0-d boolean jax value of a one-element tensor or traced number."""
    if isinstance(test, torch.Tensor):
        if test.numel() != 1:
            msg = (
                f"Boolean value of Tensor with {'no' if not test.numel() else 'more than one'}"
                " value"
            )
            msg += "" if not test.numel() else "s"
            raise RuntimeError(msg + " is ambiguous")
        value = value_of(test).reshape(())
    elif isinstance(test, numbers.SYMBOLIC):
        value = numbers.node_value(test)
    else:
        return jnp.asarray(bool(test))
    return value != 0


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
    error = make_error()
    if trace.explorer is not None:
        trace.explorer.branches[site] = "lifted check"
    if error is not None:
        trace.check(value, error, site)


def traced_number(tensor: Any, kind: type) -> Any:
    """`float(t)`, `int(t)`, `bool(t)` of a traced tensor, as a traced Python number."""
    number = numbers.item(tensor) if isinstance(tensor, TracedTensor) else tensor
    if kind is float:
        return torch.sym_float(number)
    if kind is int:
        return torch.sym_int(number)
    node = number.node
    return numbers.number(node.value != 0, bool)


def traced_while(
    test: Callable[..., Any], body: Callable[..., Any], operands: tuple[Any, ...]
) -> Any:
    """`while test(*operands): operands = body(*operands)` on the device.

    Raises:
        PortError: an operand changes its shape, dtype or Python value in the body, or the body
            writes to other tensors.
    """
    trace = current()
    assert trace is not None
    leaves, spec = structure.flatten(operands, leaf=branch_leaf)
    metas = [leaf_meta(leaf) for leaf in leaves]

    def unflatten(values: Any) -> Any:
        made = [
            wrap(v, m.dtype, trace=trace)
            if isinstance(m, torch.Tensor)
            else numbers.number(v, number_kind(m))
            for v, m in zip(values, metas, strict=True)
        ]
        return structure.rebuild(spec, made)

    draws = trace.draws
    drawn = False
    failures = trace.error_code
    initial_code = None if failures is None else failures.value

    def inside(function: Callable[..., Any], values: Any) -> Any:
        operands = unflatten(values)
        if trace.explorer is None:
            return function(*operands)
        return trace.explorer.run_inside("loop", lambda: function(*operands), [operands])

    def enter(counts: Sequence[int | jax.Array], code: jax.Array | None) -> None:
        trace.draws = counts
        if failures is not None and code is not None:
            failures.set(code)

    def holds(carried: Any) -> jax.Array:
        values, counts, code = carried
        enter(counts, code)
        value = truth(inside(test, values))
        drew = any(a is not b for a, b in zip(trace.draws, counts, strict=True))
        if drew or (failures is not None and failures.value is not code):
            raise port_error(
                "the condition of a while loop on a traced value draws random numbers or checks"
                " values",
                code="TPU104",
                remedy="do that in the body of the loop",
            )
        return value

    def step(carried: Any) -> Any:
        nonlocal drawn
        values, counts, code = carried
        enter(counts, code)
        with trace.recording() as effects:
            out = inside(body, values)
            found, out_spec = structure.flatten(tuple(out), leaf=branch_leaf)
        drawn = any(a is not b for a, b in zip(trace.draws, counts, strict=True))
        written = [s for s, _, _ in effects.before.values() if s is not failures]
        if written or out_spec.key != spec.key:
            raise port_error(
                "a while loop on a traced value writes to tensors or changes Python values"
                " that it does not carry",
                code="TPU104",
                remedy="loop a fixed number of times and select with torch.where",
            )
        after = [leaf_value(v, None).astype(i.dtype) for v, i in zip(found, values, strict=True)]
        counts = [jnp.asarray(count, jnp.int32) for count in trace.draws]
        return after, counts, None if failures is None else failures.value

    initial = [leaf_value(leaf, None) for leaf in leaves]
    counts = [jnp.asarray(count, jnp.int32) for count in draws]
    final, counts, code = jax.lax.while_loop(holds, step, (initial, counts, initial_code))
    enter(counts if drawn else draws, code)
    return unflatten(final)
