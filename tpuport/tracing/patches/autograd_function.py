"""Custom autograd functions: their backward is the user's, not the derivative of their forward."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import torch

from tpuport.foundation import pytree
from tpuport.foundation.patching.shim import Replacement, Shim, installed
from tpuport.foundation.pytree.snapshot import Snapshot
from tpuport.tracing.core.arguments import unsized
from tpuport.tracing.core.autocast import OFF, autocast_as, autocast_state
from tpuport.tracing.core.context import Trace, TraceOptions, current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.regions import Body
from tpuport.tracing.core.tensor import TracedTensor, meta_of, wrap
from tpuport.tracing.core.values import value_of
from tpuport.tracing.dynamic_shapes.extents import extents_of
from tpuport.tracing.patches._count import count
from tpuport.tracing.session.activate import active


class _Context:
    """The `ctx` of a custom autograd function in a trace."""

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs
        self.saved_tensors: tuple[Any, ...] = ()
        self.constant: set[int] = set()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.constant = {id(tensor) for tensor in tensors}

    def mark_dirty(self, *tensors: Any) -> None:
        if tensors:
            raise port_error(
                "a custom autograd function that writes its inputs in place",
                code="TPU403",
                remedy="return a new tensor from forward",
            )

    def set_materialize_grads(self, value: bool) -> None:
        del value


class AutogradFunction(Shim):
    """`torch.autograd.Function.apply` becomes a `jax.custom_vjp` around the user's forward and
    backward.
    """

    TARGET = "torch.autograd.Function.apply"
    REASON = (
        "the backward that the user wrote must be used, as eager does;"
        " torchax differentiates the forward instead"
    )

    def replacements(self) -> list[Replacement]:
        original = torch.autograd.Function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if current() is None:
                return original.__get__(None, cls)(*args, **kwargs)
            count(self.TARGET)
            if not any(isinstance(a, TracedTensor) for a in args):
                return original.__get__(None, cls)(*args, **kwargs)
            return _apply(cls, args)

        return [Replacement(torch.autograd.Function, "apply", classmethod(apply))]


class _FunctionCall:
    """One call of a custom autograd function.

    jax runs its forward once or twice: as the primal, and again (maybe after the trace has ended)
    when it differentiates what it has traced. Changes that the forward makes to Python objects are
    kept from the first run only.
    """

    def __init__(self, trace: Trace, cls: Any, args: tuple[Any, ...]) -> None:
        self.trace, self.cls, self.args = trace, cls, args
        self.is_tensor = [isinstance(a, torch.Tensor) for a in args]
        self.tensors = [a for a in args if isinstance(a, torch.Tensor)]
        self.before = Snapshot([a for a in args if not isinstance(a, torch.Tensor)])
        self.count = trace.keys.count if trace.keys is not None else 0
        self.body: Body | None = None
        self.spec: Any = None
        self.metas: list[torch.Tensor] = []
        self.frozen: list[bool] = []
        self.context_spec: Any = None
        self.saved: list[Any] = []
        self.autocast = autocast_state()

    def program_key(self) -> list[Any]:
        """Return what decides the backward, besides the values of tensors."""
        metas = [[(m.shape, m.dtype) for m in some] for some in (self.metas, self.saved)]
        rest = [arg for arg, flag in zip(self.args, self.is_tensor, strict=True) if not flag]
        contexts = [None if s is None else s.key for s in (self.spec, self.context_spec)]
        return [self.cls, self.is_tensor, rest, metas, contexts, self.frozen, list(self.autocast)]

    def forward(self, values: Any) -> tuple[Any, list[jax.Array]]:
        """Return outputs, values of escaping and of written storages, and the saved tensors."""
        if self.body is None:
            self.body = body = Body(self.trace, lambda: self._run(values, self.trace))
            alive, after = body.run()
            outs, saved = body.result
            return [outs, alive, after], saved
        return self._again(values, self.body)

    def _again(self, values: Any, first: Body) -> tuple[Any, list[jax.Array]]:
        if first.written:
            raise port_error(
                "a custom autograd function that writes a tensor from outside was differentiated"
                " after it had been traced",
                code="TPU403",
                remedy="pass the tensor in and return its new value from forward",
            )
        now = self.before.changes()
        self.before.restore()
        try:
            with _running(self.trace) as trace, autocast_as(self.autocast):
                keys = trace.keys
                reached = keys.count if keys is not None else 0
                if keys is not None:
                    # Draw the same keys as in the first run, or the residuals would differ.
                    keys.count = self.count
                body = Body(trace, lambda: self._run(values, trace))
                alive = body.run_like(first)
                if keys is not None:
                    keys.count = reached
        finally:
            self.before.restore()
            self.before.apply(now)
        outs, saved = body.result
        return [outs, alive, []], saved

    def _run(self, values: Any, trace: Trace) -> tuple[list[jax.Array], list[jax.Array]]:
        inputs = iter(_rewrapped(values, self.tensors, trace))
        pairs = zip(self.args, self.is_tensor, strict=True)
        given = [next(inputs) if flag else a for a, flag in pairs]
        floating = [
            flag and a.dtype.is_floating_point
            for a, flag in zip(self.args, self.is_tensor, strict=True)
        ]
        context = _Context(tuple(floating))
        cls = self.cls
        with torch.no_grad():
            if cls.setup_context is not torch.autograd.Function.setup_context:
                out = cls.forward(*given)
                cls.setup_context(context, tuple(given), out)
            else:
                out = cls.forward(context, *given)
        leaves, self.spec = pytree.flatten(out)
        if any(extents_of(leaf) for leaf in leaves):
            raise unsized(f"an output of {cls.__name__}.forward")
        self.metas = [meta_of(leaf) for leaf in leaves]
        self.frozen = [
            id(leaf) in context.constant or not leaf.dtype.is_floating_point for leaf in leaves
        ]
        kept, self.context_spec = pytree.flatten((context.saved_tensors, context.__dict__))
        self.saved = [meta_of(leaf) for leaf in kept]
        return [value_of(leaf) for leaf in leaves], [value_of(leaf) for leaf in kept]

    def fwd(self, values: Any) -> Any:
        """Run the forward of the custom_vjp: return outputs and residuals."""
        outs, saved = self.forward(values)
        return outs, (saved, values)

    def bwd(self, residuals: Any, cotangents: Any) -> Any:
        """Run the user's backward; values that left the forward by other ways have no gradient."""
        saved, values = residuals
        # Torch runs backward after the autocast region has ended; `custom_bwd` enters its own.
        with _running(self.trace) as trace, autocast_as(OFF):
            restored = _rewrapped(saved, self.saved, trace)
            saved_tensors, attributes = pytree.unflatten(self.context_spec, restored)
            context = _Context(())
            context.__dict__.update(attributes)
            context.saved_tensors = saved_tensors
            grads = self.cls.backward(context, *_rewrapped(cotangents[0], self.metas, trace))
            grads = grads if isinstance(grads, tuple) else (grads,)
            picked = [g for g, flag in zip(grads, self.is_tensor, strict=False) if flag]
            return ([_cotangent(g, v) for g, v in zip(picked, values, strict=True)],)


def _rewrapped(values: Any, metas: list[torch.Tensor], trace: Trace) -> list[torch.Tensor]:
    return [wrap(v, m.dtype, trace=trace) for v, m in zip(values, metas, strict=True)]


def _apply(cls: Any, args: tuple[Any, ...]) -> Any:
    trace = current()
    assert trace is not None
    if any(extents_of(a) for a in args):
        raise unsized(f"an argument of {cls.__name__}.apply")
    call = _FunctionCall(trace, cls, args)
    primal = jax.custom_vjp(lambda values: call.forward(values)[0])
    primal.defvjp(call.fwd, call.bwd)
    values, alive, after = primal([value_of(t) for t in call.tensors])
    assert call.body is not None
    call.body.settle(alive, after)
    made = _rewrapped(values, call.metas, trace)
    for new, frozen in zip(made, call.frozen, strict=True):
        new._frozen = frozen  # type: ignore[attr-defined]
    return pytree.unflatten(call.spec, made)


@contextlib.contextmanager
def _running(trace: Trace) -> Iterator[Trace]:
    """Enter a trace for a backward: the forward's, or a new one if that has already ended."""
    if not trace.closed:
        with trace.recording():
            yield trace
        return
    later = Trace(None, TraceOptions(patches=trace.options.patches))
    with installed(later.options.patches), active(later):
        yield later


def _cotangent(grad: Any, value: jax.Array) -> Any:
    import numpy as np

    if not jax.numpy.issubdtype(value.dtype, jax.numpy.inexact):
        return np.zeros(value.shape, jax.dtypes.float0)
    if grad is None:
        return jax.numpy.zeros_like(value)
    return value_of(grad).astype(value.dtype)
