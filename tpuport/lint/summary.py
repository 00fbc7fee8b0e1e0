"""The porting summary: how portable code is, what blocks it, and in which order to work on it."""

from collections import Counter
from dataclasses import dataclass

from tpuport.lint.records import RANK, Outcome, Reported
from tpuport.source.finding import Severity

# What keeps a function from giving right results on TPU.
BLOCKING = (Severity.ERROR, Severity.SILENT)

# Start of the codes -> what they are about, in the order in which to work: code that cannot be
# imported hides everything else, and speed is worth measuring only once results are right.
STEPS = {
    "TPU5": "devices, imports and CUDA-only packages",
    "TPU1": "Python that needs a traced value",
    "TPU2": "shapes that depend on data",
    "TPU3": "trips through the host",
    "TPU4": "state and randomness in the step",
    "TPU6": "recompiles and speed",
}


@dataclass(frozen=True)
class Step:
    """One step of the work.

    Attributes:
        start: What the codes of its rules start with.
        title: What they are about.
        count: How many findings.
        blocking: How many of them are errors or silently wrong.
        fixable: How many `tpuport rewrite` fixes.
        codes: How often each code, the most frequent first.
    """

    start: str
    title: str
    count: int
    blocking: int
    fixable: int
    codes: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class PortingSummary:
    """How portable code is.

    Attributes:
        functions: How many functions are part of a traced step.
        ready: How many of them have no finding that blocks.
        setup: How many findings that block lie outside of those functions.
        severities: How many findings of each severity, the worst first.
        safeties: How many of them, notes aside, can be fixed, by the safety of the fix.
        steps: The work, in order; notes are none.
    """

    functions: int
    ready: int
    setup: int
    severities: dict[str, int]
    safeties: dict[str, int]
    steps: tuple[Step, ...]

    @property
    def share(self) -> float:
        """Of the functions of the step how many are ready, from 0 to 1."""
        return self.ready / self.functions if self.functions else 1.0

    @property
    def total(self) -> int:
        """How many findings there are, notes aside."""
        return sum(count for name, count in self.severities.items() if name != Severity.NOTE)


def summarise(outcome: Outcome) -> PortingSummary:
    """The porting summary of a run: hidden and known findings count too."""
    findings = outcome.counted
    blocked = {
        (finding.file, finding.cell, finding.function)
        for finding in findings
        if finding.severity in BLOCKING
    }
    in_step = {key for key in blocked if key[2]}
    severities = Counter(finding.severity.value for finding in findings)
    work = tuple(finding for finding in findings if finding.severity is not Severity.NOTE)
    safeties = Counter(finding.safety for finding in work if finding.safety)
    return PortingSummary(
        functions=outcome.functions,
        ready=outcome.functions - len(in_step),
        setup=sum(f.severity in BLOCKING and not f.function for f in findings),
        severities={s.value: severities[s.value] for s in RANK if severities[s.value]},
        safeties={name: safeties[name] for name in ("exact", "close", "unsafe") if safeties[name]},
        steps=tuple(
            _step(start, title, work)
            for start, title in STEPS.items()
            if any(finding.code.startswith(start) for finding in work)
        ),
    )


def _step(start: str, title: str, findings: tuple[Reported, ...]) -> Step:
    own = [finding for finding in findings if finding.code.startswith(start)]
    codes = Counter(finding.code for finding in own)
    return Step(
        start=start,
        title=title,
        count=len(own),
        blocking=sum(finding.severity in BLOCKING for finding in own),
        fixable=sum(finding.safety in ("exact", "close") for finding in own),
        codes=tuple(sorted(codes.items(), key=lambda item: (-item[1], item[0]))),
    )
