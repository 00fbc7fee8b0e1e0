"""The jax values of an op's operands, and traced tensors around its results."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.foundation.interop import backend
from tpuport.tracing.core import int64, sym_numbers
from tpuport.tracing.core.context import Trace, current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.storage import Flow, Storage, differentiable
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.core.view_steps import replace_value


def map_tensors(fn: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to every tensor and traced number in nested lists."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (list, tuple)):
        return [map_tensors(fn, item) for item in value]
    if isinstance(value, sym_numbers.SYMBOLIC):
        return fn(value)
    return value


def flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors and traced numbers among an op's arguments."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, [*args, *kwargs.values()])
    return found


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among values and in the lists and tuples among them."""
    return [v for v in flat(tuple(values), {}) if isinstance(v, torch.Tensor)]


def value_of(tensor: Any) -> jax.Array:
    """Return the jax value of any tensor: traced, promoted host tensor, or host constant.

    Raises:
        PortError: The tensor is left over from an earlier trace.
    """
    if isinstance(tensor, sym_numbers.SYMBOLIC):
        return sym_numbers.node_value(tensor)
    trace = current()
    if isinstance(tensor, TracedTensor):
        refuse_left_over(tensor, trace)
        if not torch.is_grad_enabled() and not tensor._frozen:
            return _stopped(tensor)
        return tensor._elem
    if isinstance(tensor, backend.TorchaxTensor):
        return tensor.jax()
    if trace is None:
        return backend.to_jax(tensor)
    alias = trace.alias(tensor)
    return trace.constant(tensor) if alias is None else alias._elem


def refuse_left_over(tensor: TracedTensor, trace: Trace | None) -> None:
    """Refuse the use of a tensor whose trace has ended.

    Raises:
        PortError: It has, and is not `trace`, which runs.
    """
    owner = tensor._storage.trace
    if owner is not None and owner is not trace and owner.closed:
        raise port_error(
            "a tensor computed in an earlier trace is used here;"
            " something outside the model kept it (a global,"
            " a functools.cache, a closure, a function that the call returned)",
            code="TPU402",
            remedy="keep it in a buffer of the module, or compute it from host values only",
        )


def held_of(operand: Any) -> jax.Array:
    """Return the value of a tensor or traced number, of 64 bits if int64 or Python needs them."""
    if isinstance(operand, sym_numbers.SYMBOLIC):
        return sym_numbers.held(operand)
    if isinstance(operand, TracedTensor):
        return operand._held if operand._storage.wide else value_of(operand)
    trace = current()
    if trace is None or operand.dtype is not torch.int64:
        return value_of(operand)
    alias = trace.alias(operand)
    return trace.constant(operand, wide=True) if alias is None else held_of(alias)


def _stopped(tensor: TracedTensor) -> jax.Array:
    """Return the value without gradients, for use under `torch.no_grad()`; made once per value."""
    if not differentiable(tensor.dtype):
        return tensor._elem
    version = tensor._storage.version
    kept = tensor._stopped
    if kept is None or kept[0] != version or not tensor._is_alive(kept[1]):
        kept = (version, tensor._region(), jax.lax.stop_gradient(tensor._elem))
        tensor._stopped = kept
    return kept[2]


def flow_of(tensors: list[Any]) -> Flow:
    """Return how derivatives pass through the result of an op on these operands."""
    if not torch.is_grad_enabled():
        return Flow.STOPPED
    trace = current()

    def traced(operand: Any) -> TracedTensor | None:
        if isinstance(operand, TracedTensor) or trace is None:
            return operand if isinstance(operand, TracedTensor) else None
        return trace.alias(operand) if isinstance(operand, torch.Tensor) else None

    given = map(traced, tensors)
    return max((t._flow for t in given if t is not None), default=Flow.STOPPED)


def grad_frozen(tensors: list[torch.Tensor]) -> bool:
    """Return whether no gradient flows into the result of an op on these operands."""
    return flow_of(tensors) is Flow.STOPPED


def wrap_as(
    func: Any,
    value: jax.Array,
    meta: torch.Tensor,
    trace: Trace | None,
    flow: Flow = Flow.STOPPED,
) -> TracedTensor:
    """Wrap a lowered value with torch's own metadata, and check the lowering against it."""
    value = jnp.asarray(value)
    if value.shape != meta.shape:
        msg = f"the lowering of {func} gave shape {value.shape}, torch gives {tuple(meta.shape)}"
        raise AssertionError(msg)
    dtype = backend.jax_dtype(meta.dtype)
    is_wide = meta.dtype is torch.int64 and int64.is_wide(value)
    if value.dtype != dtype and not is_wide:
        value = value.astype(dtype)
    if trace is not None and meta.dtype == torch.int64:
        trace.note_int64(value)
    storage = Storage(value, trace)
    return TracedTensor(storage, (), meta, value, flow)


def write(target: torch.Tensor, value: jax.Array, *, flow: Flow) -> torch.Tensor:
    """Write `value` into `target` (traced or host) and through it into every alias."""
    if not isinstance(target, TracedTensor):
        trace = current()
        if isinstance(target, torch.Tensor) and trace is not None:
            promoted = trace.promote(target)
            promoted._carry(flow)
            promoted.write(_fit(value, target))
            trace.shared.follow(promoted._storage, trace.regions)
            return target
        msg = (
            "an in-place write of a computed JAX value into a plain CPU tensor;"
            " use .copy_(y.cpu()) instead"
        )
        raise TypeError(msg)
    value = _fit(value, target)
    if differentiable(target.dtype) and not torch.is_grad_enabled() and not target._frozen:
        value = replace_value(target._elem, value)
    else:
        target._carry(flow)
    target.write(value)
    trace = current()
    if trace is not None and trace.shared:
        trace.shared.follow(target._storage, trace.regions)
    return target


def _fit(value: jax.Array, target: torch.Tensor) -> jax.Array:
    dtype = backend.jax_dtype(target.dtype)
    value = jnp.asarray(value)
    is_wide = target.dtype is torch.int64 and int64.is_wide(value)
    if value.dtype != dtype and not is_wide:
        if jnp.issubdtype(value.dtype, jnp.complexfloating) and not jnp.issubdtype(
            dtype, jnp.complexfloating
        ):
            value = value.real
        value = value.astype(dtype)
    if value.shape != torch.Tensor.size(target):
        with int64.scope() if is_wide else contextlib.nullcontext():
            value = jnp.broadcast_to(value, torch.Tensor.size(target))
    return value
