"""The report of a block of `porting()`: which calls were programs, and what was rewritten."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tpuport.compat.imports.import_hook import Imported
from tpuport.foundation.reporting.json_codec import encoded
from tpuport.foundation.reporting.markup import plural, visible
from tpuport.foundation.reporting.saved_report import SavedReport
from tpuport.foundation.reporting.templates import render
from tpuport.reports import wording as fmt
from tpuport.reports.html import sections_of
from tpuport.reports.report import PortReport


@dataclass(frozen=True)
class Descended:
    """A call that is not one program, but whose submodules are programs.

    Attributes:
        what: The class, or the class and method.
        reason: Why it is not one, with the user's line and what to do.
    """

    what: str
    reason: str


@dataclass(frozen=True)
class CaughtError:
    """An error of a program that a `try` of the script catches.

    Attributes:
        place: Where the `try` is.
        what: The error, with what to do.
    """

    place: str
    what: str

    def __str__(self) -> str:
        way = "and may go another way than in eager PyTorch"
        return f"{self.place}: a `try` here catches an error of tpuport, {way}: {self.what}"


@dataclass
class RunReport(SavedReport):
    """The report of one block of `porting()`.

    Attributes:
        programs: The report of each module that was ported, in the order of first calls.
        descended: Calls that are not one program.
        imported: The outcome for each module that was to be rewritten.
        caught: Errors after which the script may go another way than in eager PyTorch.
        step_marks: How often code for torch_xla ended a step (`mark_step`, a device loader).
    """

    programs: list[PortReport] = field(default_factory=list)
    descended: list[Descended] = field(default_factory=list)
    imported: list[Imported] = field(default_factory=list)
    caught: list[CaughtError] = field(default_factory=list)
    step_marks: int = 0

    @property
    def ok(self) -> bool:
        """Return whether every program agreed with eager PyTorch, as far as it was compared.

        An error that the script catches is none of eager PyTorch's.
        """
        return all(report.ok for report in self.programs) and not self.caught

    def __str__(self) -> str:
        lines = [self._headline(), *(f"  {line}" for line in self._lines())]
        return "\n".join(map(visible, lines)) + "\n"

    def _headline(self) -> str:
        rewritten = sum(bool(module.applied) for module in self.imported)
        parts = [plural(len(self.programs), "program")]
        if self.descended:
            parts.append(f"{plural(len(self.descended), 'call')} left to the modules inside")
        if self.step_marks:
            parts.append(f"{plural(self.step_marks, 'step mark')} of torch_xla")
        if rewritten:
            parts.append(f"{plural(rewritten, 'file')} rewritten")
        return ", ".join(parts)

    def _lines(self) -> Iterator[str]:
        for report in self.programs:
            yield f"{report.model}: {_verdict(report)}"
        for one in self.descended:
            yield f"{one.what} is not one program: {one.reason}".replace("\n", "\n    ")
        for one in self.caught:
            yield str(one).replace("\n", "\n    ")
        for module in self.imported:
            if module.applied:
                codes = ", ".join(f"{code} line {line}" for code, line in module.applied)
                yield f"{fmt.short_path(module.file)}: {codes}"
            elif module.reason:
                yield f"{fmt.short_path(module.file)}: imported as it is: {module.reason}"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {
            "ok": self.ok,
            "programs": [report.to_dict() for report in self.programs],
            "descended": encoded(self.descended),
            "imported": encoded(self.imported),
            "caught": encoded(self.caught),
            "step_marks": self.step_marks,
        }

    def to_json(self) -> str:
        """Return the report as standard JSON, indented."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    def to_html(self) -> str:
        """Return the report as one HTML page that loads nothing from elsewhere."""
        return render(
            "compat/emulated/templates/run.html.j2",
            headline=self._headline(),
            programs=self.programs,
            notes=list(self._lines())[len(self.programs) :],
            explanation=fmt.explanation,
            seconds=fmt.seconds,
            sections_of=sections_of,
        )


def _verdict(report: PortReport) -> str:
    worst = report.worst
    known = "" if worst is None else f", at most {fmt.number(worst.max_rel)} relative"
    again = f"; {plural(len(report.retraces), 'retrace')}" if report.retraces else ""
    spent = fmt.seconds(report.timing.trace + report.timing.compile)
    return f"{report.verdict}{known}; traced and compiled in {spent}{again}"
