"""Two sides of a branch as one `lax.cond`: their results, what they write and what they raise.

Each side is run abstractly first, to see whether the two agree in structure, shapes and dtypes. If
a side raises, the condition becomes a check and the other side is the program.
"""

import math
import re
import traceback
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.foundation import pytree
from tpuport.foundation.errors import TpuportError
from tpuport.foundation.interop import backend
from tpuport.foundation.pytree.snapshot import Snapshot
from tpuport.foundation.user_frames import user_places
from tpuport.tracing.core import int64, sym_numbers
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.regions import Body, narrow, rebind
from tpuport.tracing.core.tensor import Flow, TracedTensor, meta_of, wrap
from tpuport.tracing.core.values import flow_of, held_of, value_of


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
    result: Any = None
    error: Exception | None = None
    leaves: list[Any] = field(default_factory=list)
    spec: Any = None
    body: Body | None = None
    metas: list[Any] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)
    wide: list[bool] = field(default_factory=list)
    draws: list[Any] = field(default_factory=list)
    created: Collection[int] = ()


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
    draws = trace.draws
    sides = _discover_sides(trace, (then, orelse), snapshot)
    trace.draws = draws
    forced = _only_outcome(test, sides)
    if forced is not None:
        return forced
    written, moved = _written_union(sides), _rebound_union(sides)
    problem = _check_sides(sides, site)
    if problem is not None and explorable:
        if snapshot is not None:
            snapshot.restore()
        return Unlike(problem)
    if problem is not None:
        raise port_error(
            problem,
            code="TPU101",
            remedy=(
                "make both outcomes give tensors of one shape and dtype, or decide the branch by"
                " a Python value"
            ),
            place=site,
        )
    # If the sides draw different numbers of times, how often the program drew depends on the side:
    # the counts become results of the cond.
    same_draws = all(isinstance(c, int) for c in sides[0].draws) and (
        sides[0].draws == sides[1].draws
    )

    wide = [any(pair) for pair in zip(sides[0].wide, sides[1].wide, strict=True)]

    def run(thunk: Callable[[], Any]) -> Callable[[], tuple[list[jax.Array], ...]]:
        def body() -> tuple[list[jax.Array], ...]:
            if snapshot is not None:
                snapshot.restore()
            trace.draws = draws
            with trace.recording() as effects:
                result = _with_changes(thunk(), snapshot)
                leaves, _ = pytree.flatten(result, leaf=branch_leaf)
                forms = zip(leaves, sides[0].metas, wide, strict=True)
                values = [leaf_value(v, meta, wide=w) for v, meta, w in forms]
                narrow(written)
                after = [s.value for s in written] + [t._elem for t in moved]
            effects.undo()
            counts = [] if same_draws else [jnp.asarray(c, jnp.int32) for c in trace.draws]
            return values, after, counts

        return body

    values, after, counts = jax.lax.cond(test, run(then), run(orelse))
    trace.draws = sides[0].draws if same_draws else counts
    for storage, value in zip(written, after, strict=False):
        storage.set(value)
    for tensor, value in zip(moved, after[len(written) :], strict=True):
        rebind(trace, tensor, value)
    return _rebuild_merged(trace, sides, values, snapshot)


def promote_all(trace: Trace, values: Iterable[Any]) -> None:
    """Make host tensors that are to be written, and that the trace made, traced ones."""
    for value in values:
        if isinstance(value, torch.Tensor) and not isinstance(value, TracedTensor):
            if value.untyped_storage()._cdata in trace.made:
                trace.promote(value)


def _discover_sides(
    trace: Trace, thunks: tuple[Callable[[], Any], ...], snapshot: Snapshot | None
) -> list[_Side]:
    draws, promoted, made = trace.draws, set(trace.promoted), len(trace.made)
    sides = []
    for thunk in thunks:
        if snapshot is not None:
            snapshot.restore()
        trace.draws = draws
        sides.append(_discover(trace, thunk, snapshot))
        sides[-1].draws = trace.draws
    # A side wrote to host tensors from before the branch: they have to be traced outside of it.
    leaked = {k: t for k, (t, _) in trace.promoted.items() if k not in promoted}
    before = [k for k in leaked if k in trace.made and trace.made[k][0] < made]
    for key in before:
        del trace.promoted[key]
        trace.promote(leaked[key])
    trace.draws = draws
    return _discover_sides(trace, thunks, snapshot) if before else sides


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


def is_of_numbers(error: Exception) -> bool:
    """Return whether Python or torch cannot use a traced number: no error of the user's code."""
    return bool(re.search(r"\bSym(Int|Float|Bool)\b", str(error)))


def _discover(trace: Trace, thunk: Callable[[], Any], snapshot: Snapshot | None) -> _Side:
    """Run one side abstractly: its result, what it writes, or the exception it raises."""
    side = _Side()

    def run() -> int:
        with trace.recording() as effects:
            try:
                side.result = _with_changes(thunk(), snapshot)
                if effects.wrote_on_host:
                    raise _writes_on_host()
                side.leaves, side.spec = pytree.flatten(side.result, leaf=branch_leaf)
                side.metas = [leaf_meta(leaf) for leaf in side.leaves]
                side.flows = [flow_of([v]) for v in side.leaves]
                side.wide = [_is_wide(v) for v in side.leaves]
            except Exception as error:  # the user's own error on this path: it becomes a check
                if isinstance(error, TpuportError) or is_of_numbers(error):
                    raise
                if _is_of_jax(error):
                    raise _untraced(error) from error
                side.error = error
        side.body = Body(trace, thunk)
        side.body.written = list(effects.before.values())
        side.body.rebound = [tensor for tensor, _, _ in effects.rebound.values()]
        side.created = effects.created
        effects.undo()
        return 0

    errors, code = len(trace.recorder.checks), trace.error_code
    units = trace.explorer.units if trace.explorer is not None else []
    known = [(unit, dict(unit.known)) for unit in units]
    trace.error_code = None
    try:
        jax.eval_shape(run)
    finally:
        trace.error_code = code
        del trace.recorder.checks[errors:]
        # Decisions made here registered no check, so the real run has to make them again.
        for unit, before in known:
            unit.known = before
    return side


def _is_of_jax(error: Exception) -> bool:
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


def _writes_on_host() -> Exception:
    return port_error(
        "a branch on a traced value writes to a tensor that was made before it and depends on none"
        " of the program's inputs",
        code="TPU101",
        remedy="make that tensor from an input (x.new_zeros(...)), or return its new value",
    )


def _written_union(sides: list[_Side]) -> list[Any]:
    union: dict[int, Any] = {}
    for side in sides:
        assert side.body is not None
        for storage, _, _ in side.body.written:
            union[storage.serial] = storage
    trace = sides[0].body.trace  # type: ignore[union-attr]
    if trace.error_code is not None:
        union[trace.error_code.serial] = trace.error_code
    return list(union.values())


def _rebound_union(sides: list[_Side]) -> list[TracedTensor]:
    bodies = [side.body for side in sides if side.body is not None]
    return list({id(t): t for body in bodies for t in body.rebound}.values())


def leaf_meta(leaf: Any) -> Any:
    """Return what the other side has to match: a meta tensor, or the type of a number."""
    return meta_of(leaf) if isinstance(leaf, torch.Tensor) else type(leaf)


def _is_wide(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and int64.is_wide(held_of(leaf))


def leaf_value(leaf: Any, meta: Any, *, wide: bool = False) -> jax.Array:
    """Return the array of a tensor or number, in the dtype that both sides give.

    Args:
        leaf: The tensor or number.
        meta: The type of a number on both sides, or a meta tensor; None if there is one side.
        wide: Whether the tensor has 64 bits on one side.
    """
    if isinstance(leaf, torch.Tensor) and wide:
        held = held_of(leaf)
        with int64.scope():
            return held.astype(jnp.int64)
    if isinstance(leaf, torch.Tensor):
        return value_of(leaf)
    if isinstance(meta, torch.Tensor) and not wide:  # the other side has a tensor here
        value = sym_numbers.node_value(leaf) if _is_number(leaf) else jnp.asarray(leaf)
        return value.astype(backend.jax_dtype(meta.dtype))
    value = sym_numbers.exact_value(leaf)
    if meta is None:
        return value
    with int64.scope():
        return value.astype(jnp.int64 if wide else sym_numbers.DTYPES[number_kind(meta)])


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, sym_numbers.SYMBOLIC)


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
