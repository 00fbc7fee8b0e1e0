"""A list of as many tensors as data says, which a loop has filled: only joining reads it."""

from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import torch

from tpuport.tracing.core.concretize import raise_if
from tpuport.tracing.core.context import Trace, current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.storage import Flow
from tpuport.tracing.core.sym_node import NumberNode
from tpuport.tracing.core.tensor import TracedTensor, version, wrap
from tpuport.tracing.dynamic_shapes.extents import attach, isolated
from tpuport.tracing.dynamic_shapes.rowwise import scaled_size


@dataclass(frozen=True)
class CountedRun:
    """The rows `[rounds, ...]` of which the first `count` are there, and where they may be used.

    `seen` are tensors that share memory with rows, with their versions when the rows were made.
    """

    value: jax.Array
    count: NumberNode
    flow: Flow
    region: int
    seen: list[tuple[torch.Tensor, int]]


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise port_error(
        "a list to which a loop appends as many tensors as data says is read",
        code="TPU203",
        remedy="join it by torch.stack or torch.cat, and use the result",
    )


class CountedRows(list[Any]):
    """What stands for such a list after the loop.

    torch takes the one tensor in it, `stack` and `cat` know what it stands for, and everything else
    is refused: Python cannot know how long the list is.
    """


# Nobody reads the tensor that stands for all. `__class__` and what makes the object stay.
_KEPT = {"__class__", "__new__", "__init__", "__getattribute__", "__setattr__", "__delattr__"}
_KEPT |= {"__init_subclass__", "__subclasshook__", "__class_getitem__", "__dir__", "__doc__"}
for _name in dir(list):
    if _name not in _KEPT:
        setattr(CountedRows, _name, _refuse)


def counted_rows(trace: Trace, run: CountedRun, dtype: torch.dtype) -> CountedRows:
    """Return a list of the first `count` rows of an array."""
    row = wrap(jnp.zeros(run.value.shape[1:], run.value.dtype), dtype, trace=trace, flow=run.flow)
    row._run = run
    trace.has_runs = True
    return CountedRows((row,))


_JOINS = {torch.ops.aten.stack.default: True, torch.ops.aten.cat.default: False}


def joined(trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of `stack` or `cat` of such a list; None if an op has none.

    Raises:
        PortError: The op does something else with it, or a row was written since.
    """
    listed = [one for a in args for one in (a if isinstance(a, (list, tuple)) else [a])]
    found = [one for one in listed if isinstance(one, TracedTensor) and one._run is not None]
    if not found:
        return None
    run: CountedRun = found[0]._run
    is_stack = _JOINS.get(func)
    if is_stack is None or len(args[0]) != 1 or not _is_usable(trace, run):
        _refuse()
    rank = run.value.ndim - (not is_stack)
    if not rank:
        _refuse()  # `cat` takes no tensors without dims
    dim = int(args[1] if len(args) > 1 else kwargs.get("dim", 0))
    if not -rank <= dim < rank:
        message = f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but"
        raise IndexError(f"{message} got {dim})")
    return _join(run, dim % rank, found[0].dtype, is_stack=is_stack)


def _is_usable(trace: Trace, run: CountedRun) -> bool:
    """Return whether the rows may be used here, and are as the loop has left them."""
    are_same = all(version(one) == known for one, known in run.seen)
    return are_same and run.region in trace.regions


def _join(run: CountedRun, dim: int, dtype: torch.dtype, *, is_stack: bool) -> torch.Tensor:
    what = "stack expects a non-empty TensorList" if is_stack else _NOTHING
    if run.count.low < 1:
        raise_if(run.count.value < 1, RuntimeError(what))
    value, count = jnp.moveaxis(run.value, 0, dim), run.count
    if not is_stack:
        size = value.shape[dim + 1]
        merged = (*value.shape[:dim], value.shape[dim] * size, *value.shape[dim + 2 :])
        value, count = value.reshape(merged), scaled_size(count, size)
    made = wrap(value, dtype, trace=current(), flow=run.flow)
    return isolated(attach(made, {dim: count}))


_NOTHING = "torch.cat(): expected a non-empty list of Tensors"
