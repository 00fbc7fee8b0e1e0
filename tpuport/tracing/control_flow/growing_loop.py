"""`for` loops over a range whose rounds make tensors longer, as one `lax.scan`.

A tensor that grows by as many rows in each round is a buffer of its last size. In round `i` it is
a tensor whose size depends on data: its first size plus `i` times the rows of a round. The
first rounds that a trace runs show which variables grow; the trace then begins again, and the
body has to prove on the buffers that its variables change as they did. Any other loop is run by
Python, round by round.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.foundation import pytree
from tpuport.foundation.errors import PortError
from tpuport.foundation.pytree.snapshot import Snapshot
from tpuport.foundation.user_frames import user_line
from tpuport.tracing.control_flow.merge import branch_leaf, leaf_value
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.context import Effects, Trace, current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.loop_sites import not_whole
from tpuport.tracing.core.speculation import RestartTrace
from tpuport.tracing.core.sym_node import Linear, NumberNode
from tpuport.tracing.core.tensor import SERIALS, Flow, TracedTensor, version, wrap
from tpuport.tracing.core.transforms import transforming
from tpuport.tracing.core.values import flow_of, value_of
from tpuport.tracing.dynamic_shapes.extents import attach, extents_of, note_dynamic, strip

# Of fewer rounds each is compiled by itself.
_FEWEST_ROUNDS = 4
_SEEN_ROUNDS = 2
# Numbers are computed in 32 bits.
_LARGEST = 1 << 30

_Carried = tuple[list[jax.Array], list[jax.Array], jax.Array | None]


@dataclass(frozen=True)
class _Plain:
    """A number or tensor at the start of a loop: what each round adds to it, or to its size.

    Attributes:
        start: The number, or the sizes of the tensor.
        step: What a round adds to the number, or to the size along `dim`.
        dim: The dim along which a tensor grows; None for a number and a tensor that does not.
        dtype: The dtype of a tensor, None for a number.
        flow: Whether derivatives pass through a tensor.
    """

    start: Any
    step: int = 0
    dim: int | None = None
    dtype: torch.dtype | None = None
    flow: Flow = field(default=Flow.STOPPED, compare=False)

    def size(self, rounds: int) -> int:
        """Return the size along `dim` after some rounds."""
        assert self.dim is not None
        return self.start[self.dim] + self.step * rounds


def traced_range(
    numbers: Any, body: Callable[..., Any], operands: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Run `for number in numbers: operands = body(number, *operands)`.

    Raises:
        RestartTrace: what its first rounds have shown is noted for the next attempt.
    """
    trace = current()
    is_short = not isinstance(numbers, range) or len(numbers) < _FEWEST_ROUNDS
    if trace is None or trace.explorer is None or is_short or transforming():
        return _unrolled(numbers, body, operands)
    leaves = pytree.flatten(operands, leaf=branch_leaf, shared=False)[0]
    loops, site = trace.explorer.plan.loops, user_line()
    key = (site, numbers, tuple(_described(leaf) for leaf in leaves))
    if key not in loops:
        loops[key], operands = _observed(numbers[:_SEEN_ROUNDS], body, operands)
        if not isinstance(loops[key], str):
            raise RestartTrace()
        numbers = numbers[_SEEN_ROUNDS:]
    if isinstance(loops[key], str):
        if trace.explorer.plan.whole:
            raise not_whole(loops[key], site)
        trace.explorer.branches[site] = f"{len(key[1])} rounds compiled one by one: {loops[key]}"
        return _unrolled(numbers, body, operands)
    trace.explorer.branches[site] = f"one lax.scan of {len(numbers)} rounds, with growing tensors"
    try:
        return _Growing(trace, numbers, body, operands, loops[key]).run()
    except (PortError, RuntimeError, TypeError, ValueError, IndexError) as error:
        # The loop is what it was before: Python runs it.
        loops[key] = _reason(error)
        raise RestartTrace() from error


def _reason(error: Exception) -> str:
    text = error.message if isinstance(error, PortError) else str(error)
    return text.partition("\n")[0]


def _unrolled(numbers: Any, body: Callable[..., Any], operands: tuple[Any, ...]) -> tuple[Any, ...]:
    for number in numbers:
        operands = body(number, *operands)
    return operands


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (tuple(torch.Tensor.size(leaf)), leaf.dtype)
    return None if isinstance(leaf, sym_numbers.SYMBOLIC) else leaf


def _observed(
    numbers: range, body: Callable[..., Any], operands: tuple[Any, ...]
) -> tuple[list[_Plain] | str, tuple[Any, ...]]:
    """Run some rounds. Return how each of them changes the variables, and these after them.

    How is a text if the rounds differ, no tensor grows, or a round changes Python values.
    """
    states, watch = [operands], _Reached(body)
    for number in numbers:
        states.append(body(number, *states[-1]))
    flat = [pytree.flatten(tuple(s), leaf=branch_leaf, shared=False) for s in states]
    if any(spec.key != flat[0][1].key for _, spec in flat):
        return "a variable gets another structure", states[-1]
    if watch.has_iterator or watch.changed():
        return "a round changes Python values that are no variables of the loop", states[-1]
    found = [_change(list(seen)) for seen in zip(*(leaves for leaves, _ in flat), strict=True)]
    kept = [one for one in found if one is not None]
    if len(kept) < len(found):
        return "the rounds do not change the variables alike", states[-1]
    grows = any(one.dim is not None for one in kept)
    return (kept if grows else "no variable grows"), states[-1]


def _change(seen: list[Any]) -> _Plain | None:
    """Return how each round changes a variable, None where that is not one change."""
    first = seen[0]
    if any(type(one) is not type(first) for one in seen if not isinstance(one, torch.Tensor)):
        return None
    if isinstance(first, torch.Tensor):
        return _growth(seen) if all(isinstance(one, torch.Tensor) for one in seen) else None
    if type(first) is int:
        steps = {b - a for a, b in itertools.pairwise(seen)}
        return _Plain(first, steps.pop()) if len(steps) == 1 else None
    is_known = type(first) in (bool, float) and len(set(map(repr, seen))) == 1
    return _Plain(first) if is_known else None


def _growth(seen: list[torch.Tensor]) -> _Plain | None:
    sizes = [tuple(torch.Tensor.size(one)) for one in seen]
    alike = len({(len(size), one.dtype) for size, one in zip(sizes, seen, strict=True)}) == 1
    if not alike or any(extents_of(one) for one in seen):
        return None
    flow = max(flow_of([one]) for one in seen)
    dims = [dim for dim, along in enumerate(zip(*sizes, strict=True)) if len(set(along)) > 1]
    if not dims:
        return _Plain(sizes[0], dtype=seen[0].dtype, flow=flow)
    along = [size[dims[0]] for size in sizes]
    steps = {b - a for a, b in itertools.pairwise(along)}
    if len(dims) > 1 or len(steps) > 1 or min(steps) < 1:
        return None
    return _Plain(sizes[0], steps.pop(), dims[0], seen[0].dtype, flow)


class _Reached:
    """What a round may change besides its variables: all that its function reaches."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self.cells = _cells(body)
        self.held = [cell.cell_contents for cell in self.cells]
        self.snapshot = Snapshot(self.held)

    @property
    def has_iterator(self) -> bool:
        """Return whether it reaches an iterator, whose position nothing shows."""
        return any(isinstance(value, Iterator) for value, _ in self.snapshot.saved)

    def changed(self) -> bool:
        """Return whether a Python value has changed since this was made."""
        pairs = zip(self.cells, self.held, strict=True)
        is_same = all(_is_bound(cell) and cell.cell_contents is held for cell, held in pairs)
        return not is_same or any(change is not None for change in self.snapshot.changes())


def _cells(function: Any) -> list[CellType]:
    """Return the variables of a function's closure, and of the functions in them."""
    found: dict[int, CellType] = {}
    pending = [function]
    while pending:
        one = pending.pop()
        one = getattr(one, "__func__", one)
        for cell in one.__closure__ or () if isinstance(one, FunctionType) else ():
            if id(cell) not in found and _is_bound(cell):
                found[id(cell)] = cell
                pending.append(cell.cell_contents)
    return list(found.values())


def _is_bound(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - it raises
    except ValueError:
        return False
    return True


class _Growing:
    """A loop with growing tensors: its variables, and how each round changes them."""

    def __init__(
        self,
        trace: Trace,
        numbers: range,
        body: Callable[..., Any],
        operands: tuple[Any, ...],
        plan: list[_Plain],
    ) -> None:
        self.trace, self.numbers, self.body, self.plan = trace, numbers, body, plan
        self.leaves, self.spec = pytree.flatten(operands, leaf=branch_leaf, shared=False)
        self.failures = trace.error_code
        self.rounds = len(numbers)
        self.drawn = False

    def run(self) -> tuple[Any, ...]:
        """Run the loop and return its variables."""
        trace = self.trace
        note_dynamic(trace)
        draws = trace.draws
        counts = [jnp.asarray(count, jnp.int32) for count in draws]
        code = None if self.failures is None else self.failures.value
        initial = [self._buffer(leaf, one) for leaf, one in self._tensors()]
        numbers = jnp.arange(self.rounds, dtype=jnp.int32)
        (final, counts, code), _ = jax.lax.scan(self._step, (initial, counts, code), numbers)
        self._enter(counts if self.drawn else draws, code)
        values = iter(final)
        made = [self._after(one, values) for one in self.plan]
        return pytree.unflatten(self.spec, made)

    def _tensors(self) -> list[tuple[torch.Tensor, _Plain]]:
        pairs = zip(self.leaves, self.plan, strict=True)
        return [(leaf, one) for leaf, one in pairs if one.dtype is not None]

    def _buffer(self, leaf: torch.Tensor, one: _Plain) -> jax.Array:
        value = leaf_value(leaf)
        if one.dim is None:
            return value
        pads = [(0, 0)] * value.ndim
        pads[one.dim] = (0, one.step * self.rounds)
        return jnp.pad(value, pads)

    def _after(self, one: _Plain, values: Any) -> Any:
        if one.dtype is not None:
            return wrap(next(values), one.dtype, trace=self.trace, flow=one.flow)
        return one.start if type(one.start) is not int else one.start + one.step * self.rounds

    def _inside(self, one: _Plain, values: Any, index: NumberNode) -> Any:
        """Return a variable as a round begins with it."""
        if one.dtype is None:
            return one.start if type(one.start) is not int else self._number(one, index)
        value = next(values)
        if one.dim is None:
            return wrap(value, one.dtype, trace=self.trace, flow=one.flow)
        value = jax.lax.slice_in_dim(value, 0, one.size(self.rounds - 1), axis=one.dim)
        made = wrap(value, one.dtype, trace=self.trace, flow=one.flow)
        return attach(made, {one.dim: _along(index, one.start[one.dim], one.step)})

    def _number(self, one: _Plain, index: NumberNode) -> Any:
        return sym_numbers.from_node(_along(index, one.start, one.step))

    def _enter(self, counts: Any, code: jax.Array | None) -> None:
        self.trace.draws = counts
        if self.failures is not None and code is not None:
            self.failures.set(code)

    def _step(self, carried: _Carried, number: jax.Array) -> tuple[_Carried, None]:
        values, counts, code = carried
        self._enter(counts, code)
        explorer, watch = self.trace.explorer, _Reached(self.body)
        assert explorer is not None
        with self.trace.recording() as effects:
            index = NumberNode(number, int, 0, self.rounds - 1)
            given = iter(values)
            inside = [self._inside(one, given, index) for one in self.plan]
            variables = pytree.unflatten(self.spec, inside)
            at = self._number(_Plain(self.numbers.start, self.numbers.step), index)
            first = next(SERIALS)
            out = explorer.run_inside("loop", lambda: self.body(at, *variables), [variables])
            found, spec = pytree.flatten(tuple(out), leaf=branch_leaf, shared=False)
        self._refuse_effects(effects, watch, spec)
        self._refuse_shared(inside, found, first)
        pairs = list(zip(found, self.plan, strict=True))
        after = [self._carry(leaf, one, index) for leaf, one in pairs]
        self.drawn = any(a is not b for a, b in zip(self.trace.draws, counts, strict=True))
        counts = [jnp.asarray(count, jnp.int32) for count in self.trace.draws]
        code = None if self.failures is None else self.failures.value
        return ([value for value in after if value is not None], counts, code), None

    def _carry(self, leaf: Any, one: _Plain, index: NumberNode) -> jax.Array | None:
        """Return the array of a variable after a round, which has to change it as known."""
        if one.dtype is None:
            expected = one.start if type(one.start) is not int else self._next(one, index)
            if not _is_number(leaf, expected):
                raise _unproved("a Python number does not change as in the first rounds")
            return None
        extents = extents_of(leaf)
        is_alike = isinstance(leaf, TracedTensor) and leaf.dtype == one.dtype
        if not is_alike or flow_of([leaf]) > one.flow:
            raise _unproved("a tensor gets another dtype")
        if one.dim is None:
            if extents or tuple(torch.Tensor.size(leaf)) != one.start:
                raise _unproved("a tensor gets another size")
            return value_of(leaf)
        expected = _along(index, one.size(1), one.step)
        if set(extents) != {one.dim} or extents[one.dim].expr != expected.expr:
            raise _unproved("a tensor does not grow as in the first rounds")
        plain = value_of(strip(leaf))
        if plain.shape[one.dim] < one.size(self.rounds):
            raise _unproved("a tensor is shorter than its size may be")
        return jax.lax.slice_in_dim(plain, 0, one.size(self.rounds), axis=one.dim)

    def _next(self, one: _Plain, index: NumberNode) -> Any:
        return sym_numbers.from_node(_along(index, one.start + one.step, one.step))

    def _refuse_effects(self, effects: Effects, watch: _Reached, spec: Any) -> None:
        """Refuse a round that does more than return new values of the variables."""
        written = [s for s, _, _ in effects.before.values() if s is not self.failures]
        changed = watch.changed() or spec.key != self.spec.key
        if written or effects.rebound or effects.wrote_on_host or changed:
            raise _unproved("a round writes to what is not a variable of the loop")

    def _refuse_shared(self, inside: list[Any], found: list[Any], first: int) -> None:
        """Refuse writes to variables, and results that share memory with another tensor."""
        if any(isinstance(leaf, TracedTensor) and version(leaf) for leaf in inside):
            raise _unproved("a round writes to a tensor that it begins with")
        storages = [leaf._storage for leaf in found if isinstance(leaf, TracedTensor)]
        serials = [storage.serial for storage in storages]
        links = any(list(self.trace.shared.of(storage)) for storage in storages)
        if links or len(set(serials)) < len(serials) or any(s < first for s in serials):
            raise _unproved("a variable shares memory with another tensor")


def _along(index: NumberNode, start: int, step: int) -> NumberNode:
    """Return the number `start + index * step` as the linear expression that it is."""
    assert index.expr is not None
    ends = (start, start + int(index.high) * step)
    if max(map(abs, ends)) > _LARGEST:
        raise _unproved("a Python number is large")
    expr = Linear(start).plus(index.expr.times(step))
    return NumberNode(start + index.value * step, int, min(ends), max(ends), expr)


def _is_number(value: Any, expected: Any) -> bool:
    if isinstance(expected, torch.SymInt) and isinstance(value, torch.SymInt):
        return value.node.expr == expected.node.expr
    return type(value) is type(expected) and value == expected


def _unproved(why: str) -> PortError:
    return port_error(
        f"a loop whose tensors grow cannot be one program: {why}",
        code="TPU104",
        remedy="write the results into a tensor that has its full size before the loop",
    )
