"""`torch.autograd.grad` inside a ported function: the derivative of what the trace recorded.

A tracer knows the equation that made it, so the equations between an input and an output are a
function, which jax differentiates. See `../attention/masks/graph.py` on these parts of jax.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import torch

from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.tensor import Flow, TracedTensor, wrap
from tpuport.tracing.core.values import tensors_in, value_of
from tpuport.tracing.functions.registry import function, holds_traced


@function(torch.autograd.grad)
def _grad(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    if not holds_traced(trace, [*args, *kwargs.values()]):
        return NotImplemented
    return _gradients(trace, *args, **kwargs)


def _gradients(
    trace: Trace,
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Return what `torch.autograd.grad` does of traced tensors.

    Raises:
        RuntimeError: as in eager, an output has no graph, or does not depend on an input.
        PortError: an input is a constant of the program, or gradients come in batches.
    """
    del retain_graph, only_inputs
    ends, starts = tensors_in([outputs]), tensors_in([inputs])
    if is_grads_batched or not all(isinstance(t, TracedTensor) for t in (*ends, *starts)):
        raise port_error(
            "torch.autograd.grad of a constant tensor, or of batched gradients",
            code="TPU403",
            remedy="make the input from an argument of the call, such as x.detach()",
        )
    for index, end in enumerate(ends):
        if not end.requires_grad:
            raise RuntimeError(
                f"element {index} of tensors does not require grad and does not have a grad_fn"
            )
    with torch.enable_grad():
        values, sources = list(map(value_of, ends)), list(map(value_of, starts))
        cotangents = [
            _cotangent(given, end, value)
            for given, end, value in zip(_given(grad_outputs, ends), ends, values, strict=True)
        ]
    replay = _Replay(values, sources)
    found = jax.vjp(replay, *sources)[1](cotangents)
    flow = Flow.SEEN if create_graph else Flow.STOPPED
    made: list[torch.Tensor | None] = []
    for start, value, used in zip(starts, found, replay.used, strict=True):
        if not used and not materialize_grads:
            if not allow_unused:
                raise RuntimeError(
                    "One of the differentiated Tensors appears to not have been used in the graph."
                    " Set allow_unused=True if this is the desired behavior."
                )
            made.append(None)
            continue
        # torch's gradients of complex numbers are the conjugates of jax's.
        value = value.conj() if jnp.iscomplexobj(value) else value
        value = value if create_graph else jax.lax.stop_gradient(value)
        made.append(wrap(value, start.dtype, trace=trace, flow=flow))
    return tuple(made)


def _given(grad_outputs: Any, ends: Sequence[torch.Tensor]) -> Sequence[Any]:
    if grad_outputs is None:
        return [None] * len(ends)
    return [grad_outputs] if isinstance(grad_outputs, torch.Tensor) else list(grad_outputs)


def _cotangent(given: torch.Tensor | None, end: torch.Tensor, value: jax.Array) -> jax.Array:
    if given is not None:
        found = value_of(given).astype(value.dtype)
        return found.conj() if jnp.iscomplexobj(found) else found
    if end.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    return jnp.ones_like(value)


class _Replay:
    """The function from some recorded values to others, which runs its equations again."""

    def __init__(self, values: list[Any], sources: list[Any]) -> None:
        self._values = list(map(_outside, values))
        self._sources = [id(_outside(source)) for source in sources]
        self._equations = self._between()
        reached = {id(v) for v in self._values}
        for equation in self._equations:
            reached |= {id(_outside(v)) for v in equation.in_tracers}
        self.used = [source in reached for source in self._sources]

    def _between(self) -> list[Any]:
        """Return the equations from the sources to the values, in order."""
        depends = dict.fromkeys(self._sources, True)
        ordered: dict[int, Any] = {}
        pending = list(self._values)
        while pending:
            value = pending[-1]
            equation = getattr(value, "parent", None)
            if id(value) in depends:
                pending.pop()
            elif equation is None:
                _refuse_unrecorded(value)
                depends[id(value)] = False
            else:
                operands = list(map(_outside, equation.in_tracers))
                open_ = [v for v in operands if id(v) not in depends]
                if open_:
                    pending += open_
                    continue
                depends[id(value)] = any(depends[id(v)] for v in operands)
                if depends[id(value)]:
                    ordered[id(equation)] = equation
        return list(ordered.values())

    def __call__(self, *sources: Any) -> list[Any]:
        known = dict(zip(self._sources, sources, strict=True))
        made: dict[Any, Any] = {}

        def read(value: Any) -> Any:
            value = _outside(value)
            if id(value) in known:
                return known[id(value)]
            recorded = getattr(value, "parent", None) is not None
            return made.get(value.val, value) if recorded else value

        for equation in self._equations:
            params = equation.primitive.get_bind_params(equation.params)
            with equation.ctx.manager:
                outs = equation.primitive.bind(*map(read, equation.in_tracers), **params)
            outs = outs if equation.primitive.multiple_results else [outs]
            made |= zip(equation.outvars, outs, strict=True)
        return list(map(read, self._values))


def _outside(value: Any) -> Any:
    """Return the tracer that a nested trace closes over, and any other as it is."""
    while isinstance(value, jax.core.Tracer) and getattr(value, "parent", None) is None:
        find = getattr(value, "get_const", None)
        found = None if find is None else find()
        if found is None:
            break
        value = found
    return value


class NeedsProgram(Exception):
    """Signal that a trace has to record a program: it runs inside a transformation of the user's.

    `tpuport.model.pure` then traces once more, into a jaxpr that the transformation is applied to.
    """


def _refuse_unrecorded(value: Any) -> None:
    if isinstance(value, jax.core.Tracer) and not hasattr(value, "parent"):
        raise NeedsProgram
