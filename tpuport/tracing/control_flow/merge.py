"""Two sides of a branch as one `lax.cond`: their results, what they write and what they raise.

Each side is traced once, to a program of its own. Where the two agree in structure, shapes and
dtypes, those programs become the branches of the cond. If a side raises, the condition becomes a
check and the other side is the program.
"""

import math
import re
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.extend.core import jaxpr_as_fun

from tpuport.foundation import pytree
from tpuport.foundation.errors import PortError, TpuportError
from tpuport.foundation.interop import backend
from tpuport.foundation.pytree.snapshot import Snapshot
from tpuport.foundation.tracebacks import forget
from tpuport.foundation.user_frames import user_places
from tpuport.tracing.control_flow.given_containers import (
    SideFlattener,
    from_before,
    given_by_both,
    watch_merged,
)
from tpuport.tracing.control_flow.sized_results import (
    Bounds,
    Counts,
    common_bounds,
    counted,
    joined,
    within,
)
from tpuport.tracing.core import int64, sym_numbers
from tpuport.tracing.core.arguments import result_meta, wants_int64
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.regions import rebind
from tpuport.tracing.core.shared_tensors import Refusal
from tpuport.tracing.core.storage import Flow, Storage
from tpuport.tracing.core.sym_node import NumberNode
from tpuport.tracing.core.tensor import TracedTensor, meta_of, wrap
from tpuport.tracing.core.values import flow_of, held_of, value_of


@dataclass
class Forced:
    """The one outcome that is left of a branch, because the other side raises `error`."""

    outcome: bool
    failed: jax.Array
    error: Exception


def shared_write(site: str) -> PortError:
    """Return the error for a write that would reach another tensor or container on some paths."""
    return port_error(
        f"writes to a result of the branch or loop at {site}. On some of its paths, but not on all,"
        " that result is the same as what another name holds, or shares memory with another tensor,"
        " which the write would change as well",
        code="TPU101",
        remedy="let the branch give a copy (`b = a.clone()` for `b = a`, `dict(a)` for a dict), if"
        " that is what is meant",
    )


@dataclass
class Unlike:
    """The two outcomes of a branch that no single program can give, and why."""

    problem: str


@dataclass
class _Side:
    """One side of a branch, traced: what it gives and writes, or what it raises.

    `program` returns the arrays of the leaves (None for a plain Python number), of the storages
    that it wrote, of the tensors that it rebound by `x.data = y`, and of the counts of random draws
    that are no plain numbers, and the sizes that depend on data. `places` says where among the
    first the array of each leaf is; None stands for the next of `given`, leaves from outside with
    their arrays before the branch. `links`
    are storages that it gives, others that they may be one with, and whether it returns when (the
    last arrays).
    """

    result: Any = None
    error: Exception | None = None
    leaves: list[Any] = field(default_factory=list)
    spec: Any = None
    metas: list[Any] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)
    wide: list[bool] = field(default_factory=list)
    draws: list[Any] = field(default_factory=list)
    created: Collection[int] = ()
    written: list[Storage] = field(default_factory=list)
    wide_writes: set[int] = field(default_factory=set)
    rebound: list[TracedTensor] = field(default_factory=list)
    program: Callable[[], Any] = tuple
    places: list[int | None] = field(default_factory=list)
    given: list[Any] = field(default_factory=list)
    links: list[tuple[Storage, Storage, bool]] = field(default_factory=list)
    # Its containers from before the branch, and the index of each container, by their paths.
    before: Callable[[Any], bool] = lambda value: False
    containers: dict[str, Any] = field(default_factory=dict)
    indices: dict[str, int] = field(default_factory=dict)
    # The tensors that it made with a size that depends on data, by id, and the dims of these sizes.
    counted: list[tuple[int, int]] = field(default_factory=list)
    bounds: list[Bounds] = field(default_factory=list)

    def flatten(self, kept: Collection[int] = ()) -> list[Any]:
        """Take the leaves of the result, and return the arrays of those that are new.

        Args:
            kept: the ids of containers that both sides give, which are kept as they are.
        """
        known = {id(leaf): index for index, leaf in enumerate(self.leaves)}
        # Which of them are one may differ between the sides.
        flattener = SideFlattener(branch_leaf, self.before, kept)
        node, key = flattener.visit(self.result, "")
        leaves, self.spec = flattener.leaves, pytree.TreeSpec(node, key, flattener.keep)
        self.containers, self.indices = flattener.given, flattener.places
        places = [known.get(id(leaf)) for leaf in leaves]
        outside = [leaf for leaf, at in zip(leaves, places, strict=True) if at is None]
        with torch.enable_grad():  # no_grad stops what ops make, and not what a name stands for
            new = [_held(leaf) for leaf in outside]
            self.flows = [flow_of([v]) for v in leaves]
        # Numbers have 64 bits anyway.
        tensors = [isinstance(leaf, torch.Tensor) for leaf in outside]
        wide = iter([t and int64.is_wide(v) for t, v in zip(tensors, new, strict=True)])
        self.wide = [next(wide) if at is None else self.wide[at] for at in places]
        self.metas = [leaf_meta(leaf) for leaf in leaves]
        self.leaves, self.places = leaves, places
        return new


class Decisions:
    """The checks and decisions that a trace has made, to run a part of it again.

    That part makes its own again.
    """

    def __init__(self, trace: Trace) -> None:
        units = trace.explorer.units if trace.explorer is not None else []
        self._known = [(unit, dict(unit.known)) for unit in units]
        self._checks, self._count = trace.recorder.checks, len(trace.recorder.checks)

    def restore(self) -> None:
        """Forget those made since."""
        del self._checks[self._count :]
        for unit, before in self._known:
            unit.known = before


def merge(
    trace: Trace,
    test: jax.Array,
    then: Callable[[], Any],
    orelse: Callable[[], Any],
    *,
    site: str,
    apart: Refusal,
    snapshot: Snapshot | None = None,
    explorable: bool = False,
    first: bool = True,
    unlike: Callable[[], None] = lambda: None,
) -> Any:
    """Run both sides of a branch as one `lax.cond`.

    `apart` makes the error for a later write to what is a tensor from outside on one side.

    Return `Forced` if one side raises: the caller makes the condition a check. The side of the
    outcome `first` is traced first, and the other one not if that raises. Return `Unlike` if
    the sides differ and the branch is `explorable`: the caller explores what follows it. If it is
    not, `unlike` may ask for another trace.

    Raises:
        PortError: the sides differ in structure, shape, dtype or Python values.
    """
    test = jnp.reshape(test, ()).astype(bool)
    draws, decisions = trace.draws, Decisions(trace)
    before = from_before(snapshot, trace.shared)
    thunks, traced = {True: then, False: orelse}, dict[bool, _Side]()
    found: Any = None
    for outcome in (first, not first):
        if snapshot is not None:
            snapshot.restore()
        trace.draws = draws
        traced[outcome] = _traced_side(trace, thunks[outcome], snapshot, before)
        found = _only_outcome(test, outcome, traced[outcome].error)
        if found is not None:
            break  # what follows on the other side is traced once, after the check
    trace.draws = draws
    sides = [traced[outcome] for outcome in (True, False) if outcome in traced]
    if snapshot is not None and found is None:
        snapshot.restore()
        _align(sides, snapshot)
    problem = None if found is not None else _check_sides(sides)
    if problem is not None and explorable:
        found = Unlike(problem)
    if problem is not None and found is None:
        unlike()
        raise port_error(
            problem,
            code="TPU101",
            remedy=(
                "make both outcomes give tensors of one shape and dtype, or decide the branch by"
                " a Python value"
            ),
            place=site,
        )
    if found is None:
        return _Merge(trace, sides, apart).result(test, snapshot)
    decisions.restore()
    if snapshot is not None:
        snapshot.restore()
    return found


def _align(sides: list[_Side], snapshot: Snapshot) -> None:
    """Make both sides give what either of them changed, and keep the containers that both give."""
    kept = given_by_both(*(side.containers for side in sides))
    if sides[0].spec.key == sides[1].spec.key and not kept:
        return
    changes = [side.result[1] for side in sides]
    for side, own, other in zip(sides, changes, reversed(changes), strict=True):
        side.result = side.result[0], snapshot.aligned(own, other)
        # What it gives may hold containers from before, which then hold what it left there.
        snapshot.apply(own)
        new = side.flatten(kept)
        snapshot.restore()
        outside = [leaf for leaf, at in zip(side.leaves, side.places, strict=True) if at is None]
        side.given = list(zip(outside, new, strict=True))


class _Merge:
    """The `lax.cond` of two sides that agree."""

    def __init__(self, trace: Trace, sides: list[_Side], apart: Refusal) -> None:
        self.trace, self.sides, self.apart = trace, sides, apart
        a, b = sides
        self.wide = [any(pair) for pair in zip(a.wide, b.wide, strict=True)]
        self.written = list({s.serial: s for s in (*a.written, *b.written)}.values())
        # A storage that holds 64 bits on one side, or before, holds them after the branch.
        self.wide_writes = a.wide_writes | b.wide_writes
        self.wide_writes |= {s.serial for s in self.written if s.wide}
        self.rebound = list({id(t): t for t in (*a.rebound, *b.rebound)}.values())
        # If the sides draw different numbers of times, how often the program drew depends on the
        # side: the counts become results of the cond.
        known = all(isinstance(c, int) for c in (*a.draws, *b.draws))
        self.same_draws = known and a.draws == b.draws

    def result(self, test: jax.Array, snapshot: Snapshot | None) -> Any:
        """Return the result of the branch, after its writes."""
        a, b = self.sides
        self.trace.branches = True
        values, after, counts, sizes, *tests = jax.lax.cond(test, self._body(a), self._body(b))
        self.trace.draws = a.draws if self.same_draws else counts
        count = len(self.written)
        for storage, value in zip(self.written, after[:count], strict=True):
            storage.set(value)
        for tensor, value in zip(self.rebound, after[count:], strict=True):
            rebind(self.trace, tensor, value)
        leaves = _merged_leaves(self.trace, self.sides, values, sizes, self.apart)
        for side, taken, inner in zip(self.sides, (test, ~test), tests, strict=True):
            self._link(side, leaves, taken, inner)
        made: dict[int, Any] = {}
        rebuilt = pytree.unflatten(a.spec, leaves, made)
        if snapshot is None:
            return rebuilt
        result, changes = rebuilt
        snapshot.restore()
        snapshot.apply(changes)
        pairs = [
            (made[a.indices[path]], given)
            for side in self.sides
            for path, given in side.containers.items()
            if path in a.indices
        ]
        watch_merged(self.trace.shared, pairs, snapshot, self.apart)
        return result

    def _link(
        self, side: _Side, leaves: list[Any], taken: jax.Array, inner: list[jax.Array]
    ) -> None:
        """Link the tensors that the branch gives to those that they are on one side.

        Args:
            side: the side.
            leaves: the results of the branch.
            taken: whether this side is taken.
            inner: whether it is, and the two storages of each of its links are one.
        """
        merged_of: dict[int, Storage] = {}
        for leaf, merged in zip(side.leaves, leaves, strict=True):
            own = self._own_storage(leaf)
            if leaf is merged or own is None or not isinstance(merged, TracedTensor):
                continue
            new, whole = merged._storage, _is_whole(leaf) and merged._extents is None
            tests = [(own, taken if whole else None)]
            tests += [
                (other, test if whole and known else None)
                for (one, other, known), test in zip(side.links, inner, strict=True)
                if one is own
            ]
            for storage, test in tests:
                inside = storage.serial in side.created
                partner = merged_of.setdefault(storage.serial, new) if inside else storage
                if partner is not new:
                    holder = None if isinstance(leaf, TracedTensor) else leaf
                    self.trace.shared.add_all(
                        *(new, partner, test, self.trace.regions, self.apart), holder=holder
                    )

    def _own_storage(self, leaf: Any) -> Storage | None:
        """Return the storage of a tensor; of a host tensor that the trace made, a traced one."""
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, TracedTensor):
            alias = self.trace.alias(leaf)
            if alias is None and not self.trace.is_foreign(leaf):
                alias = self.trace.promote(leaf)
            leaf = alias
        return leaf._storage if isinstance(leaf, TracedTensor) else None

    def _body(self, side: _Side) -> Callable[[], Any]:
        metas, before = self.sides[0].metas, [s.held for s in self.written]
        bounds = self.sides[0].bounds
        bound_before = [t._elem for t in self.rebound]

        def body() -> tuple[list[Any], ...]:
            found, after, traced_counts, tests, counted = side.program()
            known = dict(zip(side.counted, counted, strict=True))
            writes = dict(zip([s.serial for s in side.written], after, strict=False))
            bound = dict(zip(map(id, side.rebound), after[len(side.written) :], strict=True))
            given = iter([_after(self.trace, leaf, held, writes) for leaf, held in side.given])
            leaves = [next(given) if at is None else found[at] for at in side.places]
            parts = zip(side.leaves, leaves, metas, self.wide, strict=True)
            values = [_merged_value(*part) for part in parts]
            sized = [
                within(leaf, value, bound, known) if bound else (value, {})
                for leaf, value, bound in zip(side.leaves, values, bounds, strict=True)
            ]
            values, sizes = [value for value, _ in sized], [size for _, size in sized]
            final = [
                _as_wide(writes.get(s.serial, held), wide=s.serial in self.wide_writes)
                for s, held in zip(self.written, before, strict=True)
            ]
            final += [
                bound.get(id(t), held) for t, held in zip(self.rebound, bound_before, strict=True)
            ]
            rest = iter(traced_counts)
            counts = [jnp.int32(c) if isinstance(c, int) else next(rest) for c in side.draws]
            ones = [tests if s is side else [jnp.bool_(False)] * len(s.links) for s in self.sides]
            return values, final, [] if self.same_draws else counts, sizes, *ones

        return body


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has the elements of its storage, in their order."""
    if isinstance(tensor, TracedTensor):
        return not tensor._chain
    with torch._C.DisableTorchFunction():
        size = tensor.untyped_storage().nbytes()
        return tensor.is_contiguous() and tensor.numel() * tensor.itemsize == size


def _after(trace: Trace, leaf: Any, held: Any, writes: dict[int, jax.Array]) -> Any:
    """Return the array of a tensor from outside after the writes of a side."""
    alias = leaf if isinstance(leaf, TracedTensor) else None
    if isinstance(leaf, torch.Tensor) and alias is None:
        alias = trace.alias(leaf)
    if alias is None or alias._storage.serial not in writes:
        return held
    value = writes[alias._storage.serial]
    for step in alias._chain:
        value = step.read(value)
    return value


def _as_wide(value: jax.Array, *, wide: bool) -> jax.Array:
    with int64.scope():
        return value.astype(jnp.int64) if wide else value


def _merged_value(leaf: Any, value: Any, meta: Any, wide: bool) -> jax.Array:
    """Return the array of a tensor or number, in the dtype that both sides give.

    Args:
        leaf: the tensor or number.
        value: its array; None for a plain Python number.
        meta: the type of a number on both sides, or a meta tensor.
        wide: whether it has 64 bits on one side.
    """
    if isinstance(leaf, torch.Tensor):
        return _as_wide(value, wide=wide)
    value = sym_numbers.exact_value(leaf) if value is None else value
    with int64.scope():
        if isinstance(meta, torch.Tensor) and not wide:  # the other side has a tensor here
            return value.astype(backend.jax_dtype(meta.dtype))
        return value.astype(jnp.int64 if wide else sym_numbers.DTYPES[number_kind(meta)])


def _only_outcome(test: jax.Array, outcome: bool, error: Exception | None) -> Forced | None:
    """Return the other outcome if the side of this one raises."""
    if error is None:
        return None
    # The check for it outlives the sides, whose values must not: a block around them would hand
    # them on as results of its own.
    forget(error)
    return Forced(not outcome, test if outcome else jnp.logical_not(test), error)


def branch_leaf(value: Any) -> bool:
    """Return whether the sides of a branch may return different values in place of this one."""
    return isinstance(value, (torch.Tensor, *sym_numbers.SYMBOLIC)) or type(value) in (
        bool,
        int,
        float,
    )


def may_be_number(value: Any) -> bool:
    """Return whether eager has a Python number in place of a value, on some path at least."""
    return not isinstance(value, torch.Tensor) or getattr(value, "_or_number", False)


_KINDS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def number_kind(meta: Any) -> type:
    """Return the Python type of a number, traced or not, by its type."""
    return _KINDS.get(meta, meta)


def _with_changes(result: Any, snapshot: Snapshot | None) -> Any:
    return result if snapshot is None else (result, snapshot.changes())


def is_of_numbers(error: Exception) -> bool:
    """Return whether Python or torch cannot use a traced number: no error of the user's code."""
    return bool(re.search(r"\bSym(Int|Float|Bool)\b", str(error)))


def is_of_jax(error: Exception) -> bool:
    """Return whether jax raised an error: about the program, not about the user's values."""
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    names = (type(error).__module__, str(last.f_globals.get("__name__")))
    return any(name.partition(".")[0] in ("jax", "jaxlib", "torchax") for name in names)


def _untraced(error: Exception) -> TpuportError:
    place = next(user_places(error.__traceback__), None)
    return port_error(
        f"an outcome of the branch cannot be traced: {type(error).__name__}: {error}",
        code="TPU105",
        remedy="this is a gap in tpuport or jax: please report it with this line",
        cause=error,
        place=None if place is None else str(place),
    )


def _traced_side(
    trace: Trace,
    thunk: Callable[[], Any],
    snapshot: Snapshot | None,
    before: Callable[[Any], bool],
) -> _Side:
    """Trace one side to a program: its result, what it writes, or the exception it raises."""
    side = _Side(before=before)

    def run() -> tuple[list[Any], ...]:
        values: list[Any] = []
        with trace.recording(repeats=True) as effects:
            region = trace.regions[-1]
            try:
                side.result = _with_changes(thunk(), snapshot)
                values = side.flatten()
            except Exception as error:  # the user's own error on this path: it becomes a check
                if isinstance(error, TpuportError) or is_of_numbers(error):
                    raise
                if trace.takes_int32 and wants_int64(error):
                    raise  # the call is traced again with int64 arguments
                if is_of_jax(error):
                    raise _untraced(error) from error
                side.error = error
        side.places = list(range(len(values)))
        side.created = effects.created
        side.written = [storage for storage, _, _ in effects.before.values()]
        side.wide_writes = {storage.serial for storage in side.written if storage.wide}
        side.rebound = [tensor for tensor, _, _ in effects.rebound.values()]
        after = [storage.held for storage in side.written] + [t._elem for t in side.rebound]
        effects.undo()
        side.draws = trace.draws
        counts = [count for count in side.draws if not isinstance(count, int)]
        traced_counts = [jnp.asarray(count, jnp.int32) for count in counts]
        sizes = counted(side.leaves)
        side.counted = [(leaf, dim) for leaf, dim, _ in sizes]
        links = _inner_links(trace, side, region)
        return values, after, traced_counts, links, [count for *_, count in sizes]

    closed, shape = jax.make_jaxpr(run, return_shape=True)()
    program, treedef = jaxpr_as_fun(closed), jax.tree.structure(shape)
    side.program = lambda: jax.tree.unflatten(treedef, program())
    return side


def _inner_links(trace: Trace, side: _Side, region: int) -> list[jax.Array]:
    """Take the links of the storages that a side gives, and return their tests."""
    tests = []
    own = [leaf._storage for leaf in side.leaves if isinstance(leaf, TracedTensor)]
    for storage in {s.serial: s for s in own}.values():
        for other, link in trace.shared.of(storage):
            known = link.test is not None and link.region in (*trace.regions, region)
            side.links.append((storage, other, known))
            tests.append(link.test if link.test is not None and known else jnp.bool_(False))
    return tests


def _held(leaf: Any) -> jax.Array | None:
    """Return the array of a leaf, as wide as it is; None for a plain Python number."""
    if isinstance(leaf, torch.Tensor):
        return held_of(leaf)
    return sym_numbers.exact_value(leaf) if isinstance(leaf, sym_numbers.SYMBOLIC) else None


def leaf_meta(leaf: Any) -> Any:
    """Return what the other side has to match: a meta tensor, or the type of a number."""
    if not isinstance(leaf, torch.Tensor):
        return type(leaf)
    meta: Any = meta_of(leaf)
    meta._unlike_number = getattr(leaf, "_unlike_number", None)
    return meta


def leaf_value(leaf: Any) -> jax.Array:
    """Return the array of a tensor, or of a number in the 64 bits that it has."""
    return value_of(leaf) if isinstance(leaf, torch.Tensor) else sym_numbers.exact_value(leaf)


def _check_sides(sides: list[_Side]) -> str | None:
    """Return in what the two sides differ, and settle the kinds of numbers that they give."""
    a, b = sides
    a.bounds = [{} for _ in a.leaves]
    same = a.spec.key == b.spec.key and len(a.leaves) == len(b.leaves)
    if same:
        for index, (x, y) in enumerate(zip(a.metas, b.metas, strict=True)):
            if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
                bounds = common_bounds(a.leaves[index], b.leaves[index])
                a.bounds[index] = bounds or {}
                same = same and bounds is not None and x.dtype == y.dtype
            elif isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
                tensor, kind = (x, y) if isinstance(x, torch.Tensor) else (y, x)
                number = b.leaves[index] if tensor is x else a.leaves[index]
                same = same and (is_like(tensor, kind) or is_exact(tensor, number))
                a.metas[index] = b.metas[index] = tensor if same else x
                # A Python int has 64 bits.
                a.wide[index] = a.wide[index] or tensor.dtype is torch.int64
            else:
                # 1 and 1.0 make different tensors.
                a.metas[index], b.metas[index] = number_kind(x), number_kind(y)
                same = same and a.metas[index] is b.metas[index]
    if same:
        return None
    return (
        "the two outcomes of the branch differ in structure, shape, dtype or Python values:"
        f" {_outline(a)} against {_outline(b)}"
    )


def is_like(tensor: torch.Tensor, kind: Any) -> bool:
    """Return whether a tensor stands for a Python number of this kind wherever one is used."""
    dtypes = {bool: torch.bool, int: torch.int64, float: torch.get_default_dtype()}
    return not tensor.dim() and tensor.dtype == dtypes.get(_KINDS.get(kind, kind))


def is_exact(tensor: torch.Tensor, number: Any) -> bool:
    """Return whether a number can be a tensor like another one, with no loss of its value."""
    if tensor.dim() or not tensor.dtype.is_floating_point or type(number) not in (int, float):
        return False
    return torch.tensor(number, dtype=tensor.dtype).item() == number


def _outline(side: _Side) -> str:
    text = ", ".join(
        f"{str(m.dtype)[6:]}{list(m.shape)}" if isinstance(m, torch.Tensor) else m.__name__
        for m in side.metas[:4]
    )
    return f"({text}{', ...' if len(side.metas) > 4 else ''})"


def _is_from_outside(leaf: Any, side: _Side) -> bool:
    """Return whether what both sides return was there before the branch."""
    if isinstance(leaf, TracedTensor):
        return leaf._storage.serial not in side.created
    return isinstance(leaf, sym_numbers.SYMBOLIC)  # each side makes numbers of its own


def _bounds(*numbers: Any) -> tuple[float, float]:
    """Return the smallest and largest value that one of these ints may have."""
    lows, highs = [], []
    for number in numbers:
        node = getattr(number, "node", None)
        lows.append(number if node is None else node.low)
        highs.append(number if node is None else node.high)
    exact = all(isinstance(n, (int, torch.SymInt)) for n in numbers)
    return (min(lows), max(highs)) if exact else (-math.inf, math.inf)


def _is_same_state(one: Any, other: Any) -> bool:
    """Return whether both are the same state of the program's random numbers."""
    ours, theirs = (getattr(value, "_stream", None) for value in (one, other))
    if ours is None or theirs is None or not isinstance(ours[2], int):
        return False
    return ours[0] is theirs[0] and ours[1] is theirs[1] and ours[2] == theirs[2]


def _has_graph(value: Any) -> bool:
    """Return whether a tensor is one from before the call that requires grad, or may be."""
    if not isinstance(value, TracedTensor):
        return False
    return value._may_keep_graph or (value._is_given and value._own_flow is Flow.SEEN)


def _layout(one: Any, other: Any) -> torch.Tensor | None:
    """Return a meta tensor like both results of a branch, None if their layouts differ."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return None
    a, b = result_meta(meta_of(one)), result_meta(meta_of(other))
    return a if a.shape == b.shape and a.stride() == b.stride() else None


def _merged_number(value: jax.Array, meta: Any, one: Any, other: Any) -> Any:
    if isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt):
        expr = one.node.expr
        if expr is not None and expr == other.node.expr:  # each side has computed it for itself
            return sym_numbers.from_node(NumberNode(value, int, *_bounds(one, other), expr=expr))
    return sym_numbers.number(value, meta, *_bounds(one, other))


def _unlike_number(one: Any, other: Any, tensor: torch.Tensor) -> bool:
    """Return whether a side gives a number, or may, that makes tensors of another dtype."""
    marks = (getattr(value, "_unlike_number", None) for value in (one, other))
    numbers = (value for value in (one, other) if not isinstance(value, torch.Tensor))
    return any(marks) or not all(is_like(tensor, type(number)) for number in numbers)


def _merged_leaves(
    trace: Trace,
    sides: list[_Side],
    values: list[jax.Array],
    sizes: list[Counts],
    apart: Refusal,
) -> list[Any]:
    a, b = sides
    leaves: list[Any] = []
    made: dict[tuple[int, int], Any] = {}
    for index, (value, meta) in enumerate(zip(values, a.metas, strict=True)):
        one, other = a.leaves[index], b.leaves[index]
        if (one is other and _is_from_outside(one, a)) or _is_same_state(one, other):
            leaves.append(one)
        elif isinstance(meta, torch.Tensor):
            flow = max(flows := (a.flows[index], b.flows[index]))
            if min(flows) is not flow:  # only one side gives what has a gradient
                flow = min(flow, Flow.MAYBE if torch.is_grad_enabled() else Flow.HIDDEN)
            tensor = wrap(value, meta.dtype, trace=trace, flow=flow)
            like = _layout(one, other)
            if like is not None and like.shape == value.shape:
                tensor = TracedTensor(Storage(value, trace), (), like, value, flow)
            tensor._or_number = any(map(may_be_number, (one, other)))
            tensor._unlike_number = apart if _unlike_number(one, other, meta) else None
            # No path makes a graph here: what has one is of before the call.
            is_old = flow is Flow.HIDDEN or not torch.is_grad_enabled()
            is_either = is_old and any(map(_has_graph, (one, other)))
            tensor = joined(trace, tensor, one, other, sizes[index])
            tensor._may_keep_graph = is_either  # type: ignore[attr-defined]
            leaves.append(made.setdefault((id(one), id(other)), tensor))
        elif type(one) is type(other) and type(one) in (bool, int, float) and one == other:
            leaves.append(one)
        else:
            leaves.append(_merged_number(value, meta, one, other))
            trace.has_numbers = trace.dynamic = True  # as `.item()` does
    return leaves
