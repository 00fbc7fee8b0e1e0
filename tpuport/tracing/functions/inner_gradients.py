"""`torch.autograd.grad` and `.backward()` inside a ported function.

They are derivatives of what the trace recorded: a tracer knows the equation that made it, so the
equations between an input and an output are a function, which jax differentiates. See
`../attention/masks/graph.py` on these parts of jax.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import torch
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack

from tpuport.foundation.user_frames import user_line
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.paths import Paths
from tpuport.tracing.core.storage import Flow
from tpuport.tracing.core.tensor import TracedTensor, wrap
from tpuport.tracing.core.untaken import gated, reads
from tpuport.tracing.core.values import tensors_in, value_of
from tpuport.tracing.functions.registry import function, holds_traced, traced


@function(torch.autograd.grad)
def _grad(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    given = [*args, *kwargs.values()]
    # Of tensors inside torch.func, and of those that `torch.func.vjp` keeps, torch has the graph.
    inside = any(map(is_functorch_wrapped_tensor, tensors_in(given)))
    if inside or not holds_traced(trace, given):
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
        PortError: an input is a constant of the program.
    """
    del retain_graph, only_inputs
    starts = _sources(trace, inputs)
    retained = [] if is_grads_batched else _retained(trace, starts)
    found = _derivatives(
        *(trace, outputs, [*starts, *retained], grad_outputs),
        graph=create_graph,
        batched=is_grads_batched,
    )
    _add(retained, found[len(starts) :], graph=create_graph)
    found = found[: len(starts)]
    if materialize_grads:
        pairs = zip(found, starts, strict=True)
        return tuple(torch.zeros_like(s) if g is None else g for g, s in pairs)
    if not allow_unused and any(g is None for g in found):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph."
            " Set allow_unused=True if this is the desired behavior."
        )
    return tuple(found)


@function(torch.autograd.backward)
def _backward(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    if not holds_traced(trace, [*args, *kwargs.values()]):
        return NotImplemented
    return _accumulate(trace, *args, **kwargs)


@function(torch.Tensor.backward)
def _tensor_backward(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    if not holds_traced(trace, [*args, *kwargs.values()]):
        return NotImplemented
    return _accumulate(trace, *args, **_renamed(kwargs))


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of `Tensor.backward` by the names that `torch.autograd.backward` has."""
    return {"grad_tensors" if name == "gradient" else name: v for name, v in options.items()}


def _accumulate(
    trace: Trace,
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    *options: Any,
    inputs: Any = None,
    **more: Any,
) -> None:
    """Add gradients to the `.grad` of leaves, as `torch.autograd.backward` does.

    Raises:
        PortError: a leaf is a parameter or an argument of the program.
    """
    del retain_graph, more
    inputs = options[-1] if options and options[-1] is not None else inputs
    leaves = trace.gradient_leaves()
    if inputs is not None:
        starts = _sources(trace, inputs)
        leaves = list({id(t): t for t in (*starts, *_retained(trace, starts))}.values())
    found = _derivatives(trace, tensors, leaves, grad_tensors, graph=create_graph)
    for leaf, grad in zip(leaves, found, strict=True):
        if grad is not None and leaf._is_given and id(leaf) not in trace.gathered:
            raise port_error(
                "backward() inside a ported function would leave a gradient on a parameter or an"
                f" argument of shape {tuple(leaf.shape)}, which a program does not return",
                code="TPU403",
                remedy="name what you read: torch.autograd.grad(loss, x) or backward(inputs=[x]);"
                " take gradients of parameters outside, with jax.grad of ported.apply",
            )
    _add(leaves, found, graph=create_graph)


def _add(leaves: list[TracedTensor], grads: list[Any], *, graph: bool) -> None:
    """Add gradients to those that tensors have; a sum has no graph if they have none."""
    with torch.set_grad_enabled(graph):
        for leaf, grad in zip(leaves, grads, strict=True):
            if grad is not None:
                leaf.grad = grad if leaf.grad is None else leaf.grad + grad


_ATTRIBUTES = vars(torch._C.TensorBase)


@function(_ATTRIBUTES["grad"].__get__)
def _grad_of(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = traced(trace, args[0])
    return NotImplemented if tensor is None or tensor._is_given else tensor.grad


@function(torch.Tensor.requires_grad_, _ATTRIBUTES["requires_grad"].__set__)
def _requires_grad(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    """Make a leaf of a constant: what is computed from it is part of the program from here on."""
    tensor, wanted = args[0], [*args[1:], *kwargs.values(), True][0]
    if isinstance(tensor, TracedTensor):
        return NotImplemented
    known = trace.alias(tensor)
    plain = type(tensor) is torch.Tensor and not tensor.is_meta
    # Inside torch.func a tensor stands for another one, and torch takes the derivative.
    if known is None and wanted and plain and peek_interpreter_stack() is None:
        known = trace.as_leaf(tensor)
    if known is None:
        return NotImplemented
    known.requires_grad_(wanted)
    return tensor if func is torch.Tensor.requires_grad_ else None


@function(torch.Tensor.retain_grad)
def _retain_grad(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = traced(trace, args[0])
    if tensor is None:
        return NotImplemented
    if not tensor.requires_grad:
        raise RuntimeError("can't retain_grad on Tensor that has requires_grad=False")
    trace.add_leaf(tensor)
    return None


def _retained(trace: Trace, starts: list[TracedTensor]) -> list[TracedTensor]:
    """Return the tensors that retain a gradient and are passed on the way back to some others."""
    retained = trace.gradient_leaves(retained=True)
    with torch.enable_grad():
        sources = list(map(value_of, starts))
        return [t for t in retained if any(_Replay([value_of(t)], sources).used)]


def _sources(trace: Trace, inputs: Any) -> list[TracedTensor]:
    """Return the tensors to differentiate with respect to.

    Raises:
        PortError: one is a constant of the program.
    """
    found = [traced(trace, tensor) for tensor in tensors_in([inputs])]
    sources = [tensor for tensor in found if tensor is not None]
    if len(sources) != len(found):
        raise port_error(
            "a gradient with respect to a constant tensor is asked of torch.autograd",
            code="TPU403",
            remedy="make the input from an argument of the call, such as x.detach()",
        )
    place = user_line()
    trace.inner_starts |= {id(one): (one, place) for one in sources if one._is_given}
    if not all(source.requires_grad for source in sources):
        raise RuntimeError("One of the differentiated Tensors does not require grad")
    return sources


def _derivatives(
    trace: Trace,
    outputs: Any,
    starts: list[TracedTensor],
    grad_outputs: Any,
    *,
    graph: bool,
    batched: bool = False,
) -> list[torch.Tensor | None]:
    """Return the gradient of outputs with respect to each source, None where there is none."""
    given = [(end, traced(trace, end)) for end in tensors_in([outputs])]
    ends = [end if alias is None else alias for end, alias in given]
    for index, end in enumerate(ends):
        if not end.requires_grad:
            raise RuntimeError(
                f"element {index} of tensors does not require grad and does not have a grad_fn"
            )
    with torch.enable_grad():
        values, sources = list(map(value_of, ends)), list(map(value_of, starts))
        if not all(isinstance(value, jax.core.Tracer) for value in values):
            raise NeedsProgram  # `apply` computes known values at once, and records nothing
        cotangents = [
            _cotangent(weight, end, value)
            for weight, end, value in zip(_given(grad_outputs, ends), ends, values, strict=True)
        ]
    unique = list({id(source): source for source in sources}.values())
    replay = _Replay(values, unique)
    run: Any = replay
    if trace.branches:
        closed = jax.make_jaxpr(replay)(*unique)
        run = gated(closed, range(len(values)))
        # Eager's None on some paths only is explored as a branch of the user's is.
        replay.used = [_decided(trace, flag) for flag in reads(closed, *unique)]
    pull = jax.vjp(run, *unique)[1]
    pulled = (jax.vmap(pull) if batched else pull)(cotangents)
    known = {id(u): (v, used) for u, v, used in zip(unique, pulled, replay.used, strict=True)}
    made: list[torch.Tensor | None] = []
    for start, source in zip(starts, sources, strict=True):
        value, used = known[id(source)]
        # torch's gradients of complex numbers are the conjugates of jax's.
        value = value.conj() if jnp.iscomplexobj(value) else value
        value = value if graph else jax.lax.stop_gradient(value)
        flow = Flow.SEEN if graph else Flow.STOPPED
        made.append(wrap(value, start.dtype, trace=trace, flow=flow) if used else None)
    return made


def _decided(trace: Trace, flag: bool | jax.Array) -> bool:
    if isinstance(flag, jax.core.Tracer) and trace.explorer is not None:
        return trace.explorer.explore(flag)
    return bool(flag)


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


@jax.custom_jvp
def _joined(value: jax.Array, source: jax.Array) -> jax.Array:
    """Return a value that is also a source: its gradient is counted for both."""
    del source
    return value


@_joined.defjvp
def _joined_jvp(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[0] + tangents[1]


class _Replay:
    """The function from some recorded values to others, which runs its equations again.

    `used` says of each source whether a value depends on it.
    """

    def __init__(self, values: list[Any], sources: list[Any]) -> None:
        self._values = list(map(_outside, values))
        self._sources = [id(_outside(source)) for source in sources]
        self._paths, self._depends = Paths(), dict[int, bool]()
        self._equations = self._between()
        self.used = [source in self._depends for source in self._sources]

    def _between(self) -> list[Any]:
        """Return the equations from the sources to the values, in order."""
        sources, depends = set(self._sources), self._depends
        ordered: dict[int, Any] = {}
        pending = list(self._values)
        while pending:
            value = pending[-1]
            equation = getattr(value, "parent", None)
            if id(value) in depends:
                pending.pop()
                continue
            if equation is None:
                refuse_unrecorded(value)
            operands = [] if equation is None else self._operands(equation, value)
            open_ = [v for v in operands if id(v) not in depends]
            if open_:
                pending += open_
                continue
            reached = any(depends[id(v)] for v in operands)
            if reached:
                ordered[id(equation)] = equation
            depends[id(value)] = reached or id(value) in sources
        return list(ordered.values())

    def _operands(self, equation: Any, value: Any) -> list[Any]:
        """Return the operands of an equation from which a derivative flows to one result."""
        paths = self._paths.of_equation(equation)
        may = next(p.may for v, p in zip(equation.outvars, paths, strict=True) if v is value.val)
        return [_outside(v) for i, v in enumerate(equation.in_tracers) if may >> i & 1]

    def __call__(self, *sources: Any) -> list[Any]:
        known = dict(zip(self._sources, sources, strict=True))
        made: dict[Any, Any] = {}

        def read(value: Any) -> Any:
            value = _outside(value)
            recorded = getattr(value, "parent", None) is not None
            found = made.get(value.val) if recorded else None
            source = known.get(id(value))
            if found is not None and source is not None:
                return _joined(found, source)
            return next(one for one in (source, found, value) if one is not None)

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


def refuse_unrecorded(value: Any) -> None:
    """Ask for a program if a value is traced and what made it is not recorded.

    Raises:
        NeedsProgram: It is.
    """
    if isinstance(value, jax.core.Tracer) and not hasattr(value, "parent"):
        raise NeedsProgram
