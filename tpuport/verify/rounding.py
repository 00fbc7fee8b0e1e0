"""Is a difference rounding? Eager PyTorch in float64, with the decisions that rounding has turned.

What eager PyTorch in float32 misses of its run in float64 is rounding, and a port may miss as much,
times a small factor. A number that rounding takes over a kink (the zero of a ReLU) or over another
one (the largest of a window) changes gradients by more than that, and by nothing that grows with
the error. So the decisions of which the port's programs tell that they fall the other way there
are taken as they are there. Of the others, those that are near enough are turned one by one; those
that explain the difference are turned together, and the port is compared with that run as with any
other.
"""

import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tpuport.model.parity.decisions import reach
from tpuport.verify.compare import (
    Limits,
    Recording,
    Stage,
    Tensors,
    behaviour,
    gradient_noise,
    interface,
    missed_elsewhere,
    numbers,
)
from tpuport.verify.kinks import calls_in
from tpuport.verify.processes import DISTURBED, MORE_TIME, VerifiedScript, run

# So many open decisions are tried, the likeliest ones: each takes a run.
_MOST_OPEN = 12
# A run in float64, with all decisions noted, takes longer than the eager one, of which the time is
# known before there is any other.
_SLOWER = 1.5
_ROUNDS = 3
# A tensor smaller than this share of the largest one counts as if it were as large.
_SMALL = 1e-2
_FAILS = "the script fails in float64"
_WATCHED = "tpuport.verify.kinks:watched"


@dataclass(frozen=True, order=True)
class OpenDecision:
    """An open decision.

    Attributes:
        call: The number of the call of an op that decides.
        position: Which decision of the call.
        side: How it falls in the run that it is of.
        margin: How near it is.
        reach: How far rounding may take the number.
        what: The op and the shape of what it decides on.
    """

    call: int
    position: int
    side: int
    margin: float
    reach: float
    what: str

    @property
    def place(self) -> tuple[int, int]:
        """Return which decision of the script it is, however it falls."""
        return self.call, self.position

    def __str__(self) -> str:
        return f"element {self.position} of {self.what}, {self.margin:.0e} away"


@dataclass(frozen=True)
class WatchedRun:
    """What a run recorded, and its decisions."""

    recording: Recording
    calls: list[dict[str, Any]]
    folder: Path

    @property
    def told(self) -> set[tuple[int, int]]:
        """Return the decisions of which the port's programs tell how they fall there."""
        calls = enumerate(self.calls)
        return {(number, place) for number, call in calls for place in call.get("told", ())}

    @property
    def taken(self) -> list[OpenDecision]:
        """Return those of them that were turned."""
        return [
            OpenDecision(number, position, side, abs(margin), call["reach"], _what(call))
            for number, call in enumerate(self.calls)
            for position, margin, side in call.get("taken", ())
        ]


@dataclass(frozen=True)
class PortTaken:
    """That a run is to take the port's decisions.

    Attributes:
        exact: A run in float64, which shows what rounding explains.
        near: The run that tells how far rounding reaches; None if that is to be found.
    """

    exact: WatchedRun
    near: WatchedRun | None = None


@dataclass
class ExplainedStage:
    """A stage that passes, and the decisions that rounding turned in the port."""

    stage: Stage
    turned: list[OpenDecision] = field(default_factory=list)


class Rounding:
    """Looks whether rounding explains how a port differs from eager PyTorch.

    Args:
        what: The script.
        out: The folder for the results.
        eager: What eager PyTorch recorded.
        ported: What the port recorded.
        limits: The largest differences that pass.
        settings: Of all runs.
        seconds: What all runs together may take, so that there is a verdict in time.
        longest: What the longest run took so far.
        kept: The folder with what the port's programs kept, if they are known.

    Attributes:
        why_not: Why nothing can be said, if so.
        beside: What differs in the first step from eager PyTorch that takes the decisions of the
            port's programs, if it does.
    """

    def __init__(
        self,
        what: VerifiedScript,
        out: Path,
        eager: Recording,
        ported: Recording,
        limits: Limits,
        settings: dict[str, Any],
        *,
        seconds: float,
        longest: float,
        kept: Path | None = None,
    ) -> None:
        self._what, self._out, self._eager, self._ported = what, out, eager, ported
        self._limits, self._settings = limits, settings
        self._folders: list[Path] = []
        self._kept = kept
        # How the first step takes what the port's programs tell, if they do.
        self._first: PortTaken | None = None
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        # By whether it is in float64, the longest run.
        self._took = dict.fromkeys((False, True), _SLOWER * longest)
        self._known: set[bool] = set()
        # What is turned in float64, and in eager PyTorch, so that they take the port's decisions.
        self._in_port: list[OpenDecision] = []
        self._in_eager: list[OpenDecision] = []
        self.why_not = ""
        self.beside: ExplainedStage | None = None

    @property
    def left(self) -> float:
        """Return the seconds that are left for runs."""
        return max(0.0, self._deadline - time.monotonic())

    def close(self) -> None:
        """Delete what the runs recorded and wrote."""
        for folder in self._folders:
            shutil.rmtree(folder)

    @property
    def _first_step(self) -> dict[str, Any]:
        return {"optimizers": len(self._eager.record["optimizers"])}

    @cached_property
    def _first_exact(self) -> WatchedRun | None:
        """The first step in float64."""
        return self._run(self._first_step, wide=True)

    def of_starts(self) -> Stage | None:
        """Compare the start with what rounding makes of it; None if there is no run in float64."""
        exact = self._first_exact
        if exact is None:
            return None
        return interface(self._eager, self._ported, self._limits.numbers, exact.recording)

    def of_numbers(self) -> ExplainedStage | None:
        """Compare the first step with eager PyTorch in float64; None if it differs all the same.

        What differs there by no more than eager PyTorch itself, times a small factor, agrees.
        """
        self.why_not = ""
        first, exact = self._first_step, self._first_exact
        takes = None if self._kept is None or exact is None else PortTaken(exact)
        plain = None if exact is None else self._run(first, wide=False, takes=takes)
        if exact is None or plain is None:
            self.why_not = self.why_not or _FAILS
            return None
        if not self._is_same_way(plain, exact):
            return None
        limit, taken = self._limits.numbers, plain.taken
        self._first = PortTaken(exact, plain) if plain.told else None
        if taken:
            stage = numbers(plain.recording, self._ported, limit)
            if stage.passed:
                return ExplainedStage(stage, taken)
            self.beside = ExplainedStage(stage, taken)
        elif not self._is_repeated(plain):
            return None
        explained = self._of_numbers(first, exact, plain)
        if explained is not None:
            explained.turned[:0] = taken
        elif taken:
            again = self._run(first, wide=False)
            if again is not None and not self._is_repeated(again):
                return None
        return explained

    def _is_repeated(self, plain: WatchedRun) -> bool:
        """Return whether a run gives what eager PyTorch gave."""
        if _same(self._eager, plain.recording):
            return True
        self.why_not = "eager PyTorch itself gives another result when it runs again"
        return False

    def _of_numbers(
        self, first: dict[str, Any], exact: WatchedRun, plain: WatchedRun
    ) -> ExplainedStage | None:
        """Compare the first step with runs in float64 that take the port's decisions, too."""
        takes = self._first
        truth = exact if takes is None else self._run(first, wide=True, takes=takes)
        if truth is None or not self._is_same_way(plain, truth):
            return None
        found = _untold(truth, plain)
        in_eager = [one for one in found if _falls_otherwise(one, plain.calls)]
        near = truth
        if in_eager:
            near = self._run(first, wide=True, turned=in_eager, takes=takes)
        limit = self._limits.numbers
        missed = None if near is None else numbers(near.recording, plain.recording, limit)

        def compare(reference: Recording) -> Stage:
            return numbers(reference, self._ported, limit, missed)

        def turned(decisions: Sequence[OpenDecision]) -> Recording | None:
            made = self._run(first, wide=True, turned=decisions, takes=takes)
            return None if made is None else made.recording

        explained = self._search(truth.recording, found, turned, compare, "gradient")
        if explained is not None:
            self._in_port = list(explained.turned)
            self._in_eager = _either(in_eager, explained.turned)
        elif missed is not None and not self.why_not:
            most = missed_elsewhere(truth.recording, self._ported, missed)
            if most is not None:
                self.why_not = (
                    f"eager PyTorch is up to {most:.1e} from itself in float64, and the port is"
                    " not much further from that, though elsewhere"
                )
        return explained

    def disturbed(self, what: VerifiedScript, settings: dict[str, Any] | None) -> Stage | None:
        """Compare behaviour with a run with rounding added; None if that does not end.

        Adam makes steps of full size of gradients that are zero but for rounding.
        """
        again = run(what, DISTURBED, self._out, (settings or {}) | self._noise(), seconds=self.left)
        if again.recorded:
            return self._behaviour(self._eager, [Recording(again.folder)])
        ended = "failed" if again.status is not None else f"was stopped; {MORE_TIME}"
        self.why_not = f"eager PyTorch with rounding added {ended}"
        return None

    def of_behaviour(self) -> ExplainedStage | None:
        """Compare all steps with eager PyTorch whose decisions are the port's."""
        self.why_not = ""
        plain = self._run({}, wide=False, turned=self._in_eager, takes=self._first)
        if plain is None:
            return None
        disturbed = self._disturbed(self._first)
        if disturbed:
            # The decisions of the first step may be all.
            stage = self._behaviour(plain.recording, disturbed)
            if stage.passed:
                return ExplainedStage(stage)
        both = self._all_steps(plain)
        if both is None:
            self.why_not = self.why_not or _FAILS
            return None
        plain, truth = both
        takes = PortTaken(truth, plain) if plain.told else None
        if takes is not None:
            disturbed = self._disturbed(takes)
            stage = self._behaviour(plain.recording, disturbed)
            if stage.passed:
                return ExplainedStage(stage, self._later(plain))
            # It took those of the first step only, and is further away than by rounding alone.
            made = self._run({}, wide=True, turned=self._in_port, takes=takes)
            if made is None or not self._is_same_way(plain, made):
                return None
            truth = made
        rounded = [truth.recording, *disturbed]

        def turned(decisions: Sequence[OpenDecision]) -> Recording | None:
            every = _either(self._in_eager, decisions)
            made = self._run({}, wide=False, turned=every, takes=takes)
            return None if made is None else made.recording

        known = {one.place for one in self._in_eager}
        found = [one for one in _untold(plain, truth) if one.place not in known]
        explained = self._search(
            *(plain.recording, found, turned),
            lambda reference: self._behaviour(reference, rounded),
            "end",
        )
        if explained is not None:
            explained.turned[:0] = self._later(plain)
        return explained

    def _behaviour(self, reference: Recording, rounded: Sequence[Recording]) -> Stage:
        return behaviour(reference, self._ported, self._limits.behaviour, *rounded)

    def _disturbed(self, takes: PortTaken | None) -> list[Recording]:
        """Run all steps with rounding added to the gradients; nothing if that does not end."""
        settings = {"turned": self._in_eager, "takes": takes, "side": DISTURBED}
        made = self._run(self._noise(), wide=False, **settings)
        return [] if made is None else [made.recording]

    def _noise(self) -> dict[str, Any]:
        """Return the setting of a run that says what is added to its gradients."""
        return {"noise": gradient_noise(self._eager, self._ported, self._limits.numbers)}

    def _later(self, plain: WatchedRun) -> list[OpenDecision]:
        """Return the decisions of later steps that a run takes as the port's programs tell."""
        near = None if self._first is None else self._first.near
        before = set() if near is None else near.told
        return [one for one in plain.taken if one.place not in before]

    def _all_steps(self, plain: WatchedRun) -> tuple[WatchedRun, WatchedRun] | None:
        """Run all steps in its own dtypes with what the port's programs tell, and in float64.

        Args:
            plain: Eager PyTorch that takes what they tell of the first step.
        """
        truth = self._run({}, wide=True, turned=self._in_port, takes=self._first)
        if truth is not None and self._kept is not None:
            near = self._run({}, wide=False, turned=self._in_eager, takes=PortTaken(truth))
            if near is None:
                return None
            plain = near
        return None if truth is None or not self._is_same_way(plain, truth) else (plain, truth)

    def _is_same_way(self, plain: WatchedRun, truth: WatchedRun) -> bool:
        """Return whether eager PyTorch in float64 makes the same calls."""
        if [_form(call) for call in plain.calls] == [_form(call) for call in truth.calls]:
            return True
        self.why_not = "the script takes another way in float64"
        return False

    def _search(
        self,
        base: Recording,
        found: Sequence[OpenDecision],
        turned: Callable[[Sequence[OpenDecision]], Recording | None],
        compare: Callable[[Recording], Stage],
        kind: str,
    ) -> ExplainedStage | None:
        """Find the decisions that the port takes another way than a run.

        Args:
            base: What the run recorded.
            found: The open decisions.
            turned: Makes the run with decisions turned.
            compare: Compares the port with a run.
            kind: The tensors that show what a turned decision does.
        """
        stage = compare(base)
        if stage.passed:
            return ExplainedStage(stage)
        if not found:
            return None
        open_ones = len(found)
        found = sorted(sorted(found, key=lambda one: one.margin / one.reach)[:_MOST_OPEN])
        longest = self._took[kind == "gradient"]  # which is compared in float64
        if longest * (len(found) + 1) > self.left:
            each = f"{len(found)} decisions one by one, {longest:.0f} seconds each"
            self.why_not = (
                f"to turn {each}, would take longer than the {self.left:.0f} left; {MORE_TIME}"
            )
            return None
        sizes = _sizes(base.part(kind), self._ported.part(kind))
        moves = [
            torch.zeros(0) if made is None else _apart(base, made, sizes, kind)
            for made in (turned([one]) for one in found)
        ]
        rest = _apart(base, self._ported, sizes, kind)
        largest = max(float(move.norm()) for move in moves)
        explained = self._turned_together(base, found, turned, compare, (sizes, kind, moves))
        if explained is None and open_ones > len(found) and rest.norm() <= open_ones * largest:
            self.why_not = self.why_not or (
                f"{open_ones} decisions are open to it, of which the {len(found)} likeliest were"
                " turned; all of them could do as much"
            )
        return explained

    def _turned_together(
        self,
        base: Recording,
        found: Sequence[OpenDecision],
        turned: Callable[[Sequence[OpenDecision]], Recording | None],
        compare: Callable[[Recording], Stage],
        known: tuple[dict[str, float], str, Sequence[torch.Tensor]],
    ) -> ExplainedStage | None:
        """Turn those decisions together whose moves are in what the port and a run differ by."""
        sizes, kind, moves = known
        chosen: set[int] = set()
        reference = base
        for _ in range(_ROUNDS):
            shares = _shares(_apart(reference, self._ported, sizes, kind), moves)
            on = {i for i, share in enumerate(shares) if share > 0.5}
            off = {i for i, share in enumerate(shares) if share < -0.5}
            if chosen == (chosen := (chosen | on) - off):
                return None
            taken = [found[i] for i in sorted(chosen)]
            made = turned(taken)
            if made is None:
                return None
            reference, stage = made, compare(made)
            if stage.passed:
                return ExplainedStage(stage, taken)
        return None

    def _run(
        self,
        settings: dict[str, Any],
        *,
        wide: bool,
        turned: Iterable[OpenDecision] = (),
        takes: PortTaken | None = None,
        side: str = "",
    ) -> WatchedRun | None:
        if self._took[wide] > self.left:
            late = f"its runs would take more than {self._seconds:.0f} seconds; {MORE_TIME}"
            self.why_not = self.why_not or late
            return None
        positions: dict[int, list[int]] = {}
        for one in turned:
            positions.setdefault(one.call, []).append(one.position)
        around = [*self._settings.get("around", ()), _WATCHED]
        wanted = {"around": around, "float64": wide, "turned": positions}
        wanted |= {"disturbed": side == DISTURBED, "taken": self._folders_of(takes)}
        name = f"rounding-{len(self._folders)}"
        every = {**self._settings, **settings, **wanted}
        ended = run(self._what, name, self._out, every, seconds=self.left)
        before = self._took[wide] if wide in self._known else 0.0
        self._took[wide] = max(before, ended.seconds)
        self._known.add(wide)
        self._folders.append(ended.folder)
        if ended.status is None:
            over = f"a run of it was stopped as {self._seconds:.0f} seconds were over"
            self.why_not = f"{over}; {MORE_TIME}"
        if not ended.recorded:
            return None
        return WatchedRun(Recording(ended.folder), calls_in(ended.folder), ended.folder)

    def _folders_of(self, takes: PortTaken | None) -> dict[str, str | None] | None:
        """Return where a run finds the port's decisions, and what rounding explains."""
        if self._kept is None:
            return None
        exact = None if takes is None else str(takes.exact.folder)
        near = None if takes is None or takes.near is None else str(takes.near.folder)
        return {"kept": str(self._kept), "exact": exact, "near": near}


def open_decisions(
    calls: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]
) -> list[OpenDecision]:
    """Return the decisions that rounding can turn, in the order in which they are taken.

    Args:
        calls: The calls of a run, of which the decisions are.
        other: The same calls in another arithmetic, which shows how far rounding moves numbers.
    """
    found = []
    for number, (mine, theirs) in enumerate(zip(calls, other, strict=True)):
        far = reach(torch.tensor(mine["samples"]), torch.tensor(theirs["samples"]))
        found += [
            OpenDecision(number, position, side, abs(margin), far, _what(mine))
            for position, margin, side in mine["near"]
            if abs(margin) <= far
        ]
    return sorted(found)


def _untold(one: WatchedRun, other: WatchedRun) -> list[OpenDecision]:
    """Return the open decisions of a run of which the port's programs tell nothing."""
    told = one.told | other.told
    return [d for d in open_decisions(one.calls, other.calls) if d.place not in told]


def _what(call: dict[str, Any]) -> str:
    return f"{call['op'].removeprefix('aten.').partition('.')[0]}{call['shape']}"


def _form(call: dict[str, Any]) -> Any:
    return call["op"], call["shape"]


def _falls_otherwise(one: OpenDecision, calls: Sequence[dict[str, Any]]) -> bool:
    """Return whether a run takes a decision another way than the run that it is of."""
    near = calls[one.call]["near"]
    return any(position == one.position and side != one.side for position, _, side in near)


def _either(some: Sequence[OpenDecision], others: Sequence[OpenDecision]) -> list[OpenDecision]:
    """Return the decisions that are in one of two lists, and not in both."""
    mine, theirs = ({one.place: one for one in each} for each in (some, others))
    return sorted(
        [one for place, one in mine.items() if place not in theirs]
        + [one for place, one in theirs.items() if place not in mine]
    )


def _same(one: Recording, other: Recording) -> bool:
    """Return whether two runs have the same first gradients, to the last bit."""
    mine, theirs = one.part("gradient"), other.part("gradient")
    return mine.keys() == theirs.keys() and all(
        torch.equal(mine[name].nan_to_num(), theirs[name].nan_to_num()) for name in mine
    )


def _sizes(mine: Tensors, theirs: Tensors) -> dict[str, float]:
    """Return by name the size of tensors that two runs have."""
    found = {
        name: float(tensor.double().abs().nan_to_num(0.0, 0.0, 0.0).max())
        for name, tensor in mine.items()
        if tensor.numel() and name in theirs and theirs[name].shape == tensor.shape
    }
    at_least = _SMALL * max(found.values(), default=0.0)
    return {name: max(size, at_least) for name, size in found.items() if size or at_least}


def _apart(one: Recording, other: Recording, sizes: dict[str, float], kind: str) -> torch.Tensor:
    """Return the difference of all tensors of a kind, each relative to its size."""
    mine, theirs = one.part(kind), other.part(kind)
    parts = [(theirs[n].double() - mine[n].double()).reshape(-1) / s for n, s in sizes.items()]
    return torch.cat(parts).nan_to_num(0.0, 0.0, 0.0)


def _shares(rest: torch.Tensor, moves: Sequence[torch.Tensor]) -> list[float]:
    """Return how much of each move is in a difference: the least squares."""
    known = [i for i, move in enumerate(moves) if move.numel() and bool(move.any())]
    found = [0.0] * len(moves)
    if known:
        columns = torch.stack([moves[i] for i in known], 1)
        products = columns.T @ columns
        solved = torch.linalg.lstsq(products, columns.T @ rest[:, None], driver="gelsd").solution
        for i, share in zip(known, solved[:, 0].tolist(), strict=True):
            found[i] = share
    return found
