"""One block as a pure function: its state, arguments and random keys in, its results out."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.core
import torch
from jax.extend.core import jaxpr_as_fun

from tpuport.foundation import pytree
from tpuport.foundation.pytree.snapshot import Snapshot
from tpuport.tracing.core.arguments import Watch, program_leaf
from tpuport.tracing.core.context import Effects, KeyStream, Trace
from tpuport.tracing.core.tensor import Storage, TracedTensor, meta_of, version
from tpuport.tracing.core.values import value_of
from tpuport.tracing.dynamic_shapes.extents import extents_of
from tpuport.tracing.guards.describe import changed_name, name_of
from tpuport.tracing.guards.python_state import PythonState
from tpuport.tracing.scan_layers.attribute_reads import withheld
from tpuport.tracing.scan_layers.families import Member
from tpuport.tracing.scan_layers.traced_block import NAME, Arguments, BlockEntry, NotPure, strong
from tpuport.tracing.state.module_state import python_changes, state_tree


@dataclass
class _Result:
    outputs: list[tuple[Any, ...]] = field(default_factory=list)
    spec: pytree.TreeSpec | None = None
    draws: list[int] = field(default_factory=list)
    effects: Effects | None = None
    changed: str | None = None


def trace_block(
    trace: Trace,
    member: Member,
    given: Arguments,
    run: Callable[..., Any],
    *,
    withhold: bool = True,
) -> BlockEntry:
    """Trace a block as a pure function.

    Args:
        trace: The running trace.
        member: The block.
        given: The arguments of its call.
        run: Makes the call, given positional and keyword arguments.
        withhold: Record which attributes it reads, of those in which blocks differ.

    Raises:
        NotPure: The block writes state or arguments, keeps values elsewhere, reads traced values
            from elsewhere, or changes something there.
    """
    snapshot = Snapshot([member.module, given.spec.containers])
    is_kept = False
    try:
        entry, changed = _trace_once(trace, member, given, run, withhold)
        if changed is None:
            return entry
        # The first call may have cached something for all blocks; a second one then changes
        # nothing.
        again, still = _trace_once(trace, member, given, run, withhold)
        if still is not None or not again.is_like(entry):
            raise NotPure(f"it changes Python state outside of its modules: {still or changed}")
        is_kept = True
        return again
    finally:
        if not is_kept:
            snapshot.restore()


def _trace_once(
    trace: Trace, member: Member, given: Arguments, run: Callable[..., Any], withhold: bool
) -> tuple[BlockEntry, str | None]:
    """Trace a block once; return the function and what it changed outside of its modules."""
    outside = _outside_of(member, given)
    promoted, checks, counted = (
        dict(trace.promoted),
        len(trace.recorder.checks),
        trace.recorder.counters.copy(),
    )
    before = state_tree(member.module, objects=True)
    result, reads = _Result(), set[tuple[str, str]]()

    def body(state: Any, values: Any, bases: Any, starts: Any) -> Any:
        with (
            trace.recording() as effects,
            _state_held(member, state),
            _streams(trace, bases, starts),
            withheld(member, reads) if withhold else contextlib.nullcontext(),
            _seen_by(trace, outside),
        ):
            result.effects = effects
            try:
                outputs = _call(trace, member, given, values, run, result)
                _forget_promoted(trace, promoted)
                _check_gone(result)
                return outputs
            finally:
                for storage, value, version in effects.before.values():
                    storage.value, storage.version = value, version + 1

    inputs = inputs_of(trace, member, given)
    places: list[tuple[str, str, int]] = []
    try:
        with _noting(trace, member, places):
            closed, shape = jax.make_jaxpr(body, return_shape=True)(*inputs)
        _check_pure(trace, member, before, result, closed.consts)
        if outside.tells_memory and given.has_views:
            raise NotPure("it may ask where an argument that is a view is stored in memory")
    finally:
        # A block that was not pure may have left tracers of a trace that has ended.
        trace.promoted.clear()
        trace.promoted.update(promoted)
        del trace.recorder.checks[checks:]
        # Each call that reuses the function is counted separately.
        counts = trace.recorder.counters.since(counted)
        trace.recorder.counters.become(counted)
    assert result.spec is not None
    entry = BlockEntry(
        run=_named(closed, jax.tree.structure(shape), inputs),
        program=closed,
        outputs=result.outputs,
        spec=result.spec,
        draws=result.draws,
        read={name: member.varying[name] for name in reads if name in member.varying},
        places=_placed(trace, member, places),
        counts=counts,
        outside=outside.noted,
        keep=_held_by(given),
        tells_views=outside.tells_memory,
        noted=reads,
        fqn=member.fqn,
    )
    return entry, changed_name(entry.outside)


def _outside_of(member: Member, given: Arguments) -> PythonState:
    """Return the recorder of what the block reads from outside.

    Raises:
        NotPure: The block reads an iterator, which cannot be inspected.
    """
    statics = pytree.statics_of(given.spec)
    outside = PythonState((m for _, m in member.modules), statics, _call.__code__)
    if outside.iterator is not None:
        name = name_of(outside.iterator, outside.noted)
        raise NotPure(f"it reads {name}, whose next value cannot be known")
    return outside


@contextlib.contextmanager
def _seen_by(trace: Trace, outside: PythonState) -> Iterator[None]:
    """Let `outside` see the code that runs inside."""
    around, trace.recorder.watcher = trace.recorder.watcher, outside
    try:
        yield
    finally:
        trace.recorder.watcher = around


def _placed(
    trace: Trace, member: Member, places: list[tuple[str, str, int]]
) -> list[tuple[str, str, int, Any]]:
    """Return the activations that were given a spec, by their module within the block."""
    if trace.options.placement is None:
        return []
    return [
        (fqn.removeprefix(member.fqn), side, ndim, trace.options.placement.spec(fqn, side, ndim))
        for fqn, side, ndim in places
    ]


def _held_by(given: Arguments) -> list[Any]:
    """Return what the key of a call refers to by address.

    The tensors are left out: kept alive, they would look like values that outlive the call.
    """
    taken_apart = {id(container) for container in given.spec.containers.values()}
    return [
        held
        for held in given.spec.keep
        if id(held) not in taken_apart and not isinstance(held, TracedTensor)
    ]


def _named(closed: Any, treedef: Any, inputs: tuple[Any, ...]) -> Callable[..., Any]:
    """Return a traced block as a call of a jitted function named `NAME`.

    The first call is kept as an equation that the other calls copy: tracing `jit` again would
    take several times as long.
    """
    function = jaxpr_as_fun(closed)

    def block(*values: Any) -> Any:
        return function(*values)

    block.__name__ = block.__qualname__ = NAME
    called = jax.jit(block)
    first = jax.tree.leaves(inputs)
    kinds = [jax.typeof(value) for value in first]
    again = jaxpr_as_fun(jax.make_jaxpr(called)(*first))

    def run(*inputs: Any) -> Any:
        values = jax.tree.leaves(inputs)
        # On a mesh with explicit axes the sharding is part of the type, so one shape may have
        # several types.
        is_same = [jax.typeof(value) for value in values] == kinds
        return jax.tree.unflatten(treedef, (again if is_same else called)(*values))

    return run


def inputs_of(trace: Trace, member: Member, given: Arguments) -> tuple[Any, ...]:
    """Return the inputs of a block's function for one call."""
    state = [strong(leaf._storage.value) for leaf in member.state.values()]
    values = [
        given.recipes[i].inputs if i in given.recipes else strong(value_of(leaf))
        for i, leaf in enumerate(given.traced)
    ]
    bases = [stream.base for stream in trace.streams]
    starts = [stream.number for stream in trace.streams]
    return state, values, bases, starts


def _call(
    trace: Trace,
    member: Member,
    given: Arguments,
    values: list[Any],
    run: Callable[..., Any],
    result: _Result,
) -> list[jax.Array]:
    """Make the call on stand-ins of its arguments; return the values of its results."""
    rest = iter(
        given.recipes[i].made(value) if i in given.recipes else value
        for i, value in enumerate(values)
    )
    leaves = [
        _stand_in(trace, leaf, next(rest)) if isinstance(leaf, TracedTensor) else leaf
        for leaf in given.leaves
    ]
    containers: dict[int, Any] = {}
    args, kwargs = pytree.unflatten(given.spec, leaves, containers)
    watch = Watch(containers, leaves)
    versions = [version(leaf) for leaf in leaves]
    returned = run(*args, **kwargs)
    if watch.changes() is not None:
        result.changed = "it changes one of its arguments"
    if versions != [version(leaf) for leaf in leaves]:
        result.changed = "it writes in place to one of its arguments"
    out_leaves, result.spec = pytree.flatten(returned, leaf=program_leaf, objects=True)
    theirs = {id(container) for container in containers.values()}
    if any(id(c) in theirs for c in result.spec.containers.values()):
        result.changed = "it returns a container that it was given"
    result.draws = [stream.count for stream in trace.streams]  # pyright: ignore
    outputs = []
    for leaf in out_leaves:
        description, value = _described(leaf, member, leaves, result)
        result.outputs.append(description)
        outputs += value
    _check_results(result, out_leaves)
    # These hold the results, and `_check_gone` must find no references to them.
    result.spec.keep, result.spec.containers = [], {}
    return outputs


def is_frozen(leaf: TracedTensor) -> bool:
    """Return whether no gradient flows through this tensor into what a block computes."""
    return leaf._frozen or not torch.is_grad_enabled()


def _stand_in(trace: Trace, leaf: TracedTensor, value: jax.Array) -> TracedTensor:
    made = TracedTensor(Storage(value, trace), (), meta_of(leaf), value, is_frozen(leaf))
    made._bounds = leaf._bounds
    if getattr(leaf, "_is_param", False):
        made._is_param = True
    return made


def _described(
    leaf: Any, member: Member, given: list[Any], result: _Result
) -> tuple[tuple[Any, ...], list[jax.Array]]:
    """Describe how a leaf of the result is made outside, and return its value if it is new."""
    for index, argument in enumerate(given):
        if leaf is argument:
            return ("argument", index), []
    for name, tensor in member.state.items():
        if leaf is tensor:
            return ("state", name), []
    if not isinstance(leaf, TracedTensor):
        if isinstance(leaf, torch.Tensor):
            return ("host", leaf), []
        result.changed = "it returns a number that depends on data"
        return ("host", leaf), []
    inputs = [*(t for t in given if isinstance(t, TracedTensor)), *member.state.values()]
    if any(leaf._storage is tensor._storage for tensor in inputs):
        result.changed = "it returns a view of its state or of an argument"
    if extents_of(leaf):
        result.changed = "it returns a tensor whose size depends on data"
    return ("value", meta_of(leaf), leaf._frozen, leaf._bounds), [strong(leaf._elem)]


def _forget_promoted(trace: Trace, before: Mapping[int, Any]) -> None:
    """Forget host tensors that the block made and wrote traced values to, if it alone holds them.

    Dropout's mask is one: it is made empty and filled in place.
    """
    for key in trace.promoted.keys() - before.keys():
        tensor, storage = trace.promoted.pop(key)
        trace.constants.pop(id(tensor), None)
        held = weakref.ref(tensor)
        del tensor
        # The trace itself holds the memory once, so that no other tensor gets its address.
        if not _is_gone(held) or torch._C._storage_Use_Count(key) > 1:  # pyright: ignore
            trace.promoted[key] = (held(), storage)  # pyright: ignore[reportArgumentType]


def _check_gone(result: _Result) -> None:
    """Record values that outlive the call because something outside holds them."""
    assert result.effects is not None
    if any(not _is_gone(storage) for storage in result.effects.created.values()):
        result.changed = result.changed or "it keeps a tensor elsewhere than in its results"
    if any(not _is_gone(number) for number in result.effects.numbers):
        result.changed = result.changed or "it keeps a number that depends on data"


def _is_gone(held: weakref.ref[Any]) -> bool:
    if held() is not None:
        # Collection is off while a trace runs. All objects of the trace are in generation 0.
        gc.collect(0)
    return held() is None


def _check_results(result: _Result, out_leaves: list[Any]) -> None:
    pairs = zip(result.outputs, out_leaves, strict=True)
    storages = [leaf._storage for (kind, *_), leaf in pairs if kind == "value"]
    if len({id(storage) for storage in storages}) < len(storages):
        result.changed = result.changed or "two of its results share memory"


def _check_pure(trace: Trace, member: Member, before: Any, result: _Result, consts: Any) -> None:
    assert result.effects is not None
    written = [s for serial, (s, _, _) in result.effects.before.items()]
    if written:
        result.changed = result.changed or "it writes state, or raises on a value"
    if not all(type(count) is int for count in result.draws):
        result.changed = result.changed or "how often it draws random numbers depends on data"
    after = state_tree(member.module, objects=True)
    if result.changed is None and python_changes(before, after, member.module) is not None:
        result.changed = "it changes Python attributes of its modules"
    if result.changed is not None:
        raise NotPure(result.changed)
    if any(isinstance(const, jax.core.Tracer) for const in consts):
        raise NotPure("it reads a traced tensor that is neither its state nor an argument")


@contextlib.contextmanager
def _state_held(member: Member, values: list[jax.Array]) -> Iterator[None]:
    """Give the block's tensors other values inside."""
    storages = [leaf._storage for leaf in member.state.values()]
    saved = [(storage.value, storage.version) for storage in storages]
    for storage, value in zip(storages, values, strict=True):
        # Not `set`: this is no write of the program. The new version keeps cached values apart.
        storage.value, storage.version = value, storage.version + 1
    try:
        yield
    finally:
        for storage, (value, version) in zip(storages, saved, strict=True):
            storage.value, storage.version = value, version


@contextlib.contextmanager
def _streams(trace: Trace, bases: list[jax.Array], starts: list[Any]) -> Iterator[None]:
    """Count random numbers from a traced start inside."""
    streams: list[KeyStream] = trace.streams
    saved = [(stream.base, stream.count, stream.start) for stream in streams]
    for stream, base, start in zip(streams, bases, starts, strict=True):
        stream.base, stream.count, stream.start = base, 0, start
    try:
        yield
    finally:
        for stream, (base, count, start) in zip(streams, saved, strict=True):
            stream.base, stream.count, stream.start = base, count, start


@contextlib.contextmanager
def _noting(trace: Trace, member: Member, places: list[tuple[str, str, int]]) -> Iterator[None]:
    """Record which activations get a spec, and name what runs after all blocks of the family."""
    outer, trace.recorder.activations = trace.recorder.activations, places
    block, trace.recorder.block = trace.recorder.block, (member.fqn, member.everyone)
    try:
        yield
    finally:
        trace.recorder.activations, trace.recorder.block = outer, block
        if outer is not None:
            outer += places
