"""Is a difference rounding? Eager PyTorch in float64, with the decisions that rounding has turned.

What eager PyTorch in float32 misses of its run in float64 is rounding, and a port may miss as much,
times a small factor. A number that rounding takes over a kink (the zero of a ReLU) or over another
one (the largest of a window) changes gradients by more than that, and by nothing that grows with
the error. So the decisions that are near enough are turned one by one; those that explain the
difference are turned together, and the port is compared with that run as with any other.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
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
    missed_elsewhere,
    numbers,
)
from tpuport.verify.kinks import FILE
from tpuport.verify.processes import DISTURBED, MORE_TIME, VerifiedScript, run

# So many open decisions are tried, the likeliest ones: each takes a run.
_MOST_OPEN = 12
# A run in float64, with all decisions noted, takes longer than the eager one, of which the time is
# known before there is any other.
_SLOWER = 1.5
_ROUNDS = 3
# A tensor smaller than this share of the largest one counts as if it were as large.
_SMALL = 1e-2
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

    Attributes:
        why_not: Why nothing can be said, if so.
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
    ) -> None:
        self._what, self._out, self._eager, self._ported = what, out, eager, ported
        self._limits, self._settings = limits, settings
        self._folders: list[Path] = []
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self._longest = _SLOWER * longest
        # What is turned in float64, and in eager PyTorch, so that they take the port's decisions.
        self._in_port: list[OpenDecision] = []
        self._in_eager: list[OpenDecision] = []
        self.why_not = ""

    @property
    def left(self) -> float:
        """Return the seconds that are left for runs."""
        return max(0.0, self._deadline - time.monotonic())

    def close(self) -> None:
        """Delete what the runs recorded and wrote."""
        for folder in self._folders:
            shutil.rmtree(folder)

    def of_numbers(self) -> ExplainedStage | None:
        """Compare the first step with eager PyTorch in float64; None if it differs all the same.

        What differs there by no more than eager PyTorch itself, times a small factor, agrees.
        """
        self.why_not = ""
        first = {"optimizers": len(self._eager.record["optimizers"])}
        both = self._two_runs(first, (), ())
        if both is None:
            return None
        plain, truth = both
        if not _same(self._eager, plain.recording):
            self.why_not = "eager PyTorch itself gives another result when it runs again"
            return None
        found = open_decisions(truth.calls, plain.calls)
        in_eager = [one for one in found if _falls_otherwise(one, plain.calls)]
        near = self._run(first, wide=True, turned=in_eager) if in_eager else truth
        limit = self._limits.numbers
        missed = None if near is None else numbers(near.recording, plain.recording, limit)

        def compare(reference: Recording) -> Stage:
            return numbers(reference, self._ported, limit, missed)

        def turned(decisions: Sequence[OpenDecision]) -> Recording | None:
            made = self._run(first, wide=True, turned=decisions)
            return None if made is None else made.recording

        explained = self._search(truth.recording, found, turned, compare, "gradient")
        if explained is not None:
            self._in_port = explained.turned
            self._in_eager = _either(in_eager, explained.turned)
        elif missed is not None and not self.why_not:
            most = missed_elsewhere(truth.recording, self._ported, missed)
            if most is not None:
                self.why_not = (
                    f"eager PyTorch is up to {most:.1e} from itself in float64, and the port is"
                    " not much further from that, though elsewhere"
                )
        return explained

    def of_behaviour(self) -> ExplainedStage | None:
        """Compare all steps with eager PyTorch whose decisions are the port's."""
        self.why_not = ""
        own = self._in_eager
        both = self._two_runs({}, own, self._in_port)
        if both is None:
            return None
        plain, truth = both
        disturbed = self._run({}, wide=False, turned=own, side=DISTURBED)
        rounded = [one.recording for one in (truth, disturbed) if one is not None]

        def compare(reference: Recording) -> Stage:
            return behaviour(reference, self._ported, self._limits.behaviour, *rounded)

        def turned(decisions: Sequence[OpenDecision]) -> Recording | None:
            made = self._run({}, wide=False, turned=_either(own, decisions))
            return None if made is None else made.recording

        known = {one.place for one in own}
        found = [d for d in open_decisions(plain.calls, truth.calls) if d.place not in known]
        return self._search(plain.recording, found, turned, compare, "end")

    def _two_runs(
        self,
        settings: dict[str, Any],
        in_plain: Sequence[OpenDecision],
        in_wide: Sequence[OpenDecision],
    ) -> tuple[WatchedRun, WatchedRun] | None:
        """Run eager PyTorch in its own dtypes and in float64; None if these cannot be compared."""
        plain = self._run(settings, wide=False, turned=in_plain)
        truth = None if plain is None else self._run(settings, wide=True, turned=in_wide)
        if plain is None or truth is None:
            self.why_not = self.why_not or "the script fails in float64"
            return None
        if [_form(call) for call in plain.calls] != [_form(call) for call in truth.calls]:
            self.why_not = "the script takes another way in float64"
            return None
        return plain, truth

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
        if self._longest * (len(found) + 1) > self.left:
            each = f"{len(found)} decisions one by one, {self._longest:.0f} seconds each"
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
        side: str = "",
    ) -> WatchedRun | None:
        if self._longest > self.left:
            late = f"its runs would take more than {self._seconds:.0f} seconds; {MORE_TIME}"
            self.why_not = self.why_not or late
            return None
        positions: dict[int, list[int]] = {}
        for one in turned:
            positions.setdefault(one.call, []).append(one.position)
        around = [*self._settings.get("around", ()), _WATCHED]
        wanted = {"around": around, "float64": wide, "turned": positions}
        wanted |= {"disturbed": side == DISTURBED}
        name = f"rounding-{len(self._folders)}"
        every = {**self._settings, **settings, **wanted}
        ended = run(self._what, name, self._out, every, seconds=self.left)
        self._longest = max(self._longest, ended.seconds) if self._folders else ended.seconds
        self._folders.append(ended.folder)
        if ended.status is None:
            over = f"a run of it was stopped as {self._seconds:.0f} seconds were over"
            self.why_not = f"{over}; {MORE_TIME}"
        if not ended.recorded:
            return None
        calls = json.loads((ended.folder / FILE).read_text())["calls"]
        return WatchedRun(Recording(ended.folder), calls)


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
        what = f"{mine['op'].removeprefix('aten.').partition('.')[0]}{mine['shape']}"
        found += [
            OpenDecision(number, position, side, abs(margin), far, what)
            for position, margin, side in mine["near"]
            if abs(margin) <= far
        ]
    return sorted(found)


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
