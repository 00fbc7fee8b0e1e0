"""What a lint run says of each file. All of it survives JSON, which is how it is cached."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from tpuport.source.finding import Severity

# How bad each severity is, the worst first.
RANK = {severity: rank for rank, severity in enumerate(Severity)}


class Trouble(StrEnum):
    """Why a file, or a part of it, was not linted.

    `UNREAD` is the file's own fault, `INTERNAL` is a bug of tpuport, and `SKIPPED` is in order.
    """

    UNREAD = "unread"
    INTERNAL = "internal"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Problem:
    """Why a file, or one cell of a notebook, was not linted."""

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
        safety: How safe its fix is: `exact`, `close` or `unsafe`; empty where there is none.
        function: The line of the step function that it lies in, 0 if it lies in none.
        lines: The source lines that it covers, as far as they are worth showing.
        ignored: Which of the file's comments ask to ignore it, as places in `Checked.ignores`.
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
        """What findings are sorted by."""
        return (self.file, self.cell, self.line, self.column, self.code, self.message)

    @property
    def place(self) -> str:
        """`file:line:column`, or `file:cell 3:line:column`; columns count from 1, as editors do."""
        cell = f"cell {self.cell}:" if self.cell else ""
        return f"{self.file}:{cell}{self.line}:{self.column + 1}"


@dataclass(frozen=True)
class Ignore:
    """A comment that asks to ignore findings.

    Attributes:
        codes: The codes in its brackets, in capitals; empty if it asks to ignore all.
        whole_file: Whether it is an `ignore-file`.
        unknown: What stands there in the place of a directive, where that is misspelt.
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
    """All that there is to say of one file, whatever the user wants to see of it.

    Attributes:
        functions: How many functions of the file are part of a traced step.
        reached: Those of them that only steps in other files reach: `f` or `Class.f`.
    """

    file: str
    findings: tuple[Reported, ...] = ()
    ignores: tuple[Ignore, ...] = ()
    problems: tuple[Problem, ...] = ()
    functions: int = 0
    reached: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A form to keep. It leaves the path out: the same text may lie at several."""
        found = asdict(self)
        for record in (found, *found["findings"], *found["problems"]):
            del record["file"]
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, Any], file: str) -> "Checked":
        """The opposite of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: it is not what `to_json` gives.
        """
        return cls(
            file,
            findings=tuple(
                Reported(
                    file,
                    **{
                        **item,
                        "severity": Severity(item["severity"]),
                        "lines": tuple(item["lines"]),
                        "ignored": tuple(item["ignored"]),
                    },
                )
                for item in found["findings"]
            ),
            ignores=tuple(
                Ignore(**{**item, "codes": tuple(item["codes"])}) for item in found["ignores"]
            ),
            problems=tuple(
                Problem(file, item["reason"], Trouble(item["trouble"]))
                for item in found["problems"]
            ),
            functions=int(found["functions"]),
            reached=tuple(found["reached"]),
        )


@dataclass(frozen=True)
class Outcome:
    """What a run shows, after select, severity, comments and baseline.

    Attributes:
        shown: The findings, sorted by place.
        counted: All findings that count for the porting summary: those shown, those below the
            severity asked for, and those in the baseline.
        hidden: How many findings are not shown for their severity.
        baselined: How many are not shown because the baseline has them.
        stale: How many findings of the baseline are no longer there.
        problems: What was not linted.
        functions: How many step functions there are.
        files: How many files were looked at.
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
        """The same with more problems, sorted by file."""
        merged = sorted({*self.problems, *problems}, key=lambda problem: str(problem))
        return replace(self, problems=tuple(merged))
