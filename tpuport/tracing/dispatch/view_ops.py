"""Views: tensors that share the storage of another one."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.foundation.interop import backend
from tpuport.tracing.core.context import current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.op_info import OpInfo, functional_of, op_info
from tpuport.tracing.core.storage import differentiable
from tpuport.tracing.core.tensor import TracedTensor, meta_of, view_of
from tpuport.tracing.core.values import refuse_left_over
from tpuport.tracing.core.view_steps import VIEWS, OwnWindow, ViewStep, strided_step

aten = torch.ops.aten


def dispatch_view(func: Any, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that returns views of its first operand."""
    trace = current()
    base = args[0]
    if not isinstance(base, TracedTensor):
        base = trace.alias(base) if trace is not None else None
        if base is None:
            return func(*args, **kwargs)
    refuse_left_over(base, trace)
    meta_base = meta_of(base)
    meta = func(meta_base, *args[1:], **kwargs)
    steps = info.view(meta_base, meta, *args[1:], **kwargs)
    if isinstance(steps, ViewStep):
        detach = func is aten.detach.default
        if detach and trace is not None and trace.in_script:
            return view_of(base, ViewStep(lambda v: v, lambda b, new: new), meta)
        return view_of(base, steps, meta, detach=detach)
    views = [view_of(base, s, m) for s, m in zip(steps, meta, strict=True)]
    name = "".join(part.title() for part in func._opname.split("_"))
    for index, view in enumerate(views):
        view._unwritable = view._unwritable or (
            f"Output {index} of {name}Backward0 is a view and is being modified inplace. This view"
            " is the output of a function that returns multiple views. Such functions do not allow"
            " the output views to be modified inplace."
        )
    return type(meta)(views) if isinstance(meta, tuple) else views


def as_strided(
    base: torch.Tensor, size: list[int], stride: list[int], storage_offset: int | None = None
) -> TracedTensor:
    """Return a window into the storage of `base`, as torch defines it (not into `base` itself)."""
    if not isinstance(base, TracedTensor):
        base = current().alias(base)  # type: ignore[union-attr, assignment]
    assert isinstance(base, TracedTensor)
    offset: Any = storage_offset
    base.refuse_moving()
    if offset is None:
        offset = torch.Tensor.storage_offset(base)
    else:
        base.storage_offset()  # notes that the place is counted from the start
    root = base._storage
    shape = root.held.shape
    whole = torch.empty(shape, dtype=base.dtype, device="meta")
    same = root.wide or root.held.dtype == backend.jax_dtype(base.dtype)
    if root.stride != whole.stride() or not same:
        raise port_error(
            "as_strided of a tensor that is not contiguous in memory",
            code="TPU203",
            remedy="call .contiguous() first, or index with ordinary slices",
        )
    step = strided_step(root.value.size, size, stride, offset)
    detached = base._detached and differentiable(base.dtype)
    if detached and not base._frozen:
        inside = _inside(base, size, stride, offset)
        if inside is not None:
            return inside
        raise port_error(
            "as_strided of a detached tensor to which a value with a gradient was written",
            code="TPU203",
            remedy="index with ordinary slices",
        )
    flat = _only_own_gradient(base, whole, size, stride, offset)
    window = (ViewStep if flat is None else OwnWindow)(
        lambda v: step.forward(v.reshape(-1) if flat is None else flat(v.reshape(-1))),
        lambda b, new: step.inverse(b.reshape(-1), new).reshape(shape),
        places=step.places,
    )
    # The view steps of `base` are left out here, and a detach among them must not be lost.
    chain: tuple[ViewStep, ...] = (window,)
    if detached:
        stop = VIEWS[aten.detach.default](whole, whole)
        assert isinstance(stop, ViewStep)
        chain = (window, stop)
    meta = whole.as_strided(size, stride, offset)
    return TracedTensor(root, chain, meta, None, base._own_flow, base._detached)


def _inside(
    base: TracedTensor, size: list[int], stride: list[int], offset: int
) -> TracedTensor | None:
    """Return a window as a view of `base`, which has gradients of its own; None if it is not.

    `base` may be a tensor that was detached and then asked for gradients.
    """
    start = int(offset - torch.Tensor.storage_offset(base))
    count = math.prod(base.bound_shape)
    last = start + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if not torch.Tensor.is_contiguous(base) or start < 0 or 0 in size or last >= count:
        return None
    step = strided_step(count, size, stride, start)
    window = ViewStep(
        lambda value: step.forward(value.reshape(-1)),
        lambda old, new: step.inverse(old.reshape(-1), new).reshape(old.shape),
        places=step.places,
    )
    meta = torch.empty(base.bound_shape, dtype=base.dtype, device="meta")
    made = view_of(base, window, meta.as_strided(size, stride, start))
    assert isinstance(made, TracedTensor)
    return made


def _only_own_gradient(
    base: TracedTensor, whole: torch.Tensor, size: list[int], stride: list[int], offset: Any
) -> Callable[[jax.Array], jax.Array] | None:
    """Return what stops gradients of a flat storage outside of the memory that `base` covers.

    None if the window is inside of that.

    torch gives elements of a window no gradient if the tensor that it was taken of has them not,
    until something is written to that memory: then it makes the window anew, as one of all of it.
    """
    count = whole.numel()
    if torch.Tensor.numel(base) == count or not differentiable(base.dtype):
        return None
    covered = torch.zeros(count, dtype=torch.bool)
    place: Any = torch.Tensor.storage_offset(base)
    covered.as_strided(base.size(), base.stride(), place).fill_(True)
    if bool(covered.as_strided(size, stride, offset).all()):
        return None
    own, root, version = covered.numpy(), base._storage, base._storage.version

    def read(flat: jax.Array) -> jax.Array:
        is_written = root.version != version
        return flat if is_written else jnp.where(own, flat, jax.lax.stop_gradient(flat))

    return read


def _resized(target: TracedTensor, size: list[int]) -> tuple[list[int], tuple[int, ...]]:
    """Return the size and the strides that `resize_` gives a tensor in the memory it has."""
    if target.requires_grad:
        raise RuntimeError("cannot resize variables that require grad")
    if math.prod(size) > torch.Tensor.numel(target):
        raise port_error(
            f"resize_ to {tuple(size)}, which is more than the {target.numel()} elements there are",
            code="TPU201",
            remedy="assign a new tensor: `x = x.new_empty(size)`, for a buffer `self.x = ...`",
        )
    return size, torch.empty(size, device="meta").stride()


def inplace_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give the same tensor object other sizes, as unsqueeze_, transpose_, t_ and resize_ do."""
    from torch.utils._mode_utils import no_dispatch

    target = args[0]
    if func is aten.resize_.default and isinstance(target, TracedTensor):
        return inplace_view(aten.as_strided_.default, (target, *_resized(target, *args[1:])), {})
    twin = functional_of(func)
    windows = twin is aten.as_strided.default
    if not isinstance(target, TracedTensor) or not (windows or op_info(twin).view is not None):
        raise port_error(
            f"{func} on a traced tensor",
            code="TPU201",
            remedy="use the form of the method without the underscore",
        )
    if windows:
        result = as_strided(*args, **kwargs)
    else:
        result = dispatch_view(twin, op_info(twin), args, kwargs)
    # torch itself has to set the sizes and strides on the tensor object that the user holds.
    with no_dispatch():
        func(*args, **kwargs)
    target._chain = result._chain
    target._keep(result._held)
    return target
