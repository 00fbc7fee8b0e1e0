"""Findings of checks."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Check:
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


def ok(topic: str, text: str) -> Check:
    """Make a finding without a problem."""
    return Check(Status.OK, topic, text)


def note(topic: str, text: str, fix: str | None = None) -> Check:
    """Make a finding that is worth knowing."""
    return Check(Status.NOTE, topic, text, fix)


def problem(topic: str, text: str, fix: str) -> Check:
    """Make a finding of something that does not work until the command is run."""
    return Check(Status.PROBLEM, topic, text, fix)
