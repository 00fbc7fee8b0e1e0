"""Branches that no rule could rewrite, explored at the innermost module call.

The call is run once for each outcome of the traced value that it branches on, and `lax.cond` merges
the two results.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.foundation.errors import PortError
from tpuport.foundation.pytree.snapshot import Snapshot
from tpuport.foundation.user_frames import user_line
from tpuport.tracing.control_flow.merge import Forced, merge, shared_write
from tpuport.tracing.control_flow.same_value import recipe
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.errors import inside_try, port_error
from tpuport.tracing.core.loop_sites import ask_for, branching_loops
from tpuport.tracing.core.raising import raising_outcome
from tpuport.tracing.core.speculation import RestartTrace, SpeculationLog, UndecidedBranch
from tpuport.tracing.core.transforms import transforming

_MAX_RUNS, MAX_BRANCHES = 256, 12
# A line that branched so often may be in a loop.
_MANY_AT_ONE_LINE = 6


@dataclass(frozen=True)
class _OnlyOutcome:
    """A branch of which one outcome is left, because the other raises `error`."""

    outcome: bool
    error: Exception
    site: str


@dataclass(eq=False)
class Unit:
    """A module call (or the ported function) being explored path by path."""

    name: str
    path: tuple[bool, ...] = ()
    position: int = 0
    known: dict[tuple[bool, ...], _OnlyOutcome] = field(default_factory=dict)
    runs: int = 0
    # How often each line branched.
    sites: Counter[str] = field(default_factory=Counter)
    # The branch that ended this run. The user's code may have caught it, by a bare `except` or by
    # a `finally` that returns or raises.
    undecided: UndecidedBranch | None = None
    # The numbers that were chosen in this run, by the id of their value.
    numbers: dict[int, tuple[jax.Array, int]] = field(default_factory=dict)
    # The outcomes of the tests on this run's path, by how they are computed.
    outcomes: dict[Hashable, bool] = field(default_factory=dict)
    # Torch's grad mode when the call began, and when its paths ended.
    grad: bool = field(default_factory=torch.is_grad_enabled)
    ends: set[bool] = field(default_factory=set)

    def branches(self, path: tuple[bool, ...]) -> int:
        """Return how many branches on a path are none of which one side raises."""
        return sum(path[:count] not in self.known for count in range(len(path)))

    def end(self, site: str) -> None:
        """Note that a path has ended.

        Raises:
            PortError: it leaves another grad mode than another path.
        """
        self.ends.add(torch.is_grad_enabled())
        if len(self.ends) > 1:
            raise port_error(
                "a branch on a traced value decides whether gradients are enabled after this call"
                " (torch.set_grad_enabled)",
                code="TPU101",
                place=site,
                remedy="use `with torch.no_grad():` inside the branch",
            )


class Explorer:
    """The explorer of branches on traced values, in one trace."""

    def __init__(self, trace: Trace, plan: SpeculationLog) -> None:
        self.trace, self.plan = trace, plan
        # Whether what runs was called by jax, when the trace of the user's call had ended.
        self.alone = isinstance(plan, _Alone)
        self.calls: list[str] = ["<function>"]
        self.units: list[Unit] = []
        # The number of units that began outside the jax primitive whose body is running. A tracer
        # of the body must not leave it, so those units cannot explore its branches.
        self.outside = 0
        self.branches: dict[str, str] = {}
        # The outcome for which a line has raised.
        self.raising: dict[str, bool] = {}
        # The lines of the rewritten loops whose rounds run one by one now.
        self.unrolled: list[str] = []

    def decide(self, value: jax.Array) -> bool:
        """Return the outcome on the path being explored, unless the line can be rewritten."""
        self.plan.ask_for_rewrite()
        return self.explore(value)

    def explore(self, value: jax.Array) -> bool:
        """Return the outcome on the path being explored; if there is none, ask for a new trace."""
        if len(self.units) > self.outside:
            unit = self.units[-1]
            if unit.undecided is not None:
                raise unit.undecided
            test, truth = recipe(value)
            if test not in unit.outcomes:
                unit.outcomes[test] = self._outcome(unit, value) == truth
            return unit.outcomes[test] == truth
        raise RestartTrace(explore=self._innermost())

    def _outcome(self, unit: Unit, value: jax.Array) -> bool:
        """Return the outcome of a test that was not made before on this path."""
        known = unit.known.get(unit.path[: unit.position])
        if known is not None:  # here, so that what raises before this line comes first
            test = jnp.reshape(value, ()).astype(bool)
            failed = ~test if known.outcome else test
            self.trace.check(failed, known.error, known.site)
        if unit.position < len(unit.path):
            unit.position += 1
            return unit.path[unit.position - 1]
        if known is not None:
            return self._take(unit, known.outcome)
        site = user_line()
        loops = branching_loops()
        is_last = unit.branches(unit.path) >= MAX_BRANCHES - 1
        if unit.sites[site] >= _MANY_AT_ONE_LINE or is_last:
            ask_for(loops, self.unrolled)
        first = self.raising.get(site, raising_outcome() is not False)
        unit.undecided = UndecidedBranch(value, site, loops, [*self.unrolled], first)
        raise unit.undecided

    def choose(self, value: jax.Array, low: int, high: int) -> int:
        """Return a traced number on the path being explored; there is one for each number."""
        known = self.units[-1].numbers.get(id(value)) if self.units else None
        if known is not None:
            return known[1]
        first, last = low, high
        while first < last:
            middle = (first + last) // 2
            first, last = (first, middle) if self.explore(value <= middle) else (middle + 1, last)
        if self.units:
            self.units[-1].numbers[id(value)] = (value, first)
        return first

    def _innermost(self) -> str:
        """Return the innermost call that is explored by itself."""
        return next(name for name in reversed(self.calls) if name not in self.plan.within)

    def _take(self, unit: Unit, outcome: bool) -> bool:
        unit.path = (*unit.path[: unit.position], outcome)
        unit.position += 1
        return outcome

    def run_module(self, name: str, thunk: Callable[[], Any], roots: list[Any]) -> Any:
        """Run a module call, explored if an earlier attempt saw it branch on traced values."""
        if len(self.calls) == 1:
            self.trace.shared.arguments = tuple(roots[1:])
        if transforming():
            # Merged results would have no tangents, so a call around it is explored.
            return thunk()
        explored = name in self.plan.explore and name not in self.plan.within
        if not explored or any(unit.name == name for unit in self.units[self.outside :]):
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

    def run_inside(self, kind: str, thunk: Callable[[], Any], roots: list[Any]) -> Any:
        """Run the body of a jax primitive, whose branches have to be explored inside it."""
        depth = sum(name.startswith(f"<{kind}") for name in self.calls)
        before, self.outside = self.outside, len(self.units)
        try:
            return self.run_module(f"<{kind} {depth}>", thunk, roots)
        finally:
            self.outside = before

    def _explore(
        self, unit: Unit, thunk: Callable[[], Any], snapshot: Snapshot, path: tuple[bool, ...]
    ) -> Any:
        draws = self.trace.draws
        while True:
            unit.runs += 1
            if unit.runs > _MAX_RUNS or unit.branches(path) > MAX_BRANCHES:
                raise _too_many_paths(unit)
            snapshot.restore()
            torch.set_grad_enabled(unit.grad)
            self.trace.draws = draws
            unit.path, unit.position = path, 0
            unit.numbers.clear()
            unit.outcomes.clear()
            self.units.append(self.units.pop(self.units.index(unit)))
            depth, refusal = len(self.calls), self.trace.recorder.refusal
            unit.undecided = None
            with self.trace.recording(repeats=True) as effects:
                try:
                    result = thunk()
                except (Exception, UndecidedBranch):
                    if unit.undecided is None:
                        raise
                    result = None
                pending = unit.undecided
                if pending is None:
                    unit.end(next(reversed(unit.sites), user_line()))
                    return result
                unit.undecided = None
                del self.calls[depth:]
                self.trace.draws, self.trace.recorder.refusal = draws, refusal
                effects.undo()
            prefix, site = tuple(unit.path[: unit.position]), pending.site
            unit.sites[site] += 1
            self.branches[site] = f"both outcomes explored in {unit.name}"
            merged = merge(
                self.trace,
                pending.value,
                lambda: self._explore(unit, thunk, snapshot, (*prefix, True)),  # noqa: B023
                lambda: self._explore(unit, thunk, snapshot, (*prefix, False)),  # noqa: B023
                site=pending.site,
                apart=lambda: self._apart(unit, site),  # noqa: B023
                snapshot=snapshot,
                first=pending.first,
                unlike=partial(ask_for, pending.loops, pending.unrolled),
            )
            if isinstance(merged, Forced):
                self._refuse_caught(unit, merged.error, site)
                unit.known[prefix] = _OnlyOutcome(merged.outcome, merged.error, site)
                self.raising[site] = not merged.outcome
                self.branches[site] = "lifted check"
                continue
            return merged

    def _apart(self, unit: Unit, site: str) -> BaseException:
        """Return what to raise where a write after a call depends on which tensor it returned."""
        if unit.name.startswith("<"):
            return shared_write(site)
        return RestartTrace(within=unit.name)

    def _refuse_caught(self, unit: Unit, error: Exception, site: str) -> None:
        """Refuse to check for an error that leaves a call and that a `try` around it catches.

        The branch belongs to the call that the `try` is in.
        """
        caught = inside_try(error)
        if caught is None:
            return
        if not unit.name.startswith("<"):
            raise RestartTrace(within=unit.name)
        raise port_error(
            "the error that this line raises for some values leaves a part of the program that"
            f" is compiled by itself ({unit.name[1:-1]}), and the `try` at {caught} around it"
            " catches the error",
            code="TPU104",
            place=site,
            remedy="move the `try` into that part, or choose by a condition with torch.where",
        )


class _Alone(SpeculationLog):
    """What is known of code that no later attempt runs again: its lines stay as they are."""

    def ask_for_rewrite(self, *args: Any, **kwargs: Any) -> None:
        """Explore the branch instead."""


def explored_alone(trace: Trace, name: str, thunk: Callable[[], Any], roots: list[Any]) -> Any:
    """Run code once for each outcome of its branches, in a trace that has no explorer.

    Raises:
        RestartTrace: something has to be known before its first line runs.
    """
    trace.explorer = Explorer(trace, _Alone(explore={name}))
    return trace.explorer.run_module(name, thunk, roots)


def _too_many_paths(unit: Unit) -> PortError:
    """Return the error for a call with too many paths, at the line that branched most often."""
    return port_error(
        f"{unit.name} branches on traced values along too many paths (more than"
        f" {MAX_BRANCHES} branches on one, or more than {_MAX_RUNS} runs), most often here",
        code="TPU101",
        remedy=(
            "use torch.where for the choice, or make the condition a Python value; if the line is"
            " not yours, look for an option of its library that takes a fixed number of steps, or"
            " leave the class to eager PyTorch: `tpuport run --eager NAME`"
        ),
        place=unit.sites.most_common(1)[0][0],
    )
