"""Findings of checks."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        status: Its severity.
        topic: The subject of the check.
        text: The result in words.
        fix: A command that fixes the problem, if there is one.
    """

    status: Status
    topic: str
    text: str
    fix: str | None = None


def ok(topic: str, text: str) -> Finding:
    """Make a finding without a problem."""
    return Finding(Status.OK, topic, text)


def note(topic: str, text: str, fix: str | None = None) -> Finding:
    """Make a finding that is worth knowing."""
    return Finding(Status.NOTE, topic, text, fix)


def problem(topic: str, text: str, fix: str) -> Finding:
    """Make a finding of something that does not work until the command is run."""
    return Finding(Status.PROBLEM, topic, text, fix)
