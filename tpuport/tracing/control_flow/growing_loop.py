"""Loops of many rounds, or whose rounds make tensors longer, as one `lax.scan`.

A tensor that grows by as many rows in each round is a buffer of its last size. In round `i` it is
a tensor whose size depends on data: its first size plus `i` times the rows of a round. The
rounds that a trace runs first show which variables grow; the trace then begins again, and the
body has to prove on the buffers that its variables change as they did. Any other loop is run by
Python, round by round.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.foundation import pytree
from tpuport.foundation.errors import PortError
from tpuport.foundation.interop import backend
from tpuport.foundation.plain_loops import Items, looped
from tpuport.foundation.user_frames import user_line
from tpuport.tracing.control_flow.appended import AppendedList, Round, Unread
from tpuport.tracing.control_flow.cond import truth
from tpuport.tracing.control_flow.first_rounds import FAILURES, explored, tried
from tpuport.tracing.control_flow.for_rows import traced_for
from tpuport.tracing.control_flow.growth import Growth, Place, Plain, Surroundings
from tpuport.tracing.control_flow.loop_attempts import SHARES, left, next_try
from tpuport.tracing.control_flow.loop_containers import LoopContainers
from tpuport.tracing.control_flow.loop_items import series_of
from tpuport.tracing.control_flow.loop_refusals import no_count, refuse_rounds, unproved
from tpuport.tracing.control_flow.loop_sources import (
    CountedSource,
    ItemsSource,
    RangeSource,
    Source,
    WhileSource,
    is_traced,
)
from tpuport.tracing.control_flow.merge import Decisions, branch_leaf, leaf_value
from tpuport.tracing.control_flow.range_as_while import as_while
from tpuport.tracing.control_flow.reached import read_outside
from tpuport.tracing.control_flow.while_loop import traced_while
from tpuport.tracing.control_flow.written_memory import WrittenMemory
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.active import Decider
from tpuport.tracing.core.context import Effects, Trace, current
from tpuport.tracing.core.speculation import RestartTrace
from tpuport.tracing.core.storage import SERIALS, Flow
from tpuport.tracing.core.sym_node import NumberNode
from tpuport.tracing.core.tensor import TracedTensor, wrap
from tpuport.tracing.core.transforms import transforming
from tpuport.tracing.core.values import flow_of, value_of
from tpuport.tracing.dynamic_shapes.extents import (
    along,
    attach,
    extents_of,
    note_dynamic,
    strip,
)

# Of fewer rounds each is compiled by itself.
_FEWEST_ROUNDS = 4
_MOST_ROUNDS = 1 << 16
# What `reversed(range(n))` is; nobody has taken a number from it.
_REVERSED = type(reversed(range(1)))

# Values, those of the memory that its rounds write to, draws, the failed check, whether the loop
# has ended, its rounds, and the rows of lists that rounds read.
_Arrays = list[jax.Array]
_Carried = tuple[
    _Arrays, _Arrays, _Arrays, jax.Array | None, jax.Array, jax.Array, list[jax.Array | None]
]
# The number of a round, and what else the scan goes over.
_Given = tuple[jax.Array, list[jax.Array]]
# What a round appends to each list.
_Added = list[list[jax.Array]]


class _Uncarried(Exception):
    """A round writes to memory from before the loop that the loop does not carry yet."""


def traced_range(
    numbers: Any,
    body: Callable[..., Any],
    operands: tuple[Any, ...],
    *,
    stops: bool = False,
    tells: bool = False,
) -> tuple[Any, ...]:
    """Run `for number in numbers: operands = body(number, *operands)`.

    Raises:
        RestartTrace: what its first rounds have shown is noted for the next attempt.
    """
    if type(numbers) is Items:
        if numbers.function is range and any(map(is_traced, numbers.given)):
            if tells:
                raise no_count("it has an `else`")
            return _run(CountedSource(numbers.given, body, stops=stops), operands)
        numbers = numbers.made()
    if isinstance(numbers, _REVERSED):
        numbers = numbers.__reduce__()[1][0]
    is_short = not isinstance(numbers, range) or len(numbers) < _FEWEST_ROUNDS
    source = RangeSource(numbers, body, stops=stops, tells=tells)
    return _run(source, operands, is_short=is_short)


def traced_items(
    items: Any,
    body: Callable[..., Any],
    operands: tuple[Any, ...],
    *,
    stops: bool = False,
    tells: bool = False,
) -> tuple[Any, ...]:
    """Run `for item in items: operands = body(item, *operands)`.

    Raises:
        RestartTrace: what its first rounds have shown is noted for the next attempt.
    """
    series = series_of(items)
    if series is not None:
        source = ItemsSource(items, series, body, stops=stops, tells=tells)
        return _run(source, operands, is_short=series.count < _FEWEST_ROUNDS)
    if not stops and isinstance(items, TracedTensor) and 0 in extents_of(items):
        return traced_for(items, body, operands, ())
    return looped(items, body, operands, stops=stops, tells=tells)


def counted_while(
    test: Callable[..., Any], body: Callable[..., Any], operands: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Run `while test(*operands): operands = body(*operands)`, where Python knows the first test.

    Raises:
        RestartTrace: what its first rounds have shown is noted for the next attempt.
    """
    return _run(WhileSource(test, body), operands)


def _run(source: Source, operands: tuple[Any, ...], *, is_short: bool = False) -> tuple[Any, ...]:
    trace = current()
    is_counted = isinstance(source, CountedSource)
    site = user_line()
    if trace is None or trace.explorer is None or transforming():
        if is_counted:
            raise no_count("it is inside of a transform of jax or torch.func")
        return _unrolled(source, operands, 0)
    plan = trace.explorer.plan
    if is_short and site not in plan.branching:
        return _by_python(trace.explorer, site, source, operands, 0)
    leaves = pytree.flatten(operands, leaf=branch_leaf, shared=False)[0]
    key = (site, source.key, tuple(_described(leaf) for leaf in leaves))
    growth, ran = plan.loops.get(key, Growth()), 0
    branches = site in plan.branching
    explorer = trace.explorer if branches else None
    if growth.variables is None and not growth.why:
        growth, operands, ran, ended = tried(source, operands, growth.peel, explorer)
        if not (growth.why or growth.is_longer or source.is_long or branches):
            growth = replace(growth, why="no variable grows")
        plan.loops[key] = growth
        if ended or not growth.why:
            raise RestartTrace()
    if growth.why:
        made = as_while(trace, key, source, operands, ran) if branches else None
        if made is not None:
            trace.explorer.branches[site] = f"one lax.while_loop, not a scan: {growth.why}"
            return made
        return _one_by_one(trace.explorer, site, source, growth, operands, ran)

    left_by = partial(left, plan.loops, key, source, growth)
    try:
        made, rounds = _Growing(trace, source, operands, growth, left_by, explorer).run()
    except (Unread, *FAILURES) as error:
        plan.loops[key] = next_try(source, growth, error)
        raise RestartTrace() from error
    grows = ", with growing tensors" if growth.is_longer else ""
    trace.explorer.branches[site] = f"one lax.scan of {rounds} rounds{grows}"
    return made


def _one_by_one(
    explorer: Decider,
    site: str,
    source: Source,
    growth: Growth,
    operands: tuple[Any, ...],
    ran: int,
) -> tuple[Any, ...]:
    """Run the rounds of a loop one by one, which is said."""
    refuse_rounds(source, growth, explorer.plan.whole, site)
    explorer.branches[site] = f"rounds compiled one by one: {growth.why}"
    return _by_python(explorer, site, source, operands, ran)


def _by_python(
    explorer: Decider, site: str, source: Source, operands: tuple[Any, ...], ran: int
) -> tuple[Any, ...]:
    """Run the rounds one by one, and let their branches know of the loop."""
    explorer.unrolled.append(site)
    try:
        return _unrolled(source, operands, ran)
    finally:
        explorer.unrolled.pop()


def _unrolled(source: Source, operands: tuple[Any, ...], ran: int) -> tuple[Any, ...]:
    while True:
        is_over = source.is_over(ran, operands)
        if isinstance(source, WhileSource) and is_traced(is_over):
            return traced_while(source.test, source.body, operands)
        if is_over:
            return (*operands, False) if source.tells else operands
        stop, operands = source.round(ran, operands)
        if stop:
            return (*operands, True) if source.tells else operands
        ran += 1


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (tuple(torch.Tensor.size(leaf)), leaf.dtype)
    return None if isinstance(leaf, sym_numbers.SYMBOLIC) else leaf


class _Growing:
    """A loop with growing tensors: its variables, and how each round changes them."""

    def __init__(
        self,
        trace: Trace,
        source: Source,
        operands: tuple[Any, ...],
        growth: Growth,
        left: Callable[[str], BaseException],
        explorer: Decider | None,
    ) -> None:
        self.trace, self.source, self.growth, self.left = trace, source, growth, left
        self.written = partial(left, SHARES)
        self.plan: list[Plain] = growth.variables or []
        self.over: Any = False  # whether the rounds before have ended the loop
        for number in range(growth.peel):
            round_ = partial(source.run, source.first(number), operands)
            self.over, operands = explored(explorer, round_, source.functions, operands)
        self.outside = Surroundings(source.functions, operands)
        if not self.outside.has(growth.places):
            raise unproved("a round changes Python values that are no variables of the loop")
        before = (operands, self.outside.read(growth.places))
        self.leaves, self.spec = pytree.flatten(before, leaf=branch_leaf, shared=False)
        if not _is_like(self.leaves, self.plan):
            raise unproved("the rounds do not change the variables alike")
        if growth.peel and isinstance(source, CountedSource):
            raise unproved("its first round differs from the others")
        self.lists = [AppendedList(trace, self.outside, one) for one in growth.lists]
        self.failures = trace.error_code
        self.rounds = self._counted(source)
        self.drawn = False
        # The variables that may be what a round began with, and those that are one after a round.
        self.kept: set[int] = set()
        self.same: list[tuple[int, int]] = []
        self.unchanged: set[int] = set()
        self.memory = WrittenMemory(trace, self.leaves)
        count = None if source.may_end else self.rounds
        self.containers = LoopContainers(
            trace.shared, self.spec.containers, source.functions, count
        )
        self.containers.places = set(self.outside.located(growth.places))

    def _counted(self, source: Source) -> int:
        """Return how many rounds there are, but for those that ran before."""
        if isinstance(source, RangeSource):
            return len(source.numbers) - self.growth.peel
        found: list[int] = []

        def count() -> None:
            for done in range(_MOST_ROUNDS):
                operands, held = pytree.unflatten(
                    self.spec, [self._like(p, done) for p in self.plan]
                )
                self.outside.write(self.growth.places, held)
                is_over = source.is_over(done, operands)
                if is_traced(is_over):
                    raise unproved("a traced value may end it")
                if is_over:
                    found.append(done)
                    return

        held = self.outside.read(self.growth.places)
        try:
            with self.trace.recording() as effects:
                jax.eval_shape(count)
        finally:
            self.outside.write(self.growth.places, held)
        self._refuse_effects(effects, self.outside, self.spec, ())
        if effects.before:
            raise unproved("its test writes to a tensor")
        if not found or not found[0]:
            raise unproved("its number of rounds is not known")
        return found[0]

    def _like(self, one: Plain, done: int) -> Any:
        """Return what a variable is after some rounds, without its values."""
        if one.dtype is None:
            return one.start if type(one.start) is not int else one.start + one.step * done
        size = list(one.start)
        if one.dim is not None:
            size[one.dim] = one.size(done)
        value = jnp.zeros(size, backend.jax_dtype(one.dtype))
        return one.wrapped(value, self.trace)

    def run(self) -> tuple[tuple[Any, ...], int]:
        """Run the loop and return its variables, and the most rounds that it may have."""
        trace = self.trace
        note_dynamic(trace)
        draws = trace.draws
        counts = [jnp.asarray(count, jnp.int32) for count in draws]
        code = None if self.failures is None else self.failures.value
        initial = [self._buffer(leaf, one) for leaf, one in self._tensors()]
        numbers = jnp.arange(self.rounds, dtype=jnp.int32)
        arrays = self.source.arrays(self.growth.peel)
        over = truth(self.over) if is_traced(self.over) else jnp.bool_(self.over)
        over = over | self.source.begins_ended
        decisions = Decisions(trace)
        while True:
            rows = [one.rows(self.rounds) if one.is_read else None for one in self.lists]
            carried = (initial, self.memory.initial(), counts, code, over, jnp.int32(0), rows)
            try:
                carried, added = jax.lax.scan(self._step, carried, (numbers, arrays))
                break
            except _Uncarried:
                self._enter(draws, code)
                decisions.restore()
        final, memory, counts, code, ended, ran, _ = carried
        self._enter(counts if self.drawn else draws, code)
        self.memory.write(memory, [one.flow for one in self.plan])
        self.source.check()
        values, rounds = iter(final), None
        if self.source.may_end:
            least = 0 if is_traced(self.over) or isinstance(self.source, CountedSource) else 1
            rounds = self.source.ran(NumberNode(ran, int, least, self.rounds))
        made = [self._after(one, values, rounds) for one in self.plan]
        for at in self.memory.given | self.unchanged:
            made[at] = self.leaves[at]
        self._link(made)
        containers: dict[int, Any] = self.containers.staying()
        operands, held = pytree.unflatten(self.spec, made, containers)
        self.containers.watch(containers, self.written)
        self.outside.write(self.growth.places, held)
        for one, arrays in zip(self.lists, added, strict=True):
            if rounds is None:
                one.extend(arrays, self.rounds, self.leaves, made, self.written)
            else:
                one.hold(arrays, rounds, (self.leaves, made), self.left)
        if self.source.tells:
            operands = (*operands, wrap(ended, torch.bool, trace=self.trace, flow=Flow.STOPPED))
        return operands, self.rounds

    def _tensors(self) -> list[tuple[torch.Tensor, Plain]]:
        return [(leaf, one) for leaf, one in self._pairs() if one.dtype is not None]

    def _pairs(self) -> list[tuple[Any, Plain]]:
        return list(zip(self.leaves, self.plan, strict=True))

    def _buffer(self, leaf: torch.Tensor, one: Plain) -> jax.Array:
        value = leaf_value(leaf)
        if one.dim is None:
            return value
        pads = [(0, 0)] * value.ndim
        pads[one.dim] = (0, one.step * self.rounds)
        return jnp.pad(value, pads)

    def _after(self, one: Plain, values: Any, rounds: NumberNode | None) -> Any:
        if one.dtype is None:
            if type(one.start) is not int:
                return one.start
            if rounds is not None and one.step:
                return self._number(one, rounds)
            return one.start + one.step * self.rounds
        made = one.wrapped(next(values), self.trace)
        if rounds is None or one.dim is None:
            return made
        return attach(made, {one.dim: along(rounds, one.start[one.dim], one.step)})

    def _inside(self, one: Plain, values: Any, index: NumberNode) -> Any:
        """Return a variable as a round begins with it."""
        if one.dtype is None:
            return self._at(one, index)
        value = next(values)
        if one.dim is None:
            return one.wrapped(value, self.trace)
        value = jax.lax.slice_in_dim(value, 0, one.size(self.rounds - 1), axis=one.dim)
        made = one.wrapped(value, self.trace)
        return attach(made, {one.dim: along(index, one.start[one.dim], one.step)})

    def _at(self, one: Plain, index: NumberNode) -> Any:
        """Return a Python number in a round."""
        return one.start if type(one.start) is not int else self._number(one, index)

    def _is_next(self, index: NumberNode, value: Any, one: Plain) -> bool:
        return _is_number(value, self._at(one, index))

    def _number(self, one: Plain, index: NumberNode) -> Any:
        return sym_numbers.from_node(along(index, one.start, one.step))

    def _enter(self, counts: Any, code: jax.Array | None) -> None:
        self.trace.draws = counts
        if self.failures is not None and code is not None:
            self.failures.set(code)

    def _begun(self, values: list[jax.Array], index: NumberNode) -> list[Any]:
        """Return the variables as a round begins with them."""
        held_by = iter(values)
        inside = [self._inside(one, held_by, index) for one in self.plan]
        for at in self.memory.given:
            inside[at] = self.leaves[at]
        return inside

    def _places_in(self, watch: Surroundings, containers: dict[int, Any]) -> list[Place]:
        """Return the places that rounds change with the numbers that they have in a round.

        The containers of its variables are copies there.
        """
        copies = {id(self.spec.containers[i]): id(one) for i, one in containers.items()}
        located = [
            (copies.get(holder, holder), part, name)
            for holder, part, name in self.outside.located(self.growth.places)
        ]
        found = watch.placed(located)
        if found is None:
            raise unproved("a round changes what it does not reach as the first ones did")
        return found

    def _step(self, carried: _Carried, given: _Given) -> tuple[_Carried, _Added]:
        if not self.source.may_end:
            return self._round(carried, given)
        shapes: list[Any] = []

        def live(carried: _Carried) -> tuple[_Carried, _Added]:
            after, added = self._round(carried, given)
            shapes.extend(jax.eval_shape(lambda: added))
            return after, added

        def ended(carried: _Carried) -> tuple[_Carried, _Added]:
            return carried, [[jnp.zeros(a.shape, a.dtype) for a in one] for one in shapes]

        # The first branch is traced first, which shows what a round appends.
        return jax.lax.cond(~carried[4], live, ended, carried)

    def _round(self, carried: _Carried, given: _Given) -> tuple[_Carried, _Added]:
        number, arrays = given
        values, memory, counts, code, _, ran, rows = carried
        self._enter(counts, code)
        explorer = self.trace.explorer
        assert explorer is not None
        places = self.growth.places
        with self.memory.holding(memory), self.trace.recording() as effects:
            index = self.source.index(number, self.rounds)
            inside, containers = self._begun(values, index), dict[int, Any]()
            operands, held = pytree.unflatten(self.spec, inside, containers)
            self.containers.begin(containers)
            before = self.outside.read(places)
            self.outside.write(places, held)
            item = self.source.item(self.growth.peel, index, arrays)
            watch = Surroundings(self.source.functions, operands)
            here = self._places_in(watch, containers)
            turned = watch.turned(inside)
            outside, first, changed = read_outside(self.trace), next(SERIALS), set[int]()

            def run() -> Any:
                with contextlib.ExitStack() as stack:
                    lists = self._collecting(stack, index, rows)
                    stop, made = self.source.run(item, operands)
                    changed.update(watch.written())
                    return stop, [appended() for appended in lists], made, watch.read(here)

            try:
                around = [operands, *watch.held]
                stop, added, *out = explorer.run_inside("loop", run, around)
            finally:
                self.outside.write(places, before)
            found, spec = pytree.flatten(tuple(out), leaf=branch_leaf, shared=False)
            self._refuse_effects(effects, watch, spec, here)
            self.containers.note_round(spec.containers, changed, _one_with_another)
            _refuse_more(turned=turned(), names=outside())
            written = [s for s, _, _ in effects.before.values() if s is not self.failures]
            if any(self.plan[at].dim is not None for at in self.memory.wrote(inside)):
                raise unproved("a round writes to a tensor that grows")
            if self.memory.note(written, inside, found):
                effects.undo()
                raise _Uncarried
            memory = self.memory.after(inside, memory, ran > 0)
        reached = {*map(id, spec.containers.values()), *(id(v) for v, _ in watch.snapshot.saved)}
        this = Round(first, inside, found, reached, partial(self._is_next, index), self.memory)
        made = [one.arrays(items, this) for one, items in zip(self.lists, added, strict=True)]
        self._refuse_shared(found, first, inside)
        kept_as = {at: value_of(self.leaves[at]) for at in self.memory.given}
        after = [
            kept_as[at] if at in kept_as else self._carry(leaf, one, index)
            for at, (leaf, one) in enumerate(zip(found, self.plan, strict=True))
        ]
        self.drawn = any(a is not b for a, b in zip(self.trace.draws, counts, strict=True))
        counts = [jnp.asarray(count, jnp.int32) for count in self.trace.draws]
        code = None if self.failures is None else self.failures.value
        kept = [value for value in after if value is not None]
        is_last = truth(stop) if is_traced(stop) else jnp.bool_(stop)
        is_last = self.source.ends(number, is_last)
        held_rows = zip(self.lists, rows, made, strict=True)
        rows = [one.after(before, arrays, index) for one, before, arrays in held_rows]
        return (kept, memory, counts, code, is_last, ran + 1, rows), made

    def _collecting(
        self, stack: contextlib.ExitStack, index: NumberNode, rows: list[jax.Array | None]
    ) -> list[Callable[[], list[Any]]]:
        """Put what collects the items of a round in the place of each list."""
        pairs = zip(self.lists, rows, strict=True)
        return [stack.enter_context(one.collecting(index, before)) for one, before in pairs]

    def _carry(self, leaf: Any, one: Plain, index: NumberNode) -> jax.Array | None:
        """Return the array of a variable after a round, which has to change it as known."""
        if one.dtype is None:
            expected = one.start if type(one.start) is not int else self._next(one, index)
            if not _is_number(leaf, expected):
                raise unproved("a Python number does not change as in the first rounds")
            return None
        extents = extents_of(leaf)
        is_alike = isinstance(leaf, TracedTensor) and leaf.dtype == one.dtype
        is_number = is_alike and leaf._unlike_number is not None
        if not is_alike or flow_of([leaf]) > one.flow or (is_number and not one.unlike_number):
            raise unproved("a tensor gets another dtype")
        if one.dim is None:
            if extents or tuple(torch.Tensor.size(leaf)) != one.start:
                raise unproved("a tensor gets another size")
            return value_of(leaf)
        expected = along(index, one.size(1), one.step)
        if set(extents) != {one.dim} or extents[one.dim].expr != expected.expr:
            raise unproved("a tensor does not grow as in the first rounds")
        plain = value_of(strip(leaf))
        if plain.shape[one.dim] < one.size(self.rounds):
            raise unproved("a tensor is shorter than its size may be")
        return jax.lax.slice_in_dim(plain, 0, one.size(self.rounds), axis=one.dim)

    def _next(self, one: Plain, index: NumberNode) -> Any:
        return sym_numbers.from_node(along(index, one.start + one.step, one.step))

    def _refuse_effects(
        self, effects: Effects, watch: Surroundings, spec: Any, places: Sequence[Place]
    ) -> None:
        """Refuse a round that does more than return new values of the variables."""
        changed = watch.changed()
        is_more = changed is None or not changed.issubset(places) or spec.key != self.spec.key
        if effects.rebound or effects.wrote_on_host or is_more:
            raise unproved("a round writes to what is not a variable of the loop")

    def _refuse_shared(self, found: list[Any], first: int, inside: list[Any]) -> None:
        """Refuse results that share memory with a tensor from before the round, and note those that
        share it with each other, or may be what the round began with: nobody else has that.
        """
        begun = {leaf._storage.serial for leaf in inside if isinstance(leaf, TracedTensor)}
        known = all(isinstance(v, TracedTensor) or one.dtype is None for v, one in self._pairs())
        appended = {at for one in self.lists for at in one.variables}
        self.unchanged = self.memory.unchanged(inside, found) - appended
        own = self.memory.given | self.unchanged
        others = [(at, leaf) for at, leaf in enumerate(found) if at not in own]
        storages = {at: leaf._storage for at, leaf in others if isinstance(leaf, TracedTensor)}
        links = {
            at: {s.serial, *(other.serial for other, _ in self.trace.shared.of(s))}
            for at, s in storages.items()
        }
        self.kept = {at for at, linked in links.items() if linked & begun}
        before = any(s < first and s not in begun for linked in links.values() for s in linked)
        if before or (self.kept and not known):
            raise unproved("a variable shares memory with another tensor")
        pairs = itertools.combinations(links.items(), 2)
        self.same = [(one, other) for (one, a), (other, b) in pairs if a & b]

    def _link(self, made: list[Any]) -> None:
        """Link the variables that may be what the loop began with, or one another, for later
        writes.
        """
        before = [leaf._storage for leaf in self.leaves if isinstance(leaf, TracedTensor)]
        pairs = [(made[at]._storage, storage) for at in self.kept for storage in before]
        pairs += [(made[one]._storage, made[other]._storage) for one, other in self.same]
        for own, other in pairs:
            self.trace.shared.add_all(own, other, None, self.trace.regions, self.written)


def _refuse_more(*, turned: bool, names: list[str]) -> None:
    if turned:
        raise unproved("a round turns a tensor in place")
    if names:
        raise unproved(f"a round changes what is outside of the call ({names[0]})")


def _one_with_another() -> PortError:
    return unproved("a round writes to a container that may have other names")


def _is_like(leaves: list[Any], plan: list[Plain]) -> bool:
    """Return whether values are those that a plan begins with."""
    return len(leaves) == len(plan) and all(
        isinstance(leaf, torch.Tensor)
        and leaf.dtype == one.dtype
        and tuple(torch.Tensor.size(leaf)) == one.start
        and not extents_of(leaf)
        if one.dtype is not None
        else type(leaf) is type(one.start) and repr(leaf) == repr(one.start)
        for leaf, one in zip(leaves, plan, strict=True)
    )


def _is_number(value: Any, expected: Any) -> bool:
    if isinstance(expected, torch.SymInt) and isinstance(value, torch.SymInt):
        return value.node.expr == expected.node.expr
    return type(value) is type(expected) and value == expected
