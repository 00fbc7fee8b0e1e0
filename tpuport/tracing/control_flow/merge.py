"""Two sides of a branch as one `lax.cond`: their results, what they write and what they raise.

Each side is traced once, to a program of its own. Where the two agree in structure, shapes and
dtypes, those programs become the branches of the cond. If a side raises, the condition becomes a
check and the other side is the program.
"""

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.extend.core import jaxpr_as_fun

from tpuport.foundation import pytree
from tpuport.foundation.errors import TpuportError
from tpuport.foundation.interop import backend
from tpuport.foundation.pytree.snapshot import Snapshot
from tpuport.tracing.core import int64, sym_numbers
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.tensor import Flow, Storage, TracedTensor, meta_of, wrap
from tpuport.tracing.core.values import flow_of, held_of, value_of

# Of a traced number that Python or torch cannot use, which is no error of the user's code.
_OF_NUMBERS = re.compile(r"\bSym(Int|Float|Bool)\b")


@dataclass
class Forced:
    """The one outcome that is left of a branch, because the other side raises `error`."""

    outcome: bool
    failed: jax.Array
    error: Exception


@dataclass
class Unlike:
    """The two outcomes of a branch that no single program can give, and why."""

    problem: str


@dataclass
class _Side:
    """One side of a branch, traced: what it gives and writes, or what it raises.

    `program` returns the arrays of the leaves (None for a plain Python number), of the storages
    that it wrote, and of the counts of random draws that are no plain numbers.
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
    program: Callable[[], Any] = tuple


def merge(
    trace: Trace,
    test: jax.Array,
    then: Callable[[], Any],
    orelse: Callable[[], Any],
    *,
    site: str,
    snapshot: Snapshot | None = None,
    explorable: bool = False,
) -> Any:
    """Run both sides of a branch as one `lax.cond`.

    Return `Forced` if one side raises: the caller makes the condition a check. Return `Unlike` if
    the sides differ and the branch is `explorable`: the caller explores what follows it.

    Raises:
        PortError: the sides differ in structure, shape, dtype or Python values.
    """
    test = jnp.reshape(test, ()).astype(bool)
    draws, checks = trace.draws, len(trace.recorder.checks)
    units = trace.explorer.units if trace.explorer is not None else []
    known = [(unit, dict(unit.known)) for unit in units]
    sides = []
    for thunk in (then, orelse):
        if snapshot is not None:
            snapshot.restore()
        trace.draws = draws
        sides.append(_traced_side(trace, thunk, snapshot))
    trace.draws = draws
    found: Any = _only_outcome(test, sides)
    problem = None if found is not None else _check_sides(sides, site)
    if problem is not None and explorable:
        found = Unlike(problem)
    if problem is not None and found is None:
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
        return _Merge(trace, sides).result(test, snapshot)
    # The caller runs a side again, which makes its checks and decisions again.
    del trace.recorder.checks[checks:]
    for unit, before in known:
        unit.known = before
    if snapshot is not None:
        snapshot.restore()
    return found


class _Merge:
    """The `lax.cond` of two sides that agree."""

    def __init__(self, trace: Trace, sides: list[_Side]) -> None:
        self.trace, self.sides = trace, sides
        a, b = sides
        self.wide = [any(pair) for pair in zip(a.wide, b.wide, strict=True)]
        self.written = list({s.serial: s for s in (*a.written, *b.written)}.values())
        # A storage that holds 64 bits on one side, or before, holds them after the branch.
        self.wide_writes = a.wide_writes | b.wide_writes
        self.wide_writes |= {s.serial for s in self.written if s.wide}
        # If the sides draw different numbers of times, how often the program drew depends on the
        # side: the counts become results of the cond.
        self.same_draws = all(isinstance(c, int) for c in a.draws) and a.draws == b.draws

    def result(self, test: jax.Array, snapshot: Snapshot | None) -> Any:
        """Return the result of the branch, after its writes."""
        a, b = self.sides
        values, after, counts = jax.lax.cond(test, self._body(a), self._body(b))
        self.trace.draws = a.draws if self.same_draws else counts
        for storage, value in zip(self.written, after, strict=True):
            storage.set(value)
        return _rebuild_merged(self.trace, self.sides, values, snapshot)

    def _body(self, side: _Side) -> Callable[[], Any]:
        metas, before = self.sides[0].metas, [s.held for s in self.written]

        def body() -> tuple[list[jax.Array], ...]:
            leaves, after, traced_counts = side.program()
            parts = zip(side.leaves, leaves, metas, self.wide, strict=True)
            values = [_merged_value(*part) for part in parts]
            writes = dict(zip([s.serial for s in side.written], after, strict=True))
            final = [
                _as_wide(writes.get(s.serial, held), wide=s.serial in self.wide_writes)
                for s, held in zip(self.written, before, strict=True)
            ]
            rest = iter(traced_counts)
            counts = [jnp.int32(c) if isinstance(c, int) else next(rest) for c in side.draws]
            return values, final, [] if self.same_draws else counts

        return body


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


def _only_outcome(test: jax.Array, sides: list[_Side]) -> Forced | None:
    """Return the other outcome if one side raises."""
    for side, other, outcome in ((sides[0], sides[1], False), (sides[1], sides[0], True)):
        if side.error is not None:
            if other.error is not None:
                raise side.error
            failed = test if outcome is False else jnp.logical_not(test)
            return Forced(outcome, failed, side.error)
    return None


def branch_leaf(value: Any) -> bool:
    """Return whether the sides of a branch may return different values in place of this one."""
    return isinstance(value, (torch.Tensor, *sym_numbers.SYMBOLIC)) or type(value) in (
        bool,
        int,
        float,
    )


_KINDS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def number_kind(meta: Any, other: Any = bool) -> type:
    """Return the Python type for a number whose type differs between the sides of a branch."""
    kinds = (_KINDS.get(meta, meta), _KINDS.get(other, other))
    return float if float in kinds else int if int in kinds else bool


def _with_changes(result: Any, snapshot: Snapshot | None) -> Any:
    return result if snapshot is None else (result, snapshot.changes())


def _traced_side(
    trace: Trace, thunk: Callable[[], Any], snapshot: Snapshot | None
) -> _Side:
    """Trace one side to a program: its result, what it writes, or the exception it raises."""
    side = _Side()

    def run() -> tuple[list[Any], list[jax.Array], list[jax.Array]]:
        values: list[Any] = []
        with trace.recording(repeats=True) as effects:
            try:
                side.result = _with_changes(thunk(), snapshot)
                side.leaves, side.spec = pytree.flatten(side.result, leaf=branch_leaf)
                side.metas = [leaf_meta(leaf) for leaf in side.leaves]
                side.flows = [flow_of([v]) for v in side.leaves]
                values = [_held(leaf) for leaf in side.leaves]
                side.wide = [_is_wide(*pair) for pair in zip(side.leaves, values, strict=True)]
            except Exception as error:  # the user's own error on this path: it becomes a check
                if isinstance(error, TpuportError) or _OF_NUMBERS.search(str(error)):
                    raise
                side.error = error
        side.created = effects.created
        side.written = [storage for storage, _, _ in effects.before.values()]
        side.wide_writes = {storage.serial for storage in side.written if storage.wide}
        after = [storage.held for storage in side.written]
        for storage, value, _ in effects.before.values():
            storage.value, storage.version = value, storage.version + 1
        side.draws = trace.draws
        counts = [count for count in side.draws if not isinstance(count, int)]
        return values, after, [jnp.asarray(count, jnp.int32) for count in counts]

    closed, shape = jax.make_jaxpr(run, return_shape=True)()
    program, treedef = jaxpr_as_fun(closed), jax.tree.structure(shape)
    side.program = lambda: jax.tree.unflatten(treedef, program())
    return side


def _held(leaf: Any) -> jax.Array | None:
    """Return the array of a leaf, as wide as it is; None for a plain Python number."""
    if isinstance(leaf, torch.Tensor):
        return held_of(leaf)
    return sym_numbers.exact_value(leaf) if isinstance(leaf, sym_numbers.SYMBOLIC) else None


def leaf_meta(leaf: Any) -> Any:
    """Return what the other side has to match: a meta tensor, or the type of a number."""
    return meta_of(leaf) if isinstance(leaf, torch.Tensor) else type(leaf)


def _is_wide(leaf: Any, value: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and int64.is_wide(value)


def leaf_value(leaf: Any) -> jax.Array:
    """Return the array of a tensor, or of a number in the 64 bits that it has."""
    return value_of(leaf) if isinstance(leaf, torch.Tensor) else sym_numbers.exact_value(leaf)


def _check_sides(sides: list[_Side], site: str) -> str | None:
    """Return in what the two sides differ, and settle the kinds of numbers that they give."""
    a, b = sides
    for leaf in (*a.leaves, *b.leaves):
        if isinstance(leaf, TracedTensor) and leaf._extents is not None:
            raise port_error(
                "a branch on a traced value gives a tensor whose size depends on data",
                code="TPU203",
                place=site,
                remedy="reduce it to a static size inside the branch",
            )
    same = a.spec.key == b.spec.key and len(a.leaves) == len(b.leaves)
    if same:
        for index, (x, y) in enumerate(zip(a.metas, b.metas, strict=True)):
            if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
                same = same and x.shape == y.shape and x.dtype == y.dtype
            elif isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
                tensor, kind = (x, y) if isinstance(x, torch.Tensor) else (y, x)
                same = same and _is_like(tensor, kind)
                a.metas[index] = b.metas[index] = tensor if same else x
                # A Python int has 64 bits.
                a.wide[index] = a.wide[index] or tensor.dtype is torch.int64
            else:
                a.metas[index] = b.metas[index] = number_kind(x, y)
    if same:
        return None
    return (
        "the two outcomes of the branch differ in structure, shape, dtype or Python values:"
        f" {_outline(a)} against {_outline(b)}"
    )


def _is_like(tensor: torch.Tensor, kind: Any) -> bool:
    """Return whether a tensor stands for a Python number of this kind wherever one is used."""
    dtypes = {bool: torch.bool, int: torch.int64, float: torch.get_default_dtype()}
    return not tensor.dim() and tensor.dtype == dtypes.get(_KINDS.get(kind, kind))


def _outline(side: _Side) -> str:
    text = ", ".join(
        f"{str(m.dtype)[6:]}{list(m.shape)}" if isinstance(m, torch.Tensor) else m.__name__
        for m in side.metas[:4]
    )
    return f"({text}{', ...' if len(side.metas) > 4 else ''})"


def _is_from_outside(leaf: Any, side: _Side) -> bool:
    """Return whether a result is a tensor that was there before the branch."""
    return isinstance(leaf, TracedTensor) and leaf._storage.serial not in side.created


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


def _rebuild_merged(
    trace: Trace, sides: list[_Side], values: list[jax.Array], snapshot: Snapshot | None
) -> Any:
    a, b = sides
    leaves: list[Any] = []
    for index, (value, meta) in enumerate(zip(values, a.metas, strict=True)):
        one, other = a.leaves[index], b.leaves[index]
        if (one is other and _is_from_outside(one, a)) or _is_same_state(one, other):
            leaves.append(one)
        elif isinstance(meta, torch.Tensor):
            flow = max(a.flows[index], b.flows[index])
            leaves.append(wrap(value, meta.dtype, trace=trace, flow=flow))
        elif type(one) is type(other) and type(one) in (bool, int, float) and one == other:
            leaves.append(one)
        else:
            leaves.append(sym_numbers.number(value, meta, *_bounds(one, other)))
            trace.has_numbers = trace.dynamic = True  # as `.item()` does
    rebuilt = pytree.unflatten(a.spec, leaves)
    if snapshot is None:
        return rebuilt
    result, changes = rebuilt
    snapshot.restore()
    snapshot.apply(changes)
    return result
