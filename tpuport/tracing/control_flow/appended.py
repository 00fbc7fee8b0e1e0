"""Lists to which the rounds of a loop append, where the loop is one `lax.scan`.

In the body the list is something that can be appended to and nothing else. What a round appends is
a result of the scan, and the list gets the items of all rounds after it. Where a traced value ends
the loop, the list is as long as data says after it; if rounds read it, it is that in them, too, and
the loop carries an array of all rows.
"""

import enum
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import torch

from tpuport.foundation import pytree
from tpuport.foundation.errors import TpuportError
from tpuport.foundation.interop import backend
from tpuport.tracing.control_flow.growth import Appended, Plain, Surroundings, copies
from tpuport.tracing.control_flow.merge import branch_leaf
from tpuport.tracing.control_flow.written_memory import WrittenMemory
from tpuport.tracing.core import series
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.row_list import ListLike
from tpuport.tracing.core.shared_tensors import Refusal
from tpuport.tracing.core.storage import Storage
from tpuport.tracing.core.sym_node import NumberNode
from tpuport.tracing.core.tensor import TracedTensor, version
from tpuport.tracing.core.values import flow_of, value_of
from tpuport.tracing.dynamic_shapes.counted_rows import CountedRows, CountedRun, unwritten
from tpuport.tracing.dynamic_shapes.extents import along, extents_of

_READ = "a round reads a list that it appends to"


class Unread(TpuportError):
    """The items of a list are not known: the body of a loop does more than append to it.

    If it `is_reading` the list, it can be tried again with all rows carried.
    """

    def __init__(self, why: str, *, is_reading: bool = False) -> None:
        super().__init__(why)
        self.is_reading = is_reading


class _Appender(ListLike):
    """What stands for a list in the body of a loop, and notes if it is read."""

    def __init__(self) -> None:
        self.appended: list[Any] = []
        self.is_read = False

    def append(self, item: Any) -> None:
        """Append an item."""
        self.appended.append(item)

    def extend(self, items: Any) -> None:
        """Append items."""
        self.appended.extend(items)

    def _read(self, *_: Any) -> NoReturn:
        self.is_read = True  # the code may catch what this raises
        raise Unread(_READ, is_reading=True)

    __getattr__ = _read
    __len__ = __iter__ = __reversed__ = __contains__ = __bool__ = _read
    __getitem__ = __setitem__ = __delitem__ = _read
    __add__ = __radd__ = __iadd__ = __mul__ = __rmul__ = __imul__ = _read
    __lt__ = __le__ = __gt__ = __ge__ = _read
    __eq__ = __ne__ = _read  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


@dataclass
class Round:
    """A round of a loop, when it has run.

    Attributes:
        first: The serial of the first storage that it made.
        inside: The variables that it began with.
        found: The variables after it.
        reached: The ids of what its functions reached before it, and of the variables' containers.
        is_next: Whether a number is what this round is known to append.
        memory: The memory from before the loop that it wrote to.
        seen: The serials of the storages that have been appended.
    """

    first: int
    inside: list[Any]
    found: list[Any]
    reached: set[int]
    is_next: Callable[[Any, Plain], bool]
    memory: WrittenMemory
    seen: set[int] = field(default_factory=set)


class _Tie(enum.Enum):
    """What an item has to do with a variable."""

    BEFORE = "it is the variable with which the round began"
    AFTER = "it is the variable after the round"
    SHARES = "it shares its memory with the variable after the round"


class AppendedList:
    """A list to which each round of a loop appends.

    Args:
        trace: The trace.
        surroundings: What the functions of the loop reach.
        appended: What a round appends.

    Raises:
        Unread: something else than variables, objects, lists and dicts may hold it.
    """

    def __init__(self, trace: Trace, surroundings: Surroundings, appended: Appended) -> None:
        found = surroundings.list_at(appended.holder)
        if found is None:
            raise Unread("a list is not held as in the first rounds")
        self.trace, self.appended, self._surroundings = trace, appended, surroundings
        self.value, self._places = found
        self._cells = [c for c in surroundings.cells if c.cell_contents is self.value]
        # By the number of an item: the number of a variable, and what they have to do.
        self._same: dict[int, tuple[int, _Tie]] = {}

    def rows(self, rounds: int) -> jax.Array:
        """Return the array of all rows that there may be, which a loop carries if rounds read them.

        Raises:
            Unread: the items are not one tensor a round.
        """
        dtype, one = self._one
        with torch.enable_grad():
            begun = [value_of(item) for item in self.value]
        value = jnp.zeros((rounds, *one.start), backend.jax_dtype(dtype))
        return jnp.concatenate([jnp.stack(begun).astype(value.dtype), value]) if begun else value

    @property
    def _one(self) -> tuple[torch.dtype, Plain]:
        """Return the dtype and sizes of what each round appends, and of what the list has before.

        Derivatives pass through it if they do through one of these.
        """
        items = self.appended.items
        if len(items) != 1 or items[0].dtype is None or len(self.appended.spec.containers) > 1:
            raise Unread("the rounds append more than one tensor each to a list")
        if not all(
            isinstance(item, torch.Tensor)
            and (tuple(item.shape), item.dtype) == (items[0].start, items[0].dtype)
            for item in self.value
        ):
            raise Unread("a list has other items before the loop")
        with torch.enable_grad():
            return items[0].dtype, replace(items[0], flow=max(items[0].flow, flow_of(self.value)))

    @contextmanager
    def collecting(
        self, index: NumberNode, rows: jax.Array | None
    ) -> Iterator[Callable[[], list[Any]]]:
        """Put something in the place of the list, and yield what tells what a round has appended.

        Args:
            index: The number of the round.
            rows: The rows of the rounds before, if a round reads the list.

        Raises:
            Unread: a round does what is not known here.
        """
        if rows is None:
            appender = _Appender()
            with self._replaced(appender):
                yield lambda: list(appender.appended)
            if appender.is_read:
                raise Unread(_READ, is_reading=True)
            return
        refusals: list[str] = []  # the code may catch what is raised

        def refuse(what: str) -> Unread:
            refusals.append(f"a list to which the rounds append is {what}")
            return Unread(refusals[0])

        run = self._counted(rows, index, refuse)
        collector = CountedRows(run)
        with self._replaced(collector):
            yield lambda: list(collector._run.last)
        appended = [id(one) for one in collector._run.last]
        # The array of all rows would not have what is written to one of them.
        if not unwritten([(one, known) for one, known in run.seen if id(one) not in appended]):
            raise Unread("rounds write to a tensor in a list to which they append")
        if refusals:
            raise Unread(refusals[0])

    @contextmanager
    def _replaced(self, value: Any) -> Iterator[None]:
        self._set(value)
        try:
            yield
        finally:
            self._set(self.value)

    def _counted(
        self, rows: jax.Array, rounds: NumberNode, refuse: Callable[[str], BaseException]
    ) -> CountedRun:
        """Return the rows of what the list has before the loop and of some rounds."""
        dtype, one = self._one
        count, region = along(rounds, len(self.value), 1), self.trace.regions[-1]
        seen = [(tensor, version(tensor)) for tensor in self.value]
        first = tuple(self.value)
        return CountedRun(
            self.trace, region, rows, count, dtype, one.flow, refuse, first=first, seen=seen
        )

    def arrays(self, items: list[Any], ran: Round) -> list[jax.Array]:
        """Return the arrays of what a round has appended.

        Raises:
            Unread: it is not what the rounds are known to append.
        """
        leaves, spec = pytree.flatten(items, leaf=branch_leaf, shared=False)
        if spec.key != self.appended.spec.key:
            raise Unread("the rounds do not append alike to a list")
        parts = [one for one in spec.containers.values() if not isinstance(one, tuple)]
        if any(id(one) in ran.reached for one in parts):
            raise Unread("a container that is appended to a list has another name")
        self._same, made = {}, []
        for index, (leaf, one) in enumerate(zip(leaves, self.appended.items, strict=True)):
            if one.dtype is not None:
                self._note(index, leaf, one, ran)
                self._refuse_written(index, ran.memory)
                made.append(value_of(leaf))
            elif not ran.is_next(leaf, one):
                raise Unread("a number that is appended to a list changes in another way")
        return made

    def _note(self, index: int, leaf: Any, one: Plain, ran: Round) -> None:
        """Note what an appended tensor has to do with the variables."""
        is_alike = isinstance(leaf, TracedTensor) and leaf.dtype == one.dtype
        size = torch.Tensor.size(leaf) if is_alike else ()
        if not is_alike or tuple(size) != one.start or extents_of(leaf):
            raise Unread("a tensor that is appended to a list has another size or dtype")
        if not torch.Tensor.is_contiguous(leaf):
            raise Unread("a tensor that is appended to a list has another layout")
        storage: Storage = leaf._storage
        before = [at for at, variable in enumerate(ran.inside) if variable is leaf]
        if before:
            self._same[index] = before[0], _Tie.BEFORE
        elif flow_of([leaf]) != one.flow or not self.appended.alike[index]:
            raise Unread("a gradient passes through the tensors of some rounds only")
        elif storage.serial < ran.first or any(self.trace.shared.of(storage)):
            raise Unread("a tensor that is appended to a list may be another one")
        if storage.serial in ran.seen:
            raise Unread("two tensors that are appended to lists share memory")
        ran.seen.add(storage.serial)
        for at, variable in enumerate(ran.found):
            if isinstance(variable, TracedTensor) and variable._storage is storage:
                self._same[index] = at, _Tie.AFTER if variable is leaf else _Tie.SHARES

    def _refuse_written(self, index: int, memory: WrittenMemory) -> None:
        """Refuse an appended tensor if rounds write to it, this one or the next."""
        at, same = self._same.get(index, (-1, None))
        written = memory.given if same is _Tie.BEFORE else memory.written
        if at in written:
            raise Unread("rounds write to a tensor that is appended to a list")

    def extend(
        self,
        arrays: list[jax.Array],
        rounds: int,
        before: list[Any],
        after: list[Any],
        written: Refusal,
    ) -> None:
        """Append the items of all rounds to the list.

        Args:
            arrays: Those that `arrays` returned, stacked.
            rounds: How many rounds there were.
            before: The variables before the loop.
            after: The variables after it.
            written: Makes the error for a write to one of two tensors that share memory.
        """
        given = iter(arrays)
        columns: list[list[Any]] = []
        for index, one in enumerate(self.appended.items):
            if one.dtype is None:
                step = one.step
                columns.append([one.start + step * r if step else one.start for r in range(rounds)])
                continue
            column = series.rows(self.trace, next(given), one.dtype, one.flow)
            columns.append(column)
            at, same = self._same.get(index, (0, None))
            if same is _Tie.BEFORE:
                column[0] = before[at]
            elif same is _Tie.AFTER:
                series.make_row(column[-1], after[at])
                column[-1] = after[at]
            elif same is _Tie.SHARES:
                one_of, region = after[at]._storage, self.trace.regions[-1]
                self.trace.shared.add(one_of, column[-1]._storage, None, region, written)
        for number in range(rounds):
            leaves = [column[number] for column in columns]
            self.value.extend(pytree.unflatten(self.appended.spec, leaves))

    @property
    def variables(self) -> set[int]:
        """Return the variables that a round has appended, or that share memory with what it has."""
        return {at for at, _ in self._same.values()}

    @property
    def is_read(self) -> bool:
        """Return whether the loop carries the rows, as its rounds read them."""
        return self.appended.is_read

    def after(
        self, rows: jax.Array | None, arrays: list[jax.Array], index: NumberNode
    ) -> jax.Array | None:
        """Return the rows that a loop carries after a round; None if it carries none."""
        if rows is None:
            return None
        count = along(index, len(self.value), 1)
        return jax.lax.dynamic_update_index_in_dim(rows, arrays[0], count.value, 0)

    def hold(
        self,
        arrays: list[jax.Array],
        rounds: NumberNode,
        tensors: tuple[list[Any], list[Any]],
        refuse: Callable[[str], BaseException],
    ) -> None:
        """Put what stands for the items of as many rounds as data says in the place of the list.

        Args:
            arrays: Those that `arrays` returned, stacked.
            rounds: How many rounds there were.
            tensors: The variables before the loop, and after it.
            refuse: Makes the error for what cannot be done with such a list.

        Raises:
            Unread: something that is not known here holds the list, or it has other items.
        """
        if self._has_others():
            raise Unread("a list has other names before the loop")
        rows = jnp.concatenate([self.rows(0), arrays[0]]) if self.value else arrays[0]
        run = self._counted(rows, rounds, refuse)
        for at, same in self._same.values():
            tensor = tensors[same is not _Tie.BEFORE][at]
            run.seen.append((tensor, version(tensor)))
            if same is _Tie.BEFORE:
                run = replace(run, first=(*run.first, tensor))
            # Of no rounds, the last would be what the list has had.
            elif same is _Tie.AFTER and (not self.value or run.count.low > len(self.value)):
                run = replace(run, last=(tensor,))
        self._set(CountedRows(run))

    def _has_others(self) -> bool:
        """Return whether something holds the list besides what is known here.

        That is a variable of a function that runs, which the collector of garbage does not see, or
        a container or object that the loop does not reach.
        """
        holders = self._surroundings.holders(self._places)
        held = gc.get_referrers(self.value)
        # `getrefcount` holds it, too.
        if sys.getrefcount(self.value) - 1 > len(held):
            return True
        known = {id(self), id(vars(self)), *map(id, (*self._cells, *holders))}
        others = [one for one in held if id(one) not in known]
        own = copies() if others else set()
        return any(id(one) not in own for one in others)

    def _set(self, value: Any) -> None:
        for cell in self._cells:
            cell.cell_contents = value
        self._surroundings.write(self._places, [value] * len(self._places))
