"""What cost time in a run, and which option would help: what `tpuport run` says at its end."""

import sys
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType

import torch

from tpuport.compat.emulated.report import Descended
from tpuport.foundation.reporting.markup import plural
from tpuport.reports import wording as fmt
from tpuport.reports.records import Timing
from tpuport.reports.report import PortReport

# The stack is looked at in two calls only: a method that is running in both holds a loop.
_FIRST_LOOK, _SECOND_LOOK = 15, 16
_NAMED = 3
# More retraces than that are no change of sizes here and there: an input grows at each call.
_FEW = 8


@dataclass
class Calls:
    """The calls of each class of modules, and the methods that call one in a loop.

    Attributes:
        counts: Calls by the class of the module.
        loops: By the same class, the method around the calls, as `--program` takes it.
        traces: How many programs were traced for them.
    """

    counts: Counter[str] = field(default_factory=Counter)
    loops: dict[str, str] = field(default_factory=dict)
    traces: int = 0
    _running: dict[str, list[FrameType]] = field(default_factory=dict)

    def note(
        self, module: torch.nn.Module, refused: Mapping[torch.nn.Module, Container[str]]
    ) -> None:
        """Count a call that the user's code makes now.

        Args:
            module: The module that is called.
            refused: By module the methods that cannot be one program.
        """
        name = type(module).__name__
        self.counts[name] += 1
        if self.counts[name] == _FIRST_LOOK:
            self._running[name] = [frame for frame, _ in _methods_around(refused)]
        elif self.counts[name] == _SECOND_LOOK:
            known = self._running.pop(name)
            held = [method for frame, method in _methods_around(refused) if frame in known]
            if held:
                self.loops[name] = held[0]


def _methods_around(
    refused: Mapping[torch.nn.Module, Container[str]],
) -> Iterator[tuple[FrameType, str]]:
    """Yield the running methods of modules, innermost first; torch's own are left out."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        holder = frame.f_locals.get("self") if code.co_varnames[:1] == ("self",) else None
        if isinstance(holder, torch.nn.Module) and code.co_name not in refused.get(holder, ()):
            owner = next((c for c in type(holder).__mro__ if code.co_name in vars(c)), None)
            if owner is not None and not owner.__module__.startswith("torch."):
                yield frame, f"{owner.__name__}.{code.co_name}"
        frame = frame.f_back


def lines(
    programs: list[PortReport], calls: Calls, descended: list[Descended], eager: tuple[str, ...]
) -> Iterator[str]:
    """Yield at most five lines, or none if nothing was ported."""
    if not programs and not descended:
        return
    spent = _total(programs)
    retraces = sum(len(report.retraces) for report in programs)
    made = plural(len(programs), "ported module")
    again = f", {plural(retraces, 'retrace')}" if retraces else ""
    yield (
        f"{made}{again}: {fmt.seconds(spent.trace)} tracing,"
        f" {fmt.seconds(spent.lower + spent.compile)} compiling,"
        f" {fmt.seconds(spent.observe + spent.verify)} comparing with eager PyTorch"
    )
    yield from _retraced(programs)
    yield from _on_the_host(descended, eager)
    yield from _looped(calls)
    yield (
        "to save that time: --cache-dir DIR keeps what was compiled for the next run,"
        " --no-verify compares nothing"
    )


def _total(programs: list[PortReport]) -> Timing:
    stages = vars(Timing())
    return Timing(**{s: sum(getattr(report.timing, s) for report in programs) for s in stages})


def _retraced(programs: list[PortReport]) -> Iterator[str]:
    """Name the module that was traced most often, and why."""
    worst = max(programs, key=lambda report: len(report.retraces), default=None)
    if worst is None or not worst.retraces:
        return
    found = [cause for retrace in worst.retraces for cause in retrace.causes]
    kinds = Counter(cause.partition(":")[0] for cause in found)
    kind, times = kinds.most_common(1)[0]
    example = next(cause for cause in reversed(found) if cause.partition(":")[0] == kind)
    often = plural(len(worst.retraces), "retrace")
    way_out = f"; --eager {worst.model} compiles nothing" if len(worst.retraces) > _FEW else ""
    yield f"{worst.model}: {often}, {times} of them for {example}{way_out}"


def _on_the_host(descended: list[Descended], eager: tuple[str, ...]) -> Iterator[str]:
    """Name what ran in eager PyTorch on the CPU."""
    names = dict.fromkeys(one.what for one in descended)
    shown = [f"{name}, but for its submodules" for name in [*names][:_NAMED]]
    rest = len(names) - len(shown)
    shown += [f"{rest} more"] if rest else []
    shown += [f"{name} (--eager)" for name in eager]
    if shown:
        yield f"in eager PyTorch on the CPU: {'; '.join(shown)}"


def _looped(calls: Calls) -> Iterator[str]:
    """Name the method whose loop makes most of the calls, and the option for it."""
    often = [(count, name) for name, count in calls.counts.items() if name in calls.loops]
    if often:
        count, name = max(often)
        method = calls.loops[name]
        yield f"{name} was called {count:,} times, by {method}: try --program {method}"
