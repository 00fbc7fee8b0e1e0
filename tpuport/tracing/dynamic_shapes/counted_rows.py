"""A list of as many tensors as data says, which a loop fills or has filled."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import torch

from tpuport.foundation import pytree
from tpuport.foundation.errors import PortError
from tpuport.tracing.core.arguments import program_leaf
from tpuport.tracing.core.concretize import raise_if
from tpuport.tracing.core.context import Trace, current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.storage import Flow
from tpuport.tracing.core.sym_node import Linear, NumberNode
from tpuport.tracing.core.sym_numbers import from_node
from tpuport.tracing.core.tensor import TracedTensor, version, wrap
from tpuport.tracing.core.values import flow_of, value_of
from tpuport.tracing.dynamic_shapes.extents import attach, extents_of, isolated
from tpuport.tracing.dynamic_shapes.rowwise import scaled_size


@dataclass(frozen=True)
class CountedRun:
    """The rows `[rounds, ...]` of which the first `count` are there, and where they may be used.

    `seen` are tensors that share memory with rows, with their versions when the rows were made.
    `refuse` makes the error for what cannot be done with such rows, from words for that.
    """

    value: jax.Array
    count: NumberNode
    flow: Flow
    region: int
    seen: list[tuple[torch.Tensor, int]]
    refuse: Callable[[str], BaseException]

    def at(self, number: jax.Array | int) -> jax.Array:
        """Return the array of one row."""
        return jax.lax.dynamic_index_in_dim(self.value, number, 0, keepdims=False)

    def shifted(self, by: int) -> NumberNode:
        """Return the number of rows plus a known number."""
        count = self.count
        assert count.expr is not None
        ends = count.low + by, count.high + by
        return NumberNode(count.value + by, int, *ends, count.expr.plus(Linear(by)))


def refused(what: str) -> PortError:
    """Return the refusal of what needs the number of rows, or each of them."""
    return port_error(
        f"a list to which a loop appends as many tensors as data says is {what}",
        code="TPU203",
        remedy="join it by torch.stack or torch.cat, and use the result",
    )


class CountedRows(list[Any]):
    """What stands for such a list: one of as many tensors as data says.

    torch takes the one tensor in it, for which `stack` and `cat` know what it stands for. The code
    may append, ask for the length, and take a row or the rows after some. Everything else is
    refused, as Python cannot know how long the list is.
    """

    is_traced = True

    def __init__(self, trace: Trace, run: CountedRun, dtype: torch.dtype) -> None:
        list.__init__(self)
        self._trace, self._dtype = trace, dtype
        self.appended: list[Any] = []
        # The rows that the code has taken, by their numbers.
        self._taken: dict[int, TracedTensor] = {}
        list.append(self, None)
        self._set(run)

    def _set(self, run: CountedRun) -> None:
        row = wrap(jnp.zeros_like(run.value[0]), self._dtype, trace=self._trace, flow=run.flow)
        row._run, self._run = run, run
        self._trace.has_runs = True
        list.__setitem__(self, 0, row)

    @property
    def length(self) -> Any:
        """Return how many rows there are, as a Python number that may be traced."""
        return from_node(self._usable().count)

    def _usable(self) -> CountedRun:
        """Return the rows, if they may be used here and are as they were made."""
        if not _is_usable(self._trace, self._run):
            raise self._run.refuse(_WRITTEN)
        return self._run

    def __len__(self) -> int:
        return int(self.length)

    def __bool__(self) -> bool:
        return bool(self.length != 0)

    def append(self, item: Any) -> None:
        """Append a tensor that is like the others."""
        run = self._usable()
        is_alike = isinstance(item, torch.Tensor) and item.dtype == self._dtype
        if not is_alike or extents_of(item) or tuple(item.shape) != run.value.shape[1:]:
            raise run.refuse("given an item of another kind or size")
        value = run.value
        if run.count.high >= value.shape[0]:
            value = jnp.pad(value, [(0, 1)] + [(0, 0)] * (value.ndim - 1))
        with torch.enable_grad():  # a list has the tensor itself
            row, flow = value_of(item), max(run.flow, flow_of([item]))
        value = jax.lax.dynamic_update_index_in_dim(value, row, run.count.value, 0)
        seen = [*run.seen, (item, version(item))]
        self._set(replace(run, value=value, count=run.shifted(1), flow=flow, seen=seen))
        self.appended.append(item)
        self._taken.clear()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._slice(index)
        if type(index) is not int:
            raise self._run.refuse("indexed by a value of the program")
        if -len(self.appended) <= index < 0:
            return self.appended[index]
        if index not in self._taken:
            self._taken[index] = self._row(self._usable(), index)
        return self._taken[index]

    def _row(self, run: CountedRun, index: int) -> TracedTensor:
        least = index + 1 if index >= 0 else -index
        if run.count.low < least:
            raise_if(run.count.value < least, IndexError("list index out of range"))
        if least > run.value.shape[0]:
            raise run.refuse("indexed past its end")
        value = run.at(index if index >= 0 else run.count.value + index)
        made = wrap(value, self._dtype, trace=self._trace, flow=run.flow)
        # A write to the row would have to be one to the list, and to what else the row is.
        for other in (list.__getitem__(self, 0), *self._taken.values(), *(t for t, _ in run.seen)):
            if isinstance(other, TracedTensor):
                region = self._trace.regions[-1]
                written = partial(run.refuse, _WRITTEN)
                self._trace.shared.add(made._storage, other._storage, None, region, written)
        return made

    def joined(self) -> torch.Tensor:
        """Return the rows as one tensor, which leaves the program as a list.

        Raises:
            BaseException: code outside may have another name for a row.
        """
        run = self._run  # where a branch is merged, lists like this one have no common form
        if self._taken or run.seen or run.count.low < 1:
            raise run.refuse("returned, and may be empty or have a tensor with another name")
        made = _join(run, 0, self._dtype, is_stack=True)
        made._is_list = True  # type: ignore[attr-defined]
        return made

    def _slice(self, index: slice) -> list[Any]:
        run, first = self._usable(), index.start or 0
        last = index.stop if index.stop is not None else 0
        known = all(type(one) is int for one in (first, last)) and index.step in (None, 1)
        if known and first < 0 and index.stop is None and -first <= run.count.low:
            return [self[number] for number in range(first, 0)]
        if not known or first < 0 or last > 0 or run.count.low < first - last:
            raise run.refuse("cut at a place that may not be in it")
        count = run.shifted(last - first)
        return CountedRows(
            self._trace, replace(run, value=run.value[first:], count=count), self._dtype
        )


def _refuse(self: CountedRows, *_: Any, **__: Any) -> NoReturn:
    raise self._run.refuse("read item by item or changed")


# `__class__` and what makes the object stay.
_KEPT = {"__class__", "__new__", "__init__", "__getattribute__", "__setattr__", "__delattr__"}
_KEPT |= {"__init_subclass__", "__subclasshook__", "__class_getitem__", "__dir__", "__doc__"}
for _name in dir(list):
    if _name not in _KEPT and _name not in vars(CountedRows):
        setattr(CountedRows, _name, _refuse)


_WRITTEN = "used after a tensor in it was written to, or outside of the branch that it is from"
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
    rank = run.value.ndim - (not is_stack)
    if is_stack is None or len(args[0]) != 1 or not rank:  # `cat` takes no tensors without dims
        raise run.refuse("given to an operation that does not join it")
    if not _is_usable(trace, run):
        raise run.refuse(_WRITTEN)
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


def lists_joined(result: Any) -> Any:
    """Return the result of a call with its lists of as many tensors as data says, each joined.

    The call hands the rows out as a list again.
    """

    def is_leaf(value: Any) -> bool:
        return type(value) is CountedRows or program_leaf(value)

    leaves, spec = pytree.flatten(result, leaf=is_leaf)
    if not any(type(leaf) is CountedRows for leaf in leaves):
        return result
    return pytree.unflatten(
        spec, [leaf.joined() if type(leaf) is CountedRows else leaf for leaf in leaves]
    )
