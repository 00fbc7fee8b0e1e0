"""The memory of traced tensors: a value that all views of one tensor share."""

import enum
import itertools
from typing import Any

import jax
import torch

from tpuport.foundation.pytree import is_sparse
from tpuport.tracing.core import int64
from tpuport.tracing.core.active import ActiveTrace
from tpuport.tracing.core.view_steps import Detach, replace_value

SERIALS = itertools.count()


class Flow(enum.IntEnum):
    """Whether derivatives pass through a tensor, and whether user code sees that they do."""

    # None: a constant, or a value made under no_grad or by detach.
    STOPPED = 0
    # jax may differentiate it, and eager would see requires_grad=False: what comes from arguments.
    HIDDEN = 1
    # requires_grad is True here, and in eager if a branch went one way.
    MAYBE = 2
    # requires_grad is True, as in eager.
    SEEN = 3


def differentiable(dtype: torch.dtype) -> bool:
    """Return whether tensors of a dtype have gradients."""
    return dtype.is_floating_point or dtype.is_complex


def memory_of(tensor: torch.Tensor) -> tuple[int, Any]:
    """Return a number for the memory of a host tensor, and what has to live for it to stay valid.

    A sparse tensor, which is made of others, is its own memory.
    """
    if tensor.layout is torch.strided:
        storage = tensor.untyped_storage()
        return storage._cdata, storage
    return -id(tensor), tensor


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a host tensor is made of: indices and values of a sparse one."""
    if not is_sparse(tensor):
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    columns = tensor.layout in (torch.sparse_csc, torch.sparse_bsc)
    outer = tensor.ccol_indices() if columns else tensor.crow_indices()
    return [outer, tensor.row_indices() if columns else tensor.col_indices(), tensor.values()]


class Storage:
    """The value behind a tensor and all of its views; `version` counts the writes.

    `stride` is the torch layout of the tensor that made it (the value is in logical order), `flow`
    that of the values written to it since. `held` is the value, of 64 bits if an int64 result may
    need them (`wide`); `value` is what operations take that know 32 bits only. `bounds` holds a
    value, its dtype, and the bounds of all of its elements.
    """

    __slots__ = (
        "__weakref__",
        "bounds",
        "flow",
        "held",
        "narrow",
        "serial",
        "stride",
        "trace",
        "version",
        "wide",
    )

    def __init__(self, value: jax.Array, trace: ActiveTrace | None) -> None:
        self.value = value
        self.version = 0
        self.flow = Flow.STOPPED
        self.stride: tuple[int, ...] | None = None
        self.trace = trace
        self.serial = next(SERIALS)
        self.bounds: tuple[jax.Array, torch.dtype, tuple[float, float]] | None = None
        if trace is not None:
            trace.created(self)

    @property
    def value(self) -> jax.Array:
        """Return the value in the dtype that jax has for it; one that does not fit raises."""
        return self.narrowed(self.held) if self.wide else self.held

    @value.setter
    def value(self, value: jax.Array) -> None:
        self.held, self.wide, self.narrow = value, int64.is_wide(value), None

    def narrowed(self, value: jax.Array) -> jax.Array:
        """Return a wide value of this storage, or of a view of it, in 32 bits."""
        regions = [0] if self.trace is None else self.trace.regions
        if self.narrow is None or self.narrow[0] is not value or self.narrow[1] not in regions:
            self.narrow = (value, regions[-1], int64.narrowed(value))
        return self.narrow[2]

    def set(self, value: jax.Array) -> None:
        """Replace the value; every view reads it again on next use."""
        if self.trace is not None:
            self.trace.writing(self)
        self.value = value
        self.version += 1


def detaching(held: jax.Array, trace: ActiveTrace | None) -> Detach:
    """Return the step to a detached tensor, whose value so far is `held`.

    Eager gives it a graph of its own when a value with a gradient is written to it: it goes on to
    share memory with the tensor that it was detached from, but no gradient.
    """
    graph = Storage(held, trace)

    def forward(base: jax.Array) -> jax.Array:
        value = jax.lax.stop_gradient(base)
        return replace_value(graph.held, value) if graph.version else value

    return Detach(forward, replace_value, graph)
