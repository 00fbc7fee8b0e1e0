"""Custom autograd functions: their backward is the user's, not the derivative of their forward."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import torch

from tpuport.model import structure
from tpuport.model.dispatch import value_of
from tpuport.model.locate import port_error
from tpuport.model.tensor import TracedTensor, wrap
from tpuport.model.trace import Trace, active, current
from tpuport.shims._shim import Replacement, Shim, installed


class _Context:
    """Stands for the `ctx` of a custom autograd function."""

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_non_differentiable(self, *tensors: Any) -> None:
        for tensor in tensors:
            if isinstance(tensor, TracedTensor):
                tensor._frozen = True

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
            self.count(self.TARGET)
            if not any(isinstance(a, TracedTensor) for a in args):
                return original.__get__(None, cls)(*args, **kwargs)
            return _apply(cls, args)

        return [Replacement(torch.autograd.Function, "apply", classmethod(apply))]


def _apply(cls: Any, args: tuple[Any, ...]) -> Any:
    trace = current()
    assert trace is not None
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    is_tensor = [isinstance(a, torch.Tensor) for a in args]
    held: dict[str, Any] = {}

    def rebuilt(values: Any, source: list[torch.Tensor], now: Trace) -> list[torch.Tensor]:
        return [wrap(v, t.dtype, trace=now) for v, t in zip(values, source, strict=True)]

    def forward(values: Any) -> tuple[Any, _Context]:
        with trace.recording():
            return run(values)

    def run(values: Any) -> tuple[Any, _Context]:
        inputs = iter(rebuilt(values, tensors, trace))
        given = [next(inputs) if flag else a for a, flag in zip(args, is_tensor, strict=True)]
        context = _Context(
            tuple(
                flag and a.dtype.is_floating_point for a, flag in zip(args, is_tensor, strict=True)
            )
        )
        if (
            "setup_context" in cls.__dict__
            or cls.setup_context is not torch.autograd.Function.setup_context
        ):
            out = cls.forward(*given)
            cls.setup_context(context, tuple(given), out)
        else:
            out = cls.forward(context, *given)
        leaves, held["spec"] = structure.flatten(out)
        held["metas"] = leaves
        return [value_of(leaf) for leaf in leaves], context

    @jax.custom_vjp
    def primal(values: Any) -> Any:
        return forward(values)[0]

    def fwd(values: Any) -> Any:
        outs, context = forward(values)
        leaves, spec = structure.flatten((context.saved_tensors, context.__dict__))
        held["context"], held["saved"] = spec, leaves
        return outs, ([value_of(leaf) for leaf in leaves], values)

    def bwd(residuals: Any, cotangents: Any) -> Any:
        with _running(trace) as now:
            return backward(residuals, cotangents, now)

    def backward(residuals: Any, cotangents: Any, now: Trace) -> Any:
        saved, values = residuals
        restored = rebuilt(saved, held["saved"], now)
        saved_tensors, attributes = structure.rebuild(held["context"], restored)
        context = _Context(())
        context.__dict__.update(attributes)
        context.saved_tensors = saved_tensors
        grads = cls.backward(context, *rebuilt(cotangents, held["metas"], now))
        grads = grads if isinstance(grads, tuple) else (grads,)
        picked = [g for g, flag in zip(grads, is_tensor, strict=False) if flag]
        return ([_cotangent(g, v) for g, v in zip(picked, values, strict=True)],)

    primal.defvjp(fwd, bwd)
    values = primal([value_of(t) for t in tensors])
    made = rebuilt(values, held["metas"], trace)
    for new, old in zip(made, held["metas"], strict=True):
        new._frozen = getattr(old, "_frozen", False)  # type: ignore[attr-defined]
    return structure.rebuild(held["spec"], made)


@contextlib.contextmanager
def _running(trace: Trace) -> Iterator[Trace]:
    """The trace to run a backward in: jax may come to it after the forward's trace has ended."""
    if not trace.closed:
        with trace.recording():
            yield trace
        return
    later = Trace(None)
    with installed(), active(later):
        yield later


def _cotangent(grad: Any, value: jax.Array) -> Any:
    import numpy as np

    if not jax.numpy.issubdtype(value.dtype, jax.numpy.inexact):
        return np.zeros(value.shape, jax.dtypes.float0)
    if grad is None:
        return jax.numpy.zeros_like(value)
    return value_of(grad).astype(value.dtype)
