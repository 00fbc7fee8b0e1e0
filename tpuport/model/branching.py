"""Python control flow on traced values: what rewritten code calls.

A branch that a rule can rewrite becomes `tpuport.ops.cond` on its own lines. Any other is explored
at the innermost module (or at the whole function): the call is run once for each outcome and the
two results meet in `lax.cond`. An outcome that raises is a check: it is lifted out of the program,
and raises at the caller when the condition holds.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import torch

from tpuport.model import numbers, structure
from tpuport.model.locate import port_error, user_line
from tpuport.model.merging import Forced, branch_leaf, leaf_meta, leaf_value, merge, number_kind
from tpuport.model.number_node import NumberNode
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
    merged = merge(
        trace,
        value,
        lambda: then(*operands),
        lambda: orelse(*operands),
        site=site,
        snapshot=snapshot,
    )
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

    def step(values: Any) -> Any:
        with trace.recording() as effects:
            out = body(*unflatten(values))
            found, out_spec = structure.flatten(tuple(out), leaf=branch_leaf)
        if effects.before or out_spec.key != spec.key:
            raise port_error(
                "a while loop on a traced value writes to tensors or changes Python values"
                " that it does not carry",
                code="TPU104",
                remedy="loop a fixed number of times and select with torch.where",
            )
        return [leaf_value(v, None).astype(i.dtype) for v, i in zip(found, values, strict=True)]

    initial = [leaf_value(leaf, None) for leaf in leaves]
    final = jax.lax.while_loop(lambda v: truth(test(*unflatten(v))), step, initial)
    return unflatten(final)


def bound(number: Any) -> float:
    """The largest value that a traced number can have, or infinity."""
    node = getattr(number, "node", None)
    return node.high if isinstance(node, NumberNode) else math.inf
