"""The outcome of `verify_port`: as text, JSON and a page."""

import json
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tpuport.foundation.errors import ParityError, UsageError
from tpuport.foundation.files import write_atomically
from tpuport.foundation.reporting.templates import render
from tpuport.foundation.version import __version__
from tpuport.verify.compare import Stage, shown_problems
from tpuport.verify.ports.search import FirstDifference
from tpuport.verify.ports.table import Table
from tpuport.verify.stage_table import largest, stage_table

STAGES = ("interface", "numbers", "behaviour")


@dataclass
class PortVerification:
    """What comparing a port with its original found.

    Attributes:
        model: The class of the original.
        stages: The stages that were reached.
        table: Which weights each leaf holds.
        first: Where the two part, if they do.
        found: How many values in between of the original the port has, and of how many.
        failure: What the port raised, if it does not run.
        notes: What a reader has to know, and what was not looked at.
    """

    model: str
    stages: list[Stage] = field(default_factory=list)
    table: Table = field(default_factory=Table)
    first: list[FirstDifference] = field(default_factory=list)
    found: tuple[int, int] = (0, 0)
    failure: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Return whether everything that was compared agrees, values at least."""
        reached = len(self.stages) > 1
        return reached and not self.failure and all(stage.passed for stage in self.stages)

    @property
    def failed_stage(self) -> str:
        """Return the first stage that differs; empty if none does."""
        return next((stage.name for stage in self.stages if not stage.passed), "")

    def check(self) -> None:
        """Raise if the port differs.

        Raises:
            ParityError: it does; the message is the report.
        """
        if not self.passed:
            raise ParityError(str(self), remedy="mend the port at the lines above, or the table")

    def to_json(self) -> str:
        """Return everything as JSON."""
        fields: dict[str, Any] = {
            "tpuport": __version__,
            "model": self.model,
            "passed": self.passed,
            "failed_stage": self.failed_stage,
            "stages": [
                {
                    "name": stage.name,
                    "passed": stage.passed,
                    "checks": [{**asdict(c), "passed": c.passed} for c in stage.checks],
                }
                for stage in self.stages
            ],
            "first_difference": [asdict(one) for one in self.first],
            "values_in_between": {"found": self.found[0], "of": self.found[1]},
            "weights": [
                {"leaf": e.leaf, "code": e.code, "how": e.how} for e in self.table.entries.values()
            ],
            "unknown_leaves": self.table.unknown,
            "failure": self.failure,
            "notes": self.notes,
        }
        return json.dumps(fields, indent=1)

    def to_html(self) -> str:
        """Return a page that loads nothing; names and code are shown as text."""
        return render(
            "verify/ports/templates/port.html.j2",
            report=self,
            stages=STAGES,
            version=__version__,
            most=largest,
            problems=shown_problems,
        )

    def show(self, console: Console) -> None:
        """Print a table of the stages, where the two part, and what was not looked at."""
        table = stage_table(f"A port of {self.model}", STAGES, self.stages)
        console.print(table)
        for line in self._lines():
            console.print(Text(line))

    def _lines(self) -> list[str]:
        lines = [
            f"  {check.what}: {problem}"
            for stage in self.stages
            for check in stage.checks
            for problem in shown_problems(check)
        ]
        for one in self.first:
            lines.append(f"The first difference on the way to {one.target}:")
            lines += [f"  original  {site}" for site in one.original]
            lines += [f"  port      {site}" for site in one.port]
        if self.failure:
            lines.append(f"The port does not run:\n{self.failure}")
        if self.found[1]:
            lines.append(
                f"{self.found[0]} of {self.found[1]} values in between of the original were found"
                " in the port."
            )
        lines += self.notes
        if not self.passed and (self.table.entries or self.table.unknown):
            lines += [
                "Which weights were compared, to be edited and given as names:",
                self.table.code(),
            ]
        return lines

    def __str__(self) -> str:
        console = Console(record=True, width=120, file=StringIO())
        self.show(console)
        return console.export_text()

    def save(self, path: Path) -> None:
        """Write the report as .json, .html or .txt.

        Raises:
            UsageError: the file has another ending.
        """
        kinds = {".json": self.to_json, ".html": self.to_html, ".txt": self.__str__}
        if path.suffix not in kinds:
            raise UsageError(f"Expected a report ending in .json, .html or .txt, got {path}.")
        write_atomically(path, kinds[path.suffix]().encode())
