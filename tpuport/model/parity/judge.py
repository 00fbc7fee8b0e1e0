"""The judgement of values beyond the tolerance: is it rounding, or a difference?

Eager PyTorch in float64 is the truth. What eager PyTorch in float32 misses of it is rounding, and
the port may miss as much, times a small factor. One float32 result may be near the truth by luck,
so runs in float64 with rounding errors put in show how far another one could be. Decisions that
rounding has turned in the port are taken as the port did, where they are known. With larger errors
more decisions fall the other way (the sign that a ReLU sees, the largest of a window), of which any
float32 result has a few: the change that they make does not grow with the errors.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tpuport.model.parity.call import Call
from tpuport.model.parity.float64 import Float64
from tpuport.model.parity.same_numbers import SameNumbers
from tpuport.model.parity.structure import Pair, as_tensor, pairs
from tpuport.model.parity.turned import CallSamples, KeptArrays, Margins, Turned
from tpuport.reports.records import Kind, Parity
from tpuport.tracing.session.activate import no_fused_kernels
from tpuport.tracing.state.module_state import state_tree

if TYPE_CHECKING:
    from tpuport.model.parity.verify import Gradients, Reference, Verifier

NOT_REPEATED = "eager PyTorch itself gives another result when it runs again"
# How much further than eager PyTorch a port may be from the truth.
FACTOR = 4.0
# Compares a value with the usual tolerance.
Compare = Callable[[Kind, Pair], Parity]
# The runs in float64, by the size of the errors that are put in.
_RUNS = (0, 1, 16, 16, 64)
# Beyond this share of what rounding explains, more runs would not help.
_HOPELESS = 1e3


@dataclass
class _Doubt:
    """A value in question, and its results in float64: the exact one first, then with errors."""

    kind: Kind
    pair: Pair
    tolerance: float
    results: list[tuple[float, torch.Tensor]] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Return whether the value is of integers or bools."""
        dtype = as_tensor(self.pair.want).dtype
        return not dtype.is_floating_point and not dtype.is_complex

    def share(self) -> tuple[float, float, float]:
        """Return eager's distance from the truth, the port's, and the share used of its limit."""
        want, have = (as_tensor(v) for v in (self.pair.want, self.pair.have))
        if self.is_whole:
            return self._whole_numbers(want, have)
        wide = torch.complex128 if want.is_complex() else torch.float64
        truth, *others = (one.to(wide) for _, one in self.results)
        want, have = want.to(wide), have.to(wide)
        sure = torch.isfinite(want) & torch.isfinite(have)
        if not bool(torch.isfinite(truth[sure]).all()):
            return math.nan, math.nan, math.inf
        ours, missed, *far = ((one - truth)[sure].abs() for one in (have, want, *others))
        scale = self.tolerance * float(truth[sure].abs().max())
        found = list(zip([errors for errors, _ in self.results[1:]], far, strict=True))
        share = max(
            _ratio(size(ours), max(FACTOR * _noise(size, missed, found), scale))
            for size in (_largest, _typical)
        )
        return _largest(missed), _largest(ours), share

    def _whole_numbers(self, want: torch.Tensor, have: torch.Tensor) -> tuple[float, float, float]:
        """Accept integers and bools only where eager's own depend on rounding, in that range."""
        have, want, *results = (one.double() for one in (have, want, *(r for _, r in self.results)))
        every = torch.stack([want, *results])
        low, high = every.amin(0), every.amax(0)
        inside = (have >= 2 * low - high) & (have <= 2 * high - low)
        miss = [_largest((one - results[0]).abs()) for one in (want, have)]
        return miss[0], miss[1], 0.0 if bool(inside.all()) else math.inf


def _noise(
    size: Callable[[torch.Tensor], float],
    missed: torch.Tensor,
    found: list[tuple[float, torch.Tensor]],
) -> float:
    """Return how far rounding takes a value from the truth.

    Args:
        size: Measures a tensor of distances.
        missed: How far eager PyTorch is.
        found: How far the runs with errors are, each with the size of its errors.
    """
    base = max([size(missed), *(size(one) for errors, one in found if errors == 1)])
    noise = base
    for errors, one in found:
        # What grows faster than the errors is no error: a decision has fallen the other way.
        far = size(one)
        noise = max(noise, far if far > FACTOR * errors * base else far / errors)
    return noise


@dataclass
class _PortDecisions:
    """The decisions that rounding can turn, as the port took them.

    Attributes:
        kept: What the port kept for its backward pass.
        exact: The decisions of a run in float64.
        reaches: How far rounding reaches, by call of an op that decides.
    """

    kept: KeptArrays
    exact: list[CallSamples] = field(default_factory=list)
    reaches: list[float] = field(default_factory=list)

    def modes(self, wide: Float64) -> list[Turned]:
        """Return the modes in which a run in float64 takes them."""
        if not self.reaches:
            return []
        return [Turned(self.kept, self.exact, wide=wide, reaches=self.reaches)]


def nearer_than_rounding(record: Parity, pair: Pair, truth: Any) -> bool:
    """Return whether a value is as near to its result in float64 as eager PyTorch's is."""
    if record.problem or not math.isfinite(record.max_abs):
        return False
    return _Doubt(record.kind, pair, record.tolerance, [(0, as_tensor(truth))]).share()[2] <= 1


class Judge:
    """Judges the values of one call that differ from eager PyTorch beyond the tolerance."""

    def __init__(
        self,
        verifier: "Verifier",
        call: Call,
        gradients: "Gradients | None" = None,
        kept: Iterable[Any] = (),
    ) -> None:
        """Take a call, what returns eager's gradients, and what the port kept for its own."""
        self._verifier, self._call, self._gradients = verifier, call, gradients
        self._doubts: dict[int, _Doubt] = {}
        self._narrow: dict[str, str] = {}
        self._decisions = _PortDecisions(KeptArrays(kept))
        # What is compared with eager PyTorch that takes the port's decisions.
        self._records: dict[int, Parity] = {}
        # The first run in float64, if it has been made, and its mode.
        self._exact: tuple[Float64, Reference] | None = None

    def note(self, index: int, kind: Kind, pair: Pair, record: Parity) -> None:
        """Add a value to the question."""
        if math.isfinite(record.max_abs):
            self._doubts[index] = _Doubt(kind, pair, record.tolerance)

    def run(self, compare: Compare) -> str:
        """Run eager PyTorch until the question is settled: with the port's decisions, in float64.

        Args:
            compare: Compares a value with the usual tolerance.

        Returns:
            Why it could not, or an empty string.
        """
        own = {index: doubt.pair for index, doubt in self._doubts.items()}
        again = None
        try:
            again = self._take_decisions(compare)
        except Exception as error:  # as below, which says so then; an op may be a strange one
            self._decisions = _PortDecisions(KeptArrays(()))
            said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self._verifier.ported.report.notes.append(
                f"decisions that rounding may have turned were not looked at ({said})"
            )
        try:
            if not self._doubts:
                return ""
            again = again or self._values(contextlib.nullcontext())
            if not all(_same(own[index], again) for index in self._doubts):
                return NOT_REPEATED
            self._run_in_float64()
        except Exception as error:  # any code of the user's may raise anything in float64
            first = str(error).partition("\n")[0]
            return f"eager PyTorch does not run in float64 ({type(error).__name__}: {first})"
        return "; ".join(f"{op} has no float64 ({why})" for op, why in self._narrow.items())

    def _take_decisions(self, compare: Compare) -> dict[str, Any] | None:
        """Compare with eager PyTorch that takes the port's decisions; keep what differs still.

        Returns:
            The values that eager PyTorch gives again, by path; None if the port decided otherwise
            somewhere, or keeps nothing that tells.
        """
        decisions = self._decisions
        if not (self._doubts and decisions.kept):
            return None
        wide = Float64()
        margins = Margins(wide)
        with no_fused_kernels():
            exact = self._run(wide, margins)
        self._exact = wide, exact
        decisions.exact = margins.calls
        turned = Turned(decisions.kept, margins.calls)
        values = self._values(contextlib.nullcontext(), turned)
        if not turned.count:
            return values
        self._exact = None
        decisions.reaches = turned.reaches
        for index, doubt in list(self._doubts.items()):
            want = values.get(doubt.pair.path)
            if want is None or as_tensor(want).shape != as_tensor(doubt.pair.want).shape:
                continue
            pair = dataclasses.replace(doubt.pair, want=want)
            record = dataclasses.replace(compare(doubt.kind, pair), turned=turned.count)
            self._records[index] = record
            if record.ok:
                del self._doubts[index]
            else:
                self._doubts[index] = _Doubt(doubt.kind, pair, doubt.tolerance)
        return None

    def _run_in_float64(self) -> None:
        for seed, errors in enumerate(_RUNS):
            for whole in {one.is_whole for one in self._doubts.values()}:
                self._add(Float64(errors, seed, as_held=not whole), whole=whole)
            shares = [one.share()[2] for one in self._doubts.values() if one.results]
            open_ones = [share for share in shares if share > 1]
            if not open_ones or (errors > 1 and min(open_ones) > _HOPELESS):
                break

    def verdict(self, index: int, record: Parity) -> Parity:
        """Return the record of a value, with what further runs say of it."""
        record = self._records.get(index, record)
        doubt = self._doubts.get(index)
        if doubt is None or not doubt.results:
            return record
        eager, port, share = doubt.share()
        return dataclasses.replace(record, eager_error=eager, port_error=port, rounding=share)

    def _run(self, *modes: Any) -> "Reference":
        return self._verifier.run(self._call, SameNumbers.of(self._call), *modes)

    def _values(self, mode: Any, *modes: Any) -> dict[str, Any]:
        """Run eager PyTorch; return its values by the paths of their comparison.

        Args:
            mode: The mode of the run and of its backward pass.
            *modes: Modes of the run.
        """
        found = self._run(mode, *modes)
        return {**_results(found), **self._derivatives(found, mode)}

    def _add(self, mode: Float64, *, whole: bool) -> None:
        """Run eager PyTorch in float64 once, and keep its results for the values in question.

        Args:
            mode: The mode to run under.
            whole: Whether these are the integers and bools, or the others.
        """
        with no_fused_kernels():
            if self._exact is not None and not mode.errors and not whole:
                (mode, found), self._exact = self._exact, None
                values = {**_results(found), **self._derivatives(found, mode)}
            else:
                values = self._values(mode, *self._decisions.modes(mode))
        self._narrow.update(mode.narrow)
        for doubt in (one for one in self._doubts.values() if one.is_whole is whole):
            value = values.get(doubt.pair.path)
            if value is None:
                continue
            value = mode.value(value) if isinstance(value, torch.Tensor) else as_tensor(value)
            if value.shape == as_tensor(doubt.pair.want).shape:
                doubt.results.append((mode.errors, value))

    def _derivatives(self, found: "Reference", mode: Any) -> dict[str, Any]:
        asked = any(one.pair.path.startswith("grad.") for one in self._doubts.values())
        if self._gradients is None or not asked:
            return {}
        with mode, torch.enable_grad():
            made = self._gradients(found)
        return {f"grad.{name}": value for name, value in made.items()}


def _same(pair: Pair, values: dict[str, Any]) -> bool:
    """Return whether eager PyTorch gives a value again: nothing outside changes it."""
    return pair.path in values and torch.equal(
        *(as_tensor(value).nan_to_num() for value in (values[pair.path], pair.want))
    )


def _results(found: "Reference") -> dict[str, Any]:
    """Return the outputs, arguments and state after a run, by the paths of their comparison."""
    values = {one.path: one.want for one in pairs(found.out, found.out, "output")}
    values |= {one.path: one.want for one in pairs(found.given, found.given, "argument")}
    if found.module is not None:
        leaves = state_tree(found.module).leaves
        values |= {f"buffer.{name}": leaf for name, leaf in leaves.items()}
    return values


def _largest(errors: torch.Tensor) -> float:
    return float(errors.max()) if errors.numel() else 0.0


def _typical(errors: torch.Tensor) -> float:
    """Return the root of the mean square: one error of many does not count for all."""
    return float(errors.square().mean().sqrt()) if errors.numel() else 0.0


def _ratio(error: float, limit: float) -> float:
    if error == 0:
        return 0.0
    return error / limit if limit > 0 else math.inf
