"""Records of a lint run about each file. They are cached as JSON, so all fields survive it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from tpuport.foundation.reporting.json_codec import decoded, encoded
from tpuport.source.rewrite.finding import Severity

# The rank of each severity; the worst is 0.
RANK = {severity: rank for rank, severity in enumerate(Severity)}


class Trouble(StrEnum):
    """The kind of reason why a file, or a part of it, was not linted.

    `UNREAD` is the file's own fault, `INTERNAL` is a bug of tpuport, and `SKIPPED` is intended.
    """

    UNREAD = "unread"
    INTERNAL = "internal"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Problem:
    """A file, or one cell of a notebook, that was not linted, with the reason."""

    file: str
    reason: str
    trouble: Trouble = Trouble.UNREAD

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


@dataclass(frozen=True)
class Reported:
    """A finding as a run reports it. Lines count from 1, columns from 0, both in characters.

    Attributes:
        file: The path as the user knows it.
        cell: The cell of a notebook, counted from 1 over all cells; 0 in a Python file. Lines then
            count from the cell's first.
        safety: The safety of its fix: `exact`, `close` or `unsafe`; empty without a fix.
        function: The line of the step function around it, 0 if there is none.
        lines: The source lines that it covers, shortened to a few.
        ignored: The comments that ask to ignore it, as indices into `Checked.ignores`.
    """

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    code: str
    rule: str
    severity: Severity
    message: str
    cell: int = 0
    safety: str = ""
    function: int = 0
    lines: tuple[str, ...] = ()
    ignored: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, int, int, int, str, str]:
        """Return the key that findings are sorted by."""
        return (self.file, self.cell, self.line, self.column, self.code, self.message)

    @property
    def place(self) -> str:
        """Return `file:line:column`, or `file:cell 3:line:column`, with columns from 1."""
        cell = f"cell {self.cell}:" if self.cell else ""
        return f"{self.file}:{cell}{self.line}:{self.column + 1}"


@dataclass(frozen=True)
class Ignore:
    """A comment that asks to ignore findings.

    Attributes:
        codes: The codes in its brackets, in capitals; empty if it asks to ignore all.
        whole_file: Whether it is an `ignore-file`.
        unknown: The misspelt word in place of a directive; empty if it is spelt right.
    """

    line: int
    column: int
    text: str
    codes: tuple[str, ...] = ()
    whole_file: bool = False
    cell: int = 0
    source: str = ""
    unknown: str = ""


@dataclass(frozen=True)
class Checked:
    """Everything found in one file, before the user's selection.

    Attributes:
        functions: Number of functions of the file that are part of a traced step.
        reached: The functions that only steps in other files reach: `f` or `Class.f`.
    """

    file: str
    findings: tuple[Reported, ...] = ()
    ignores: tuple[Ignore, ...] = ()
    problems: tuple[Problem, ...] = ()
    functions: int = 0
    reached: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON for the cache, without the path: files may be copies."""
        found = encoded(self)
        for record in (found, *found["findings"], *found["problems"]):
            del record["file"]
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, Any], file: str) -> "Checked":
        """Rebuild the record that `to_json` returned.

        Raises:
            KeyError, TypeError, ValueError: the JSON does not come from `to_json`.
        """
        own = {
            name: [{**item, "file": file} for item in found[name]]
            for name in ("findings", "problems")
        }
        return decoded(cls, {**found, **own, "file": file})


@dataclass(frozen=True)
class Outcome:
    """The result of a run after select, severity, comments and baseline.

    Attributes:
        shown: The findings, sorted by place.
        counted: All findings that count for the porting summary: those shown, those below the
            severity asked for, and those in the baseline.
        hidden: Number of findings of each severity that are not shown for it.
        baselined: Number of findings not shown because the baseline has them.
        stale: Number of findings of the baseline that no longer occur.
        problems: Files and cells that were not linted.
        functions: Number of step functions.
        files: Number of files checked.
    """

    shown: tuple[Reported, ...] = ()
    counted: tuple[Reported, ...] = ()
    hidden: Mapping[str, int] = field(default_factory=dict)
    baselined: int = 0
    stale: int = 0
    problems: tuple[Problem, ...] = ()
    functions: int = 0
    files: int = 0

    def with_problems(self, problems: tuple[Problem, ...]) -> "Outcome":
        """Return the outcome with more problems, sorted by file."""
        merged = sorted({*self.problems, *problems}, key=lambda problem: str(problem))
        return replace(self, problems=tuple(merged))
