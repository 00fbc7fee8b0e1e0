"""What a check found."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How serious a finding is."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        status: How serious it is.
        topic: What was looked at.
        text: What was found.
        fix: A command that mends it, if there is one.
    """

    status: Status
    topic: str
    text: str
    fix: str | None = None


def ok(topic: str, text: str) -> Finding:
    """All is well."""
    return Finding(Status.OK, topic, text)


def note(topic: str, text: str, fix: str | None = None) -> Finding:
    """Worth knowing."""
    return Finding(Status.NOTE, topic, text, fix)


def problem(topic: str, text: str, fix: str) -> Finding:
    """Something does not work until the command is run."""
    return Finding(Status.PROBLEM, topic, text, fix)
