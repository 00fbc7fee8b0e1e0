"""Python control flow on traced values.

A branch that a rule can rewrite becomes `tpuport.ops.cond` on its own lines. Any other is explored
at the innermost module (or at the whole function): the call is run once for each outcome and the
two results meet in `lax.cond`. An outcome that raises is a check: it is lifted out of the program,
and raises at the caller when the condition holds.
"""

import math
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import torch

from tpuport.model import numbers, structure
from tpuport.model.locate import inside_try, port_error, user_frame, user_line
from tpuport.model.number_node import NumberNode
from tpuport.model.region import Body
from tpuport.model.tensor import TracedTensor, meta_of, wrap
from tpuport.model.trace import Trace, current
from tpuport.source.live import Site, site_of

_MAX_PATHS = 64


class Undecided(BaseException):
    """A traced value was asked for its truth on a path that has no decision for it yet."""

    def __init__(self, value: jax.Array, site: str) -> None:
        super().__init__(site)
        self.value, self.site = value, site


class Restart(BaseException):
    """Trace again from the start with more known.

    Which code to rewrite, which module calls to explore.

    `site` is the code object that ran and the place in it; None where rewriting cannot help.
    """

    def __init__(
        self,
        *,
        site: tuple[CodeType, Site] | None = None,
        explore: str | None = None,
        host_state: bool = False,
    ) -> None:
        super().__init__("trace again")
        self.site, self.explore, self.host_state = site, explore, host_state


@dataclass
class Plan:
    """What earlier attempts at this trace learned.

    `tried` are the lines (file, line) that the rules have been asked to rewrite, `explore` the
    module calls to run once for each outcome, `host_state` whether small state stays concrete,
    `host_args` the arguments whose values do, `numbers` the Python numbers on modules that became
    state.
    """

    tried: set[tuple[str, int, int | None]] = field(default_factory=set)
    explore: set[str] = field(default_factory=set)
    host_state: bool = False
    numbers: set[str] = field(default_factory=set)
    host_args: frozenset[int] = frozenset()
    widened: int = 0

    def widen(self, candidates: list[int]) -> bool:
        """Read one more argument's value while tracing: each alone, smallest first, then all.

        False when all was tried.
        """
        choices = [frozenset({i}) for i in candidates]
        if len(candidates) > 1:
            choices.append(frozenset(candidates))
        if self.widened >= len(choices):
            self.host_args = frozenset()
            return False
        self.host_args = choices[self.widened]
        self.widened += 1
        return True

    def learn(self, restart: Restart) -> None:
        """Add what a restart asks for."""
        if restart.explore is not None:
            self.explore.add(restart.explore)
        self.host_state = self.host_state or restart.host_state

    def ask_for_rewrite(self) -> None:
        """Request that the line running now be rewritten, the first time it is met.

        Raises:
            Restart: it has not been tried yet.
        """
        frame = user_frame()
        if frame is None:
            return
        site = site_of(frame)
        if (frame.f_code.co_filename, site.line, site.column) not in self.tried:
            raise Restart(site=(frame.f_code, site))


@dataclass(eq=False)
class Unit:
    """A module call (or the whole function) being explored path by path."""

    name: str
    path: tuple[bool, ...] = ()
    position: int = 0
    known: dict[tuple[bool, ...], bool] = field(default_factory=dict)
    runs: int = 0


class Explorer:
    """Decides what the truth of a traced value is, in one trace."""

    def __init__(self, trace: Trace, plan: Plan) -> None:
        self.trace, self.plan = trace, plan
        self.calls: list[str] = ["<function>"]
        self.units: list[Unit] = []
        self.branches: dict[str, str] = {}

    def decide(self, value: jax.Array) -> bool:
        """The outcome on the path being explored, else a request to explore or rewrite."""
        self.plan.ask_for_rewrite()
        if self.units:
            unit = self.units[-1]
            prefix = unit.path[: unit.position]
            if unit.position < len(unit.path):
                unit.position += 1
                return unit.path[unit.position - 1]
            if prefix in unit.known:
                return self._take(unit, unit.known[prefix])
            raise Undecided(value, user_line())
        raise Restart(explore=self.calls[-1])

    def _take(self, unit: Unit, outcome: bool) -> bool:
        unit.path = (*unit.path[: unit.position], outcome)
        unit.position += 1
        return outcome

    def run_module(self, name: str, thunk: Callable[[], Any], roots: list[Any]) -> Any:
        """Run a module call, exploring it if an earlier attempt found that it branches on traced
        values.
        """
        if name not in self.plan.explore or any(unit.name == name for unit in self.units):
            self.calls.append(name)
            try:
                return thunk()
            finally:
                self.calls.pop()
        self.calls.append(name)
        unit = Unit(name)
        self.units.append(unit)
        try:
            return self._explore(unit, thunk, Snapshot(roots), ())
        finally:
            self.units.remove(unit)
            self.calls.pop()

    def _explore(
        self, unit: Unit, thunk: Callable[[], Any], snapshot: "Snapshot", path: tuple[bool, ...]
    ) -> Any:
        keys = self.trace.keys
        count = keys.count if keys is not None else 0
        while True:
            unit.runs += 1
            if unit.runs > _MAX_PATHS * 4 or len(path) > 12:
                raise port_error(
                    f"{unit.name} branches on traced values along more than {_MAX_PATHS} paths",
                    code="TPU101",
                    remedy="use torch.where for the choice, or make the condition a Python value",
                )
            snapshot.restore()
            if keys is not None:
                keys.count = count
            unit.path, unit.position = path, 0
            self.units.append(self.units.pop(self.units.index(unit)))
            depth = len(self.calls)
            with self.trace.recording() as effects:
                try:
                    return thunk()
                except Undecided as undecided:
                    del self.calls[depth:]
                    if keys is not None:
                        keys.count = count
                    for storage, value, _ in effects.before.values():
                        storage.set(value)
                    pending = undecided
            prefix = tuple(unit.path[: unit.position])
            self.branches[pending.site] = f"both outcomes explored in {unit.name}"
            merged = merge(
                self.trace,
                pending.value,
                lambda: self._explore(unit, thunk, snapshot, (*prefix, True)),  # noqa: B023
                lambda: self._explore(unit, thunk, snapshot, (*prefix, False)),  # noqa: B023
                site=pending.site,
                snapshot=snapshot,
            )
            if isinstance(merged, _Forced):
                unit.known[prefix] = merged.outcome
                self.branches[pending.site] = "lifted check"
                continue
            return merged


class _Slots(MutableMapping[str, Any]):
    """The attributes that an object keeps in `__slots__`, as a dict over them."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __getitem__(self, name: str) -> Any:
        return structure.slots_of(self.owner)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self.owner, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self.owner, name)

    def __iter__(self) -> Iterator[str]:
        return iter(structure.slots_of(self.owner))

    def __len__(self) -> int:
        return len(structure.slots_of(self.owner))


class Snapshot:
    """The mutable Python state below some roots (module attributes, containers), to be put back
    before another path.
    """

    def __init__(self, roots: list[Any]) -> None:
        self.saved: list[tuple[Any, str, Any]] = []
        seen: set[int] = set()
        for root in roots:
            self._save(root, seen, 0)

    def _save(self, value: Any, seen: set[int], depth: int) -> None:
        if id(value) in seen or depth > 12 or isinstance(value, (torch.Tensor, type)):
            return
        if isinstance(value, structure.ATOMS):
            return
        seen.add(id(value))
        if isinstance(value, dict):
            self.saved.append((value, "dict", dict(value)))
            children = list(value.values())
        elif isinstance(value, list):
            self.saved.append((value, "list", list(value)))
            children = list(value)
        elif isinstance(value, set):
            self.saved.append((value, "set", set(value)))
            children = []
        elif isinstance(value, (tuple, frozenset)):
            children = list(value)
        else:
            children = []
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and not isinstance(value, type):
            self.saved.append((attributes, "dict", dict(attributes)))
            children += list(attributes.values())
        slots = structure.slots_of(value)
        if slots:
            self.saved.append((_Slots(value), "dict", slots))
            children += list(slots.values())
        for child in children:
            self._save(child, seen, depth + 1)

    def restore(self) -> None:
        """Put every container and attribute back."""
        for target, kind, content in self.saved:
            if kind == "list":
                if len(target) != len(content) or any(
                    a is not b for a, b in zip(target, content, strict=True)
                ):
                    target[:] = content
            elif kind == "set":
                if target != content:
                    target.clear()
                    target.update(content)
            elif len(target) != len(content) or any(
                target.get(k, self) is not v for k, v in content.items()
            ):
                for name in [k for k in target if k not in content]:
                    del target[name]
                for name, value in content.items():
                    target[name] = value

    def changes(self) -> list[Any]:
        """The current contents of what can be restored, for comparing two paths."""
        found: list[Any] = []
        for target, kind, content in self.saved:
            if kind == "dict":
                changed = {k: v for k, v in target.items() if content.get(k, self) is not v}
                found.append(changed | {("gone", k): None for k in content if k not in target})
            elif kind == "list":
                same = len(target) == len(content) and all(
                    a is b for a, b in zip(target, content, strict=True)
                )
                found.append(None if same else list(target))
            else:
                found.append(None if target == content else sorted(map(repr, target)))
        return found

    def apply(self, changes: list[Any]) -> None:
        """Put changes (from `changes`) in force."""
        for (target, kind, _), change in zip(self.saved, changes, strict=True):
            if not change:
                continue
            if kind == "dict":
                for name, value in change.items():
                    if isinstance(name, tuple) and name and name[0] == "gone":
                        target.pop(name[1], None)
                    else:
                        target[name] = value
            elif kind == "list":
                target[:] = change


@dataclass
class _Forced:
    """One side of a branch raises: the other one is the program."""

    outcome: bool


@dataclass
class _Side:
    result: Any = None
    error: Exception | None = None
    leaves: list[Any] = field(default_factory=list)
    spec: Any = None
    body: Body | None = None
    metas: list[Any] = field(default_factory=list)
    frozen: list[bool] = field(default_factory=list)


def merge(
    trace: Trace,
    test: jax.Array,
    then: Callable[[], Any],
    orelse: Callable[[], Any],
    *,
    site: str,
    snapshot: Snapshot | None = None,
) -> Any:
    """Both sides of a branch as one `lax.cond`.

    `_Forced` if one side raises (the condition becomes a check).

    Raises:
        PortError: the sides differ in structure, shape, dtype or Python values.
    """
    test = jnp.reshape(test, ()).astype(bool)
    keys = trace.keys
    count = keys.count if keys is not None else 0
    sides = _discover_sides(trace, (then, orelse), snapshot)
    forced = _lift_error(trace, test, sides, site)
    if forced is not None:
        return forced
    written = _written_union(sides)
    _check_sides(sides, site)

    def run(thunk: Callable[[], Any]) -> Callable[[], tuple[list[jax.Array], list[jax.Array]]]:
        def body() -> tuple[list[jax.Array], list[jax.Array]]:
            if snapshot is not None:
                snapshot.restore()
            if keys is not None:
                keys.count = count
            with trace.recording() as effects:
                result = _with_changes(thunk(), snapshot)
                leaves, _ = structure.flatten(result, leaf=_branch_leaf)
                values = [_leaf_value(v, t) for v, t in zip(leaves, sides[0].metas, strict=True)]
                after = [s.value for s in written]
            for storage, value, _ in effects.before.values():
                storage.value, storage.version = value, storage.version + 1
            return values, after

        return body

    values, after = jax.lax.cond(test, run(then), run(orelse))
    for storage, value in zip(written, after, strict=True):
        storage.set(value)
    return _rebuild_merged(trace, sides, values, snapshot)


def _discover_sides(
    trace: Trace, thunks: tuple[Callable[[], Any], ...], snapshot: Snapshot | None
) -> list[_Side]:
    keys = trace.keys
    count = keys.count if keys is not None else 0
    sides = []
    for thunk in thunks:
        if snapshot is not None:
            snapshot.restore()
        if keys is not None:
            keys.count = count
        sides.append(_discover(trace, thunk, snapshot))
    return sides


def _lift_error(trace: Trace, test: jax.Array, sides: list[_Side], site: str) -> "_Forced | None":
    """Make a check of the condition if one side raises: the other outcome is then the only one."""
    for side, other, outcome in ((sides[0], sides[1], False), (sides[1], sides[0], True)):
        if side.error is not None:
            if other.error is not None:
                raise side.error
            failed = test if outcome is False else jnp.logical_not(test)
            trace.check(failed, side.error, site)
            return _Forced(outcome)
    return None


def _branch_leaf(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, *numbers.SYMBOLIC)) or type(value) in (bool, int, float)


_KINDS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def _kind(meta: Any, other: Any = bool) -> type:
    """The Python type of a number that has one type or another by the side of a branch."""
    kinds = (_KINDS.get(meta, meta), _KINDS.get(other, other))
    return float if float in kinds else int if int in kinds else bool


def _with_changes(result: Any, snapshot: Snapshot | None) -> Any:
    return result if snapshot is None else (result, snapshot.changes())


def _discover(trace: Trace, thunk: Callable[[], Any], snapshot: Snapshot | None) -> _Side:
    """Run one side abstractly: its result, what it writes, or the exception it raises."""
    side = _Side()

    def run() -> int:
        with trace.recording() as effects:
            try:
                side.result = _with_changes(thunk(), snapshot)
                side.leaves, side.spec = structure.flatten(side.result, leaf=_branch_leaf)
                side.metas = [_leaf_meta(leaf) for leaf in side.leaves]
                side.frozen = [not isinstance(v, TracedTensor) or v._frozen for v in side.leaves]
            except Exception as error:  # the user's own error on this path: it becomes a check
                if isinstance(error, _OURS):
                    raise
                side.error = error
        side.body = Body(trace, thunk)
        side.body.written = list(effects.before.values())
        for storage, value, _ in side.body.written:
            storage.value, storage.version = value, storage.version + 1
        return 0

    errors, code = len(trace.checks), trace.error_code
    units = trace.explorer.units if trace.explorer is not None else []
    known = [(unit, dict(unit.known)) for unit in units]
    trace.error_code = None
    try:
        jax.eval_shape(run)
    finally:
        trace.error_code = code
        del trace.checks[errors:]
        # What was decided here registered no check: the real run must come to it again.
        for unit, before in known:
            unit.known = before
    return side


def _ours() -> tuple[type[BaseException], ...]:
    from tpuport.errors import TpuportError

    return (TpuportError,)


_OURS = _ours()


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


def _leaf_meta(leaf: Any) -> Any:
    return meta_of(leaf) if isinstance(leaf, torch.Tensor) else type(leaf)


def _leaf_value(leaf: Any, meta: Any) -> jax.Array:
    if isinstance(leaf, torch.Tensor):
        from tpuport.model.dispatch import value_of

        return value_of(leaf)
    value = numbers.node_value(leaf) if isinstance(leaf, numbers.SYMBOLIC) else jnp.asarray(leaf)
    return value if meta is None else value.astype(_NUMBER_DTYPES[_kind(meta)])


_NUMBER_DTYPES = {float: jnp.float32, int: jnp.int32, bool: jnp.bool_}


def _check_sides(sides: list[_Side], site: str) -> None:
    a, b = sides
    for leaf in (*a.leaves, *b.leaves):
        if isinstance(leaf, TracedTensor) and leaf._extents is not None:
            raise port_error(
                f"a branch on a traced value (at {site}) gives a tensor whose size depends on data",
                code="TPU203",
                remedy="reduce it to a static size inside the branch",
            )
    same = a.spec.key == b.spec.key and len(a.leaves) == len(b.leaves)
    if same:
        for index, (x, y) in enumerate(zip(a.metas, b.metas, strict=True)):
            if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
                same = same and x.shape == y.shape and x.dtype == y.dtype
            elif isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
                same = False
            else:
                a.metas[index] = b.metas[index] = _kind(x, y)
    if not same:
        raise port_error(
            f"the two outcomes of the branch at {site} differ in structure, shape, dtype or"
            " Python values:"
            f" {_outline(a)} against {_outline(b)}",
            code="TPU101",
            remedy=(
                "make both outcomes give tensors of one shape and dtype, or decide the branch by"
                " a Python value"
            ),
        )


def _outline(side: _Side) -> str:
    text = ", ".join(
        f"{str(m.dtype)[6:]}{list(m.shape)}" if isinstance(m, torch.Tensor) else m.__name__
        for m in side.metas[:4]
    )
    return f"({text}{', ...' if len(side.metas) > 4 else ''})"


def _rebuild_merged(
    trace: Trace, sides: list[_Side], values: list[jax.Array], snapshot: Snapshot | None
) -> Any:
    a, b = sides
    leaves: list[Any] = []
    for index, (value, meta) in enumerate(zip(values, a.metas, strict=True)):
        one, other = a.leaves[index], b.leaves[index]
        if isinstance(meta, torch.Tensor):
            frozen = a.frozen[index] and b.frozen[index]
            leaves.append(wrap(value, meta.dtype, trace=trace, frozen=frozen))
        elif type(one) is type(other) and type(one) in (bool, int, float) and one == other:
            leaves.append(one)
        else:
            leaves.append(numbers.number(value, meta))
    rebuilt = structure.rebuild(a.spec, leaves)
    if snapshot is None:
        return rebuilt
    result, changes = rebuilt
    snapshot.restore()
    snapshot.apply(changes)
    return result


# -- what rewritten code and tensors call ----------------------------------------------------------


def decide(value: jax.Array) -> bool:
    """The truth of a 0-d jax value: known, or by exploring.

    Raises:
        PortError: the value is traced and nothing can explore it here.
    """
    if not isinstance(value, jax.core.Tracer):
        return bool(value)
    trace = current()
    if trace is None or trace.explorer is None:
        raise port_error(
            "the truth of a traced value was asked for (if, while, assert, and, not)",
            code="TPU101",
            remedy="use torch.where for a choice between tensors, or decide by a Python value",
        )
    return trace.explorer.decide(value)


def raise_if(failed: jax.Array, error: Exception) -> None:
    """Fail as eager does where `failed`.

    As a lifted check, or as a branch where the user's code catches exceptions.
    """
    trace = current()
    assert trace is not None
    if inside_try():
        if decide(failed):
            raise error
        return
    trace.check(failed, error, user_line())


def concrete_number(value: jax.Array, kind: type) -> Any:
    """A Python number that must be known while tracing (a size, a range, an index of a list).

    Raises:
        PortError: it depends on the program's inputs.
    """
    if not isinstance(value, jax.core.Tracer):
        return kind(value)
    trace = current()
    if trace is not None and trace.explorer is not None:
        plan = trace.explorer.plan
        plan.ask_for_rewrite()
        if not plan.host_state:
            raise Restart(host_state=True)
    raise port_error(
        f"a Python {kind.__name__} was made of a value that depends on the program's inputs",
        code="TPU103",
        remedy=(
            "pass it as a Python number (it is then static), or keep it a tensor and use torch"
            " operations on it"
        ),
    )


def traced_cond(
    test: Any, then: Callable[..., Any], orelse: Callable[..., Any], operands: tuple[Any, ...]
) -> Any:
    """`then(*operands)` if the traced `test` holds, else `orelse(*operands)`, decided on the
    device.

    Args:
        test: a traced tensor with one element, or a traced number.
        then: called with the operands; may write to tensors, may raise.
        orelse: likewise.
        operands: any values.

    Returns:
        What the side that holds returns; both must agree in structure, shapes and dtypes.
    """
    trace = current()
    value = truth(test)
    if not isinstance(value, jax.core.Tracer) or trace is None:
        return then(*operands) if bool(value) else orelse(*operands)
    site = user_line()
    # A side may change a list or dict among its operands in place.
    snapshot = Snapshot([operands])
    merged = merge(
        trace,
        value,
        lambda: then(*operands),
        lambda: orelse(*operands),
        site=site,
        snapshot=snapshot,
    )
    if isinstance(merged, _Forced):
        if trace.explorer is not None:
            trace.explorer.branches[site] = "lifted check"
        return then(*operands) if merged.outcome else orelse(*operands)
    if trace.explorer is not None:
        trace.explorer.branches[site] = "lax.cond"
    return merged


def truth(test: Any) -> jax.Array:
    """The 0-d boolean jax value of a one-element tensor or traced number."""
    from tpuport.model.dispatch import value_of

    if isinstance(test, torch.Tensor):
        if test.numel() != 1:
            msg = (
                f"Boolean value of Tensor with {'no' if not test.numel() else 'more than one'}"
                " value"
            )
            msg += "" if not test.numel() else "s"
            raise RuntimeError(msg + " is ambiguous")
        value = value_of(test).reshape(())
    elif isinstance(test, numbers.SYMBOLIC):
        value = numbers.node_value(test)
    else:
        return jnp.asarray(bool(test))
    return value != 0


def traced_check(test: Any, make_error: Callable[[], BaseException | None]) -> None:
    """Lift `if test: raise make_error()` out of the program.

    The caller raises when the condition held.
    """
    trace = current()
    value = truth(test)
    if not isinstance(value, jax.core.Tracer) or trace is None:
        if bool(value):
            error = make_error()
            if error is not None:
                raise error
        return
    site = user_line()
    error = make_error()
    if trace.explorer is not None:
        trace.explorer.branches[site] = "lifted check"
    if error is not None:
        trace.check(value, error, site)


def traced_number(tensor: Any, kind: type) -> Any:
    """`float(t)`, `int(t)`, `bool(t)` of a traced tensor, as a traced Python number."""
    number = numbers.item(tensor) if isinstance(tensor, TracedTensor) else tensor
    if kind is float:
        return torch.sym_float(number)
    if kind is int:
        return torch.sym_int(number)
    node = number.node
    return numbers.number(node.value != 0, bool)


def traced_while(
    test: Callable[..., Any], body: Callable[..., Any], operands: tuple[Any, ...]
) -> Any:
    """`while test(*operands): operands = body(*operands)` on the device.

    Raises:
        PortError: an operand changes its shape, dtype or Python value in the body, or the body
            writes to other tensors.
    """
    trace = current()
    assert trace is not None
    leaves, spec = structure.flatten(operands, leaf=_branch_leaf)
    metas = [_leaf_meta(leaf) for leaf in leaves]

    def unflatten(values: Any) -> Any:
        made = [
            wrap(v, m.dtype, trace=trace)
            if isinstance(m, torch.Tensor)
            else numbers.number(v, _kind(m))
            for v, m in zip(values, metas, strict=True)
        ]
        return structure.rebuild(spec, made)

    def step(values: Any) -> Any:
        with trace.recording() as effects:
            out = body(*unflatten(values))
            found, out_spec = structure.flatten(tuple(out), leaf=_branch_leaf)
        if effects.before or out_spec.key != spec.key:
            raise port_error(
                "a while loop on a traced value writes to tensors or changes Python values"
                " that it does not carry",
                code="TPU104",
                remedy="loop a fixed number of times and select with torch.where",
            )
        return [_leaf_value(v, None).astype(i.dtype) for v, i in zip(found, values, strict=True)]

    initial = [_leaf_value(leaf, None) for leaf in leaves]
    final = jax.lax.while_loop(lambda v: truth(test(*unflatten(v))), step, initial)
    return unflatten(final)


def bound(number: Any) -> float:
    """The largest value that a traced number can have, or infinity."""
    node = getattr(number, "node", None)
    return node.high if isinstance(node, NumberNode) else math.inf
