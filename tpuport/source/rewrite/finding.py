"""Findings, fixes and their safety: the data passed between detection, rewriting and reports."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from tpuport.source.syntax.text import Edit


class Severity(StrEnum):
    """The effect on the program if the finding stays.

    `ERROR` stops the trace, `SILENT` makes the result wrong without an error, `SLOW` costs time or
    memory, `DEVICE` is host code for CUDA, which `tpuport run` answers and a port by hand changes,
    `NOTE` is worth knowing.
    """

    ERROR = "error"
    SILENT = "silent"
    SLOW = "slow"
    DEVICE = "device"
    NOTE = "note"


@dataclass(frozen=True)
class Safety:
    """The guarantee of a fix about the results of the rewritten code.

    Attributes:
        name: `exact`: bit for bit the same result. `close`: within `rtol`. `unsafe`: not the same
            for some input that the rule's page shows; applied only when asked for.
        rtol: Largest relative error, 0 unless the name is `close`.
    """

    name: str
    rtol: float = 0.0

    EXACT: ClassVar["Safety"]
    UNSAFE: ClassVar["Safety"]

    @classmethod
    def close(cls, rtol: float) -> "Safety":
        """Return the safety of a fix that stays within a relative error, which must be positive."""
        if not rtol > 0:
            raise ValueError(f"Expected a positive rtol, got {rtol} instead. Use Safety.EXACT.")
        return cls("close", rtol)


Safety.EXACT = Safety("exact")
Safety.UNSAFE = Safety("unsafe")


@dataclass(frozen=True, order=True)
class Finding:
    """One place in a file that a rule reports.

    Lines count from 1 and columns from 0, in characters. For an `if` or `while` the end is that of
    its test. Findings sort by file and place.
    """

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    code: str
    message: str
    severity: Severity = field(compare=False)
    rule: str = field(compare=False)


@dataclass(frozen=True)
class Fix:
    """The edits that remove a finding, applied together or not at all.

    Attributes:
        edits: Replacements in the text that the finding is about; they do not overlap.
        imports: Modules that the new text needs, such as `tpuport.ops`.
    """

    edits: tuple[Edit, ...]
    imports: tuple[str, ...] = ()

    @property
    def start(self) -> int:
        """Return the offset at which the first edit starts."""
        return min(edit.start for edit in self.edits)

    @property
    def end(self) -> int:
        """Return the offset at which the last edit ends."""
        return max(edit.end for edit in self.edits)


class NotFixable(Exception):
    """Raised by a rule's `fix` when it cannot prove that the rewritten code is equivalent.

    Args:
        reason: The obstacle, as the end of "not rewritten: ...".
        pins: Whether code around the finding must stay too. False where rewriting an enclosing
            statement may remove the obstacle.
    """

    def __init__(self, reason: str, *, pins: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.pins = pins


@dataclass(frozen=True)
class Applied:
    """A fix that was applied.

    Attributes:
        finding: The finding that the fix removed; its place is in the original text.
        before: The replaced source, without common indentation.
        after: The new source, without common indentation.
        safety: The name of the rule's safety level: `exact`, `close` or `unsafe`.
    """

    finding: Finding
    before: str
    after: str
    safety: str

    @property
    def file(self) -> str:
        """Return the user's file."""
        return self.finding.file

    @property
    def line(self) -> int:
        """Return the line in that file on which the finding starts."""
        return self.finding.line

    @property
    def code(self) -> str:
        """Return the rule's code."""
        return self.finding.code


@dataclass(frozen=True)
class Left:
    """A finding that stays, with the reason."""

    finding: Finding
    reason: str
