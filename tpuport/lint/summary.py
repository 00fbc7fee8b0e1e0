"""The porting summary: the share of code that is ready, its blockers, and an order of work."""

from collections import Counter
from dataclasses import dataclass

from tpuport.lint.records import RANK, Outcome, Reported
from tpuport.source.rewrite.finding import Severity

# Severities that keep a function from computing right results on TPU.
BLOCKING = (Severity.ERROR, Severity.SILENT)

# Severities that are no work of porting the step.
_ASIDE = (Severity.DEVICE, Severity.NOTE)

# Prefix of codes -> their topic, in the order of work: code that cannot be imported hides all
# else, and speed is worth measuring only once results are right.
STEPS = {
    "TPU5": "devices, imports and CUDA-only packages",
    "TPU1": "Python that needs a traced value",
    "TPU2": "shapes that depend on data",
    "TPU3": "trips through the host",
    "TPU4": "state and randomness in the step",
    "TPU6": "recompiles and speed",
    "TPU7": "code for torch_xla",
}


@dataclass(frozen=True)
class PortingStep:
    """One step of the work.

    Attributes:
        start: The prefix of its rules' codes.
        title: The topic of these rules.
        count: Number of findings.
        blocking: Number of findings that are errors or silently wrong.
        fixable: Number of findings that `tpuport rewrite` fixes.
        codes: Number of findings of each code, the most frequent first.
    """

    start: str
    title: str
    count: int
    blocking: int
    fixable: int
    codes: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class PortingSummary:
    """Counts of what is ready for TPU and what is left to do.

    Attributes:
        functions: Number of functions that are part of a traced step.
        ready: Number of those without a blocking finding.
        setup: Number of blocking findings outside of those functions.
        severities: Number of findings of each severity, the worst first.
        safeties: Number of fixable findings by the safety of the fix, without notes.
        steps: The steps of the work, in order; notes are not part of it.
        devices: Files with host code for CUDA, the most of it first, and its lines.
    """

    functions: int
    ready: int
    setup: int
    severities: dict[str, int]
    safeties: dict[str, int]
    steps: tuple[PortingStep, ...]
    devices: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def share(self) -> float:
        """Return the share of step functions that are ready, from 0 to 1."""
        return self.ready / self.functions if self.functions else 1.0

    @property
    def total(self) -> int:
        """Return the number of findings, without notes and host code."""
        return sum(count for name, count in self.severities.items() if name not in _ASIDE)


def summarise(outcome: Outcome) -> PortingSummary:
    """Summarise a run for porting; hidden and known findings count too."""
    findings = outcome.counted
    blocked = {
        (finding.file, finding.cell, finding.function)
        for finding in findings
        if finding.severity in BLOCKING
    }
    in_step = {key for key in blocked if key[2]}
    severities = Counter(finding.severity.value for finding in findings)
    work = tuple(finding for finding in findings if finding.severity not in _ASIDE)
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
        devices=_devices(findings),
    )


def _devices(findings: tuple[Reported, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    lines: dict[str, set[int]] = {}
    for finding in findings:
        if finding.severity is Severity.DEVICE:
            lines.setdefault(finding.file, set()).add(finding.line)
    files = sorted(lines.items(), key=lambda item: (-len(item[1]), item[0]))
    return tuple((file, tuple(sorted(numbers))) for file, numbers in files)


def _step(start: str, title: str, findings: tuple[Reported, ...]) -> PortingStep:
    own = [finding for finding in findings if finding.code.startswith(start)]
    codes = Counter(finding.code for finding in own)
    return PortingStep(
        start=start,
        title=title,
        count=len(own),
        blocking=sum(finding.severity in BLOCKING for finding in own),
        fixable=sum(finding.safety in ("exact", "close") for finding in own),
        codes=tuple(sorted(codes.items(), key=lambda item: (-item[1], item[0]))),
    )
