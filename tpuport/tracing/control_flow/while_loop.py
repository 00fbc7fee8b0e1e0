"""`while` loops on traced values as `lax.while_loop`."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from tpuport.foundation import pytree
from tpuport.foundation.errors import PortError, TpuportError
from tpuport.foundation.user_frames import ends_inside, user_line
from tpuport.tracing.control_flow.cond import truth
from tpuport.tracing.control_flow.first_rounds import explored
from tpuport.tracing.control_flow.growth import Place, Surroundings
from tpuport.tracing.control_flow.loop_containers import LoopContainers
from tpuport.tracing.control_flow.loop_gradient import while_with_gradient
from tpuport.tracing.control_flow.merge import (
    Decisions,
    branch_leaf,
    is_of_jax,
    is_of_numbers,
    leaf_meta,
    leaf_value,
    number_kind,
    shared_write,
)
from tpuport.tracing.control_flow.reached import read_outside
from tpuport.tracing.control_flow.written_memory import WrittenMemory
from tpuport.tracing.core import int64, sym_numbers
from tpuport.tracing.core.arguments import unsized
from tpuport.tracing.core.concretize import raise_if
from tpuport.tracing.core.context import Effects, Trace, current
from tpuport.tracing.core.errors import error_here, port_error
from tpuport.tracing.core.speculation import RestartTrace
from tpuport.tracing.core.storage import SERIALS, Flow, Storage
from tpuport.tracing.core.tensor import TracedTensor, wrap
from tpuport.tracing.core.transforms import refuse_loop
from tpuport.tracing.core.values import flow_of, value_of
from tpuport.tracing.dynamic_shapes.extents import extents_of

# The values of the loop's variables and of the memory that its rounds write to, the draws of each
# random stream, the failed check, and whether there was a round.
_Carried = tuple[list[jax.Array], list[jax.Array], list[jax.Array], jax.Array | None, jax.Array]


class _Raises(Exception):
    """Each round raises an error of the user's code, so that there is none or the error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class _Changes(BaseException):
    """A round changes places that the loop does not carry yet; no code of the user's catches it."""

    def __init__(self, places: set[Place]) -> None:
        super().__init__()
        self.places = places


class _Again(Exception):
    """A round writes to memory that the loop does not carry yet, or sets what is outside of the
    call: only the first round does, if it is a cache.
    """


class _Loop:
    """A loop: the variables that it carries, and its condition and body on them."""

    def __init__(
        self,
        trace: Trace,
        outside: "_Outside",
        operands: tuple[Any, ...],
    ) -> None:
        self.trace, self.test, self.body = trace, outside.test, outside.body
        self.outside, self.roots = outside, outside.roots
        leaves, self.spec = pytree.flatten(operands, leaf=branch_leaf, shared=False)
        self.leaves = leaves
        self.metas = [leaf_meta(leaf) for leaf in leaves]
        self.initial = [leaf_value(leaf) for leaf in leaves]
        # Those of the values before the loop, then also of those after a round.
        self.flows = [flow_of([leaf]) for leaf in leaves]
        self.failures = trace.error_code
        self.drawn = False
        # Variables that may be one after a round, those that no round replaces, and those that may
        # be other tensors from before then, with the storages of these but for the loop's own.
        self.same: list[tuple[int, int]] = []
        self.kept: set[int] = set()
        self.old: dict[int, list[Storage]] = {}
        self.inside: list[Any] = []
        self.first_serial, self.site = 0, user_line()
        self.refuse = outside.refuse or partial(shared_write, self.site)
        self.set_outside = False
        self.memory = WrittenMemory(trace, self.leaves)
        self.containers = LoopContainers(trace.shared, self.spec.containers, outside.functions)
        self.containers.places = set(outside.surroundings.located(outside.places))
        outside.written.clear()

    def run(self) -> Any:
        """Run the loop and return its variables."""
        draws = self.trace.draws
        counts = [jnp.asarray(count, jnp.int32) for count in draws]
        code = None if self.failures is None else self.failures.value
        decisions = Decisions(self.trace)
        while True:
            start = (self.initial, self.memory.initial(), counts, code, jnp.bool_(False))
            try:
                final, memory, counts, code, ran = self._loop(start)
                break
            except _Again:
                self._enter(draws, code)
                decisions.restore()
                self.same, self.kept, self.old = [], set(), {}
            except _Changes:
                self._enter(draws, code)
                decisions.restore()
                raise
            except _Raises as raised:
                self._enter(draws, code)
                if code is None and ends_inside(raised.error.__traceback__):
                    # Without checks only what the code itself raises may be left out.
                    raise raised.error from None
                raise_if(truth(self._call(self.test, self.initial)), raised.error)
                return pytree.unflatten(self.spec, self.leaves)
        # If the loop drew nothing, the counts stay Python numbers: later code can compare them.
        self._enter(counts if self.drawn else draws, code)
        self._check_condition(final, memory)
        values = final
        self.memory.write(memory, self.flows)
        if not torch.is_grad_enabled():
            values = self._with_gradients(values, ran)
        made: dict[int, Any] = self.containers.staying()
        result = self._variables(values, self.kept, made)
        self.containers.watch(made, self.refuse)
        self._link(pytree.flatten(result, leaf=branch_leaf, shared=False)[0], ~ran)
        return result

    def _loop(self, start: _Carried) -> _Carried:
        flat, tree = jax.tree.flatten(start)
        with int64.scope():  # none is of a weak type
            flat = [lax.convert_element_type(x, x.dtype) for x in flat]

        def step(*values: jax.Array) -> Any:
            return self._step(jax.tree.unflatten(tree, values))

        def holds(*values: jax.Array) -> Any:
            return self._holds(jax.tree.unflatten(tree, values))

        test = jax.make_jaxpr(holds)(*flat)
        body = jax.make_jaxpr(step)(*flat)
        refusal = error_here(
            "a while loop on a traced value has no second derivative",
            code="TPU104",
            remedy="loop a fixed number of times and select with torch.where, or detach its inputs",
        )
        return jax.tree.unflatten(tree, while_with_gradient(test, body, flat, refusal))

    def _with_gradients(self, values: list[jax.Array], ran: jax.Array) -> list[jax.Array]:
        """Give a variable under no_grad the gradient that it has if no round replaced it."""
        with torch.enable_grad():
            for index, leaf in enumerate(self.leaves):
                is_tensor, flow = isinstance(leaf, torch.Tensor), flow_of([leaf])
                if is_tensor and flow is not Flow.STOPPED and index not in self.kept:
                    values[index] = jnp.where(ran, values[index], value_of(leaf))
                    self.flows[index] = Flow.HIDDEN
        return values

    def _link(self, results: list[Any], unchanged: jax.Array) -> None:
        """Link the variables after the loop to what they were before, and to one another."""

        def link(one: Any, other: Any, test: jax.Array | None) -> None:
            if isinstance(one, TracedTensor) and isinstance(other, TracedTensor):
                test = None if other._chain else test
                storages = one._storage, other._storage
                self.trace.shared.add_all(*storages, test, self.trace.regions, self.refuse)

        for index, (result, before) in enumerate(zip(results, self.leaves, strict=True)):
            if index in self.kept:
                continue
            old = self.old.get(index)
            for other in [before] if old is None else self.leaves:
                link(result, other, unchanged if old is None else None)
            for storage in old or ():
                args = result._storage, storage, None, self.trace.regions
                self.trace.shared.add_all(*args, self.refuse)
        for i, j in self.same:
            link(results[i], results[j], None)

    def _variables(
        self, values: list[jax.Array], kept: Iterable[int], containers: dict[int, Any]
    ) -> Any:
        """Return tensors and numbers around values; `kept` ones are those from before the loop.

        `containers` has those to fill, and receives the new ones.
        """
        made: list[Any] = []
        for value, meta, flow in zip(values, self.metas, self.flows, strict=True):
            if isinstance(meta, torch.Tensor):
                made.append(wrap(value, meta.dtype, trace=self.trace, flow=flow))
                made[-1]._unlike_number = meta._unlike_number  # type: ignore[attr-defined]
            else:
                made.append(sym_numbers.number(value, number_kind(meta)))
        for index in {*self.memory.given, *kept}:
            made[index] = self.leaves[index]
        return pytree.unflatten(self.spec, made, containers)

    def _enter(self, counts: Sequence[int | jax.Array], code: jax.Array | None) -> None:
        self.trace.draws = counts
        if self.failures is not None and code is not None:
            self.failures.set(code)

    def _call(self, function: Callable[..., Any], values: list[jax.Array]) -> Any:
        inside: dict[int, Any] = {}
        variables, explorer = self._variables(values, (), inside), self.trace.explorer
        if function is self.body:
            self.containers.begin(inside)
            self.outside.inside = set(map(id, inside.values()))
        self.inside = pytree.flatten(variables, leaf=branch_leaf, shared=False)[0]
        self.first_serial = next(SERIALS)
        if explorer is None:
            return function(*variables)
        return explorer.run_inside("loop", lambda: function(*variables), [variables, *self.roots])

    def _drew(self, counts: list[jax.Array]) -> bool:
        return any(a is not b for a, b in zip(self.trace.draws, counts, strict=True))

    def _holds(self, carried: _Carried) -> jax.Array:
        values, memory, counts, code, _ = carried
        self._enter(counts, code)
        with self.memory.holding(memory), self.trace.recording() as effects:
            value = truth(self._call(self.test, values))
            writes = self._written(effects) or self.memory.wrote(self.inside)
        if self._drew(counts) or writes:
            does = "writes to tensors" if writes else "draws random numbers"
            raise port_error(
                f"the condition of a while loop on a traced value {does}",
                code="TPU104",
                remedy="do that in the body of the loop",
            )
        return value

    def _check_condition(self, values: list[jax.Array], memory: list[jax.Array]) -> None:
        """Make the checks of the condition, which cannot return them, by running it again."""
        if self.failures is not None:
            with self.memory.holding(memory):
                truth(self._call(self.test, values))

    def _step(self, carried: _Carried) -> _Carried:
        values, memory, counts, code, ran = carried
        self._enter(counts, code)
        self._check_condition(values, memory)
        outside = read_outside(self.trace)
        with self.memory.holding(memory), self.trace.recording() as effects:
            try:
                out = self._call(self.body, values)
                self.memory.refuse_by_autograd()
            except _Changes:
                effects.undo()
                raise
            except Exception as error:
                if isinstance(error, TpuportError) or is_of_numbers(error) or is_of_jax(error):
                    raise
                effects.undo()
                raise _Raises(error) from None
            found, spec = pytree.flatten(tuple(out), leaf=branch_leaf, shared=False)
            changed = spec.key != self.spec.key
            if not changed:
                refuse = partial(_one_with_another, self.site)
                self.containers.note_round(spec.containers, self.outside.written, refuse)
            if not changed and self.memory.note(self._written(effects), self.inside, found):
                effects.undo()
                raise _Again
            if names := outside():
                if self.set_outside:
                    raise _uncarried(f" ({names[0]})")
                self.set_outside = True
                effects.undo()
                raise _Again
            memory = self.memory.after(self.inside, memory, ran)
        self._refuse_uncarried(effects, found, changed=changed)
        self._note_same(found)
        self.drawn = self._drew(counts)
        self.flows = [max(a, flow_of([b])) for a, b in zip(self.flows, found, strict=True)]
        after = [
            before if index in self.memory.given else self._same_dtype(leaf, meta, before)
            for index, (leaf, meta, before) in enumerate(
                zip(found, self.metas, values, strict=True)
            )
        ]
        counts = [jnp.asarray(count, jnp.int32) for count in self.trace.draws]
        code = None if self.failures is None else self.failures.value
        return after, memory, counts, code, jnp.bool_(True)

    def _written(self, effects: Effects) -> list[Storage]:
        return [s for s, _, _ in effects.before.values() if s is not self.failures]

    def _note_same(self, found: list[Any]) -> None:
        """Note which variables may share a tensor after a round, or be one from before it."""
        begun = {leaf._storage.serial for leaf in self.inside if isinstance(leaf, TracedTensor)}
        linked: dict[int, dict[int, Storage]] = {}
        for index, leaf in enumerate(found):
            if isinstance(leaf, TracedTensor):
                own = leaf._storage
                linked[index] = {own.serial: own}
                linked[index] |= {other.serial: other for other, _ in self.trace.shared.of(own)}
                before = [s for s in linked[index].values() if s.serial < self.first_serial]
                if leaf is self.inside[index]:
                    self.kept.add(index)
                elif before:
                    self.old[index] = [s for s in before if s.serial not in begun]
        pairs = itertools.combinations(linked.items(), 2)
        self.same += [(i, j) for (i, one), (j, other) in pairs if one.keys() & other.keys()]

    def _same_dtype(self, leaf: Any, meta: Any, before: jax.Array) -> jax.Array:
        """Return a new value from the body in the dtype that the loop carries.

        `lax.while_loop` needs one dtype for all rounds. A tensor has to keep its dtype, a number
        its kind.
        """
        value = leaf_value(leaf)
        tensors = isinstance(leaf, torch.Tensor), isinstance(meta, torch.Tensor)
        marks = [getattr(one, "_unlike_number", None) for one in (leaf, meta)]
        if marks[0] is not None and marks[1] is None:
            raise port_error(
                "a while loop on a traced value carries a tensor that a round may replace by a"
                " Python number",
                code="TPU104",
                remedy="give it a tensor there, too, such as x.new_zeros(()) for 0",
            )
        changed = leaf.dtype != meta.dtype if all(tensors) else False
        if not any(tensors):
            changed = number_kind(type(leaf)) is not number_kind(meta)
        if value.shape != before.shape:
            raise port_error(
                "a while loop on a traced value carries a tensor of shape"
                f" {before.shape} before the loop and {value.shape} after a round",
                code="TPU104",
                remedy="write what it holds into a tensor that has one shape in all rounds",
            )
        if changed or _breadth(value) > _breadth(before):
            raise port_error(
                f"a while loop on a traced value carries a value that is {before.dtype} before the"
                f" loop and {value.dtype} after a round",
                code="TPU104",
                remedy="give it that dtype before the loop, such as `n = 0.0` for `n = 0`",
            )
        with int64.scope():
            return value.astype(before.dtype)

    def _refuse_uncarried(self, effects: Effects, found: list[Any], *, changed: bool) -> None:
        """Refuse a body that does more than return new values of the variables."""
        if any(extents_of(leaf) for leaf in found):
            raise unsized("a value that a while loop carries")
        if effects.rebound or effects.wrote_on_host or changed:
            raise _uncarried()


def _uncarried(what: str = "") -> PortError:
    return port_error(
        "a while loop on a traced value changes Python values, or the `.data` of tensors, that it"
        f" does not carry{what}",
        code="TPU104",
        remedy="loop a fixed number of times and select with torch.where",
    )


def _one_with_another(site: str) -> PortError:
    return port_error(
        "a round of this while loop on a traced value writes to a list, dict or object that other"
        " names or other variables of the loop may hold, too",
        code="TPU104",
        place=site,
        remedy="let the round make a new one (`state = {**state, ...}`), or hold it by one name",
    )


def _breadth(value: jax.Array) -> int:
    """Rank the dtype of an array: bool, then integers, then floats, then complex numbers."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next(i for i, kind in enumerate(kinds) if jnp.issubdtype(value.dtype, kind))


class _Outside:
    """The functions of a loop, which also carry what a round changes in the objects they reach.

    `self.state = self.step(self.state)` makes an attribute a variable of the loop. It has its
    value from before the loop again while none of the functions runs.
    """

    def __init__(
        self,
        test: Callable[..., Any],
        body: Callable[..., Any],
        refuse: Callable[[], BaseException] | None,
    ) -> None:
        self.functions, self.refuse = (test, body), refuse
        self.owners = [one.__self__ for one in self.functions if isinstance(one, MethodType)]
        self.places: tuple[Place, ...] = ()
        # The containers that a round begins with, and what rounds wrote to besides, by their ids.
        self.inside: set[int] = set()
        self.written: set[int] = set()
        self.surroundings = self._now()
        self.roots = [*self.surroundings.held, *self.owners]

    def _now(self) -> Surroundings:
        return Surroundings(self.functions, self.owners)

    def test(self, operands: tuple[Any, ...], held: tuple[Any, ...]) -> Any:
        """Return the value of the loop's condition.

        Raises:
            PortError: the condition changes Python values.
        """
        with self._holding(held) as begun:
            made = self.functions[0](*operands)
            if begun.changed() != set():
                raise port_error(
                    "the condition of a while loop on a traced value changes Python values",
                    code="TPU104",
                    remedy="do that in the body of the loop",
                )
        return made

    def body(self, operands: tuple[Any, ...], held: tuple[Any, ...]) -> Any:
        """Run a round, and return the variables and the values in the places."""
        with self._holding(held) as begun:
            made = tuple(self.functions[1](*operands))
            self.written |= begun.written()
            self._note_changes(begun)
            return made, self.surroundings.read(self.places)

    def _note_changes(self, begun: Surroundings) -> None:
        """Ask for another trace if a round has changed places that the loop does not carry.

        What it has changed in the containers of its variables is in these.
        """
        changed = begun.changed()
        if changed is None:
            raise _uncarried()
        others = [p for p in changed if id(begun.snapshot.saved[p.holder][0]) not in self.inside]
        # The container that a place holds is a copy in a round, so the numbers may be others.
        places = self.surroundings.placed(begun.located(others))
        if places is None:
            raise _uncarried()
        first = zip(places, begun.first(others), strict=True)
        more = {place: value for place, value in first if place not in self.places}
        if more:
            self.surroundings.write(list(more), list(more.values()))
            raise _Changes(set(more))

    @contextlib.contextmanager
    def _holding(self, held: tuple[Any, ...]) -> Iterator[Surroundings]:
        outside, places = self.surroundings, self.places
        before = outside.read(places)
        outside.write(places, held)
        try:
            yield self._now()
        finally:
            outside.write(places, before)


def first_round(
    test: Callable[..., Any], body: Callable[..., Any], operands: tuple[Any, ...]
) -> Any:
    """Run a round by itself, whose branches are merged before what follows.

    Args:
        test: Function called with the loop's carried values before each iteration.
        body: Function called in each iteration; returns the carried values as a tuple.
        operands: The carried values.

    Returns:
        The carried values after it.
    """
    trace = current()
    explorer = None if trace is None else trace.explorer
    return explored(explorer, partial(body, *operands), [test, body], operands)


def begun_while(
    test: Callable[..., Any],
    body: Callable[..., Any],
    operands: tuple[Any, ...],
    *,
    is_known: bool,
) -> Any:
    """Run a loop whose first rounds Python can run, as it knows that the test holds.

    Each branch in such a round would be a path of its own through all that follows. Where a traced
    value ends the loop later, the trace begins again with all rounds on the device, unless that is
    refused.

    Args:
        test: Function called with the loop's carried values before each iteration.
        body: Function called in each iteration; returns the carried values as a tuple.
        operands: The carried values.
        is_known: Whether Python knows the truth of the test, which it does at the first round.

    Returns:
        The carried values at the end; None if Python is to run a round.

    Raises:
        RestartTrace: what was found is noted for the next attempt.
    """
    trace = current()
    assert trace is not None
    if trace.explorer is None:
        return None if is_known else traced_while(test, body, operands)
    loops, key = trace.explorer.plan.loops, ("begins on the device", user_line())
    if not is_known:
        if key not in loops:
            loops[key] = True
            raise RestartTrace()
        return traced_while(test, body, operands)
    if not loops.get(key):
        return None
    try:
        return traced_while(test, body, operands)
    except PortError as error:
        loops[key] = False
        raise RestartTrace() from error


def traced_while(
    test: Callable[..., Any],
    body: Callable[..., Any],
    operands: tuple[Any, ...],
    refuse: Callable[[], BaseException] | None = None,
) -> Any:
    """Run `while test(*operands): operands = body(*operands)` on the device.

    Args:
        test: Function called with the loop's carried values before each iteration.
        body: Function called in each iteration; returns the carried values as a tuple.
        operands: The carried values.
        refuse: Function that makes what is raised where a later write would have to reach what the
            loop's result may be; by default an error that names the loop.

    Returns:
        The carried values at the end.

    Raises:
        PortError: an operand changes its shape, dtype or Python value in the body, the body changes
            other Python values, the condition draws random numbers, or a write of the body would
            have to reach a variable that it replaces.
    """
    trace = current()
    assert trace is not None
    refuse_loop()
    outside = _Outside(test, body, refuse)
    while True:
        held = outside.surroundings.read(outside.places)
        try:
            loop = _Loop(trace, outside, (operands, held))
            operands, held = loop.run()
        except _Changes as changes:
            outside.places += tuple(sorted(changes.places, key=str))
            continue
        outside.surroundings.write(outside.places, held)
        return operands
