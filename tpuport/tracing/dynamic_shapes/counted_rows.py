"""A list of as many tensors as data says, which a loop fills or has filled."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import torch
from torch.utils import _pytree

from tpuport.foundation import pytree
from tpuport.foundation.errors import PortError
from tpuport.tracing.core.arguments import program_leaf
from tpuport.tracing.core.concretize import raise_if
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.row_list import ListLike
from tpuport.tracing.core.storage import Flow
from tpuport.tracing.core.sym_node import Linear, NumberNode
from tpuport.tracing.core.sym_numbers import from_node
from tpuport.tracing.core.tensor import TracedTensor, version, wrap
from tpuport.tracing.core.values import flow_of, value_of
from tpuport.tracing.dynamic_shapes.extents import attach, extents_of, isolated
from tpuport.tracing.dynamic_shapes.rowwise import scaled_size

# A tensor, and its version when something was known of it.
Seen = tuple[torch.Tensor, int]


@dataclass(frozen=True, eq=False)
class CountedRun(pytree.Atom):
    """The rows `[rounds, ...]` of which the first `count` are there, and where they may be used.

    Attributes:
        trace: The trace, and the region of it that they are from.
        value: The rows.
        count: How many there are.
        dtype: Torch's dtype of a row.
        flow: Whether derivatives pass through them.
        refuse: Makes the error for what cannot be done with such rows, from words for that.
        first: The tensors that the first rows are, where there are as many rows.
        last: The tensors that the last rows are, where there are as many.
        seen: What shares memory with rows, and the rows that code has taken.
        taken: Those by their number, and by the region in which they were taken.
    """

    trace: Trace
    region: int
    value: jax.Array
    count: NumberNode
    dtype: torch.dtype
    flow: Flow
    refuse: Callable[[str], BaseException]
    first: tuple[torch.Tensor, ...] = ()
    last: tuple[torch.Tensor, ...] = ()
    seen: list[Seen] = field(default_factory=list)
    taken: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def is_usable(self) -> bool:
        """Return whether the rows may be used here, and are as they were made."""
        return self.region in self.trace.regions and unwritten(self.seen)

    def shifted(self, by: int) -> NumberNode:
        """Return the number of rows plus a known number."""
        count = self.count
        assert count.expr is not None
        ends = count.low + by, count.high + by
        return NumberNode(count.value + by, int, *ends, count.expr.plus(Linear(by)))

    def row(self, index: int) -> torch.Tensor:
        """Return a row.

        Raises:
            BaseException: It cannot be told which one it is.
        """
        least = index + 1 if index >= 0 else -index
        if self.count.low < least:
            raise_if(self.count.value < least, IndexError("list index out of range"))
        if least > self.value.shape[0]:
            raise self.refuse("indexed past its end")
        if 0 <= index < len(self.first):
            return self.first[index]
        if -len(self.last) <= index < 0:
            return self.last[index]
        regions = self.trace.regions
        known = [self.taken[index, one] for one in regions if (index, one) in self.taken]
        return known[0] if known else self._made(index)

    def _made(self, index: int) -> torch.Tensor:
        number = index if index >= 0 else self.count.value + index
        value = jax.lax.dynamic_index_in_dim(self.value, number, 0, keepdims=False)
        made = wrap(value, self.dtype, trace=self.trace, flow=self.flow)
        # A write to the row may be one to another row, or to what else it is.
        region, written = self.trace.regions[-1], partial(self.refuse, WRITTEN)
        for other, _ in self.seen:
            if isinstance(other, TracedTensor):
                self.trace.shared.add(made._storage, other._storage, None, region, written)
        self.taken[index, region] = made
        self.seen.append((made, version(made)))
        return made


def unwritten(seen: list[Seen]) -> bool:
    """Return whether nobody has written to tensors since their versions were noted."""
    return all(version(one) == known for one, known in seen)


def refused(what: str) -> PortError:
    """Return the refusal of what needs the number of rows, or each of them."""
    return port_error(
        f"a list to which a loop appends as many tensors as data says is {what}",
        code="TPU203",
        remedy="join it by torch.stack or torch.cat, and use the result",
    )


class CountedRows(ListLike, pytree.Atom, list[Any]):
    """What stands for such a list: one of as many tensors as data says.

    torch takes the one tensor in it, for which `stack` and `cat` know what it stands for. The code
    may append, ask for the length, and take a row or the rows after some. Everything else is
    refused, as Python cannot know how long the list is.
    """

    __slots__ = ("_run",)
    # Equal lists need not be one.
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, run: CountedRun) -> None:
        list.__init__(self)
        list.append(self, None)
        self._set(run)

    def _set(self, run: CountedRun) -> None:
        zeros = jnp.zeros_like(run.value[0])
        row = wrap(zeros, run.dtype, trace=run.trace, flow=run.flow)
        row._run, self._run = run, run
        run.trace.has_runs = True
        list.__setitem__(self, 0, row)

    def _usable(self) -> CountedRun:
        if not self._run.is_usable():
            raise self._run.refuse(WRITTEN)
        return self._run

    def __len__(self) -> int:
        return int(length(self))

    def __bool__(self) -> bool:
        return bool(length(self) != 0)

    def append(self, item: Any) -> None:
        """Append a tensor that is like the others."""
        run = self._usable()
        if run.region != run.trace.regions[-1]:  # the other side of the branch has it without that
            raise run.refuse("changed in a branch or loop")
        is_alike = isinstance(item, torch.Tensor) and item.dtype == run.dtype
        if not is_alike or extents_of(item) or tuple(item.shape) != run.value.shape[1:]:
            raise run.refuse("given an item of another kind or size")
        value = run.value
        if run.count.high >= value.shape[0]:
            value = jnp.pad(value, [(0, 1)] + [(0, 0)] * (value.ndim - 1))
        with torch.enable_grad():  # a list has the tensor itself
            row, flow = value_of(item), max(run.flow, flow_of([item]))
        value = jax.lax.dynamic_update_index_in_dim(value, row, run.count.value, 0)
        run.seen.append((item, version(item)))
        last, kept = (*run.last, item), {at: one for at, one in run.taken.items() if at[0] >= 0}
        count = run.shifted(1)
        self._set(replace(run, value=value, count=count, flow=flow, last=last, taken=kept))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._slice(index)
        if type(index) is not int:
            raise self._run.refuse("indexed by a value of the program")
        return self._usable().row(index)

    def _slice(self, index: slice) -> list[Any]:
        run, first = self._usable(), index.start or 0
        last = index.stop if index.stop is not None else 0
        known = all(type(one) is int for one in (first, last)) and index.step in (None, 1)
        if known and first < 0 and index.stop is None and -first <= run.count.low:
            return [self[number] for number in range(first, 0)]
        if not known or first < 0 or last > 0 or run.count.low < first - last:
            raise run.refuse("cut at a place that may not be in it")
        cut = replace(
            run,
            value=run.value[first:],
            count=run.shifted(last - first),
            first=run.first[first:],
            last=run.last[: len(run.last) + last] if -last < len(run.last) else (),
            taken={},
        )
        return CountedRows(cut)


def length(rows: CountedRows) -> Any:
    """Return how many rows there are, as a Python number that may be traced."""
    return from_node(rows._usable().count)


def _refuse(self: CountedRows, *_: Any, **__: Any) -> NoReturn:
    raise self._run.refuse("read item by item or changed")


# What makes the object stay.
_KEPT = {"__class__", "__new__", "__init__", "__getattribute__", "__setattr__", "__delattr__"}
_KEPT |= {"__init_subclass__", "__subclasshook__", "__class_getitem__", "__dir__", "__doc__"}
for _name in {*dir(list), "__radd__"} - _KEPT - vars(CountedRows).keys():
    setattr(CountedRows, _name, _refuse)
# Where torch walks through structures in Python, this is no leaf.
_pytree._private_register_pytree_node(CountedRows, _refuse, lambda parts, _: list(parts))


WRITTEN = "used after a tensor in it was written to, or outside of the branch that it is from"
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
    if not run.is_usable():
        raise run.refuse(WRITTEN)
    dim = int(args[1] if len(args) > 1 else kwargs.get("dim", 0))
    if not -rank <= dim < rank:
        message = f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but"
        raise IndexError(f"{message} got {dim})")
    return _join(run, dim % rank, is_stack=is_stack)


def _join(run: CountedRun, dim: int, *, is_stack: bool) -> torch.Tensor:
    what = "stack expects a non-empty TensorList" if is_stack else _NOTHING
    if run.count.low < 1:
        raise_if(run.count.value < 1, RuntimeError(what))
    value, count = jnp.moveaxis(run.value, 0, dim), run.count
    if not is_stack:
        size = value.shape[dim + 1]
        merged = (*value.shape[:dim], value.shape[dim] * size, *value.shape[dim + 2 :])
        value, count = value.reshape(merged), scaled_size(count, size)
    made = wrap(value, run.dtype, trace=run.trace, flow=run.flow)
    return isolated(attach(made, {dim: count}))


_NOTHING = "torch.cat(): expected a non-empty list of Tensors"


def lists_joined(result: Any) -> Any:
    """Return the result of a call with its lists of as many tensors as data says, each joined.

    The call hands the rows out as a list again.
    """

    def is_leaf(value: Any) -> bool:
        return type(value) is CountedRows or program_leaf(value)

    leaves, spec = pytree.flatten(result, leaf=is_leaf)
    seen: set[int] = set()
    for index, leaf in enumerate(leaves):
        if type(leaf) is CountedRows:
            leaves[index] = _given(leaf, is_again=id(leaf) in seen)
            seen.add(id(leaf))
        elif isinstance(leaf, TracedTensor) and leaf._run is not None:
            raise leaf._run.refuse("read by the functions of Python's list class")
    return pytree.unflatten(spec, leaves) if seen else result


def _given(rows: CountedRows, *, is_again: bool) -> torch.Tensor:
    """Return the rows as one tensor, which leaves the program as a list.

    Raises:
        BaseException: code outside may have another name for the list or for a row.
    """
    run = rows._run  # where a branch is merged, lists like this one have no common form
    if is_again or run.seen or run.count.low < 1:
        raise run.refuse("returned, and may be empty, or it or a tensor in it has another name")
    made = _join(run, 0, is_stack=True)
    made._is_list = True  # type: ignore[attr-defined]
    return made


def refuse_kept(roots: list[Any]) -> None:
    """Refuse such lists in what the caller can see after a call: attributes and arguments.

    Raises:
        BaseException: there is one.
    """

    def parts(value: Any) -> list[Any]:
        if isinstance(value, (torch.Tensor, *pytree.ATOMS)):
            return []
        return pytree.children(value).all

    for value in pytree.walk(roots, parts):
        if type(value) is CountedRows:
            raise value._run.refuse("kept in an attribute or an argument after the call")
