"""The progress bar: for people who wait, and nobody else."""

import io
import sys

import pytest

from tpuport.cli import _progress
from tpuport.cli._progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal as standard error; pytest puts its own there before each test begins."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def test_nothing_is_shown_where_nobody_looks(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress("Linting") as advance:
        assert advance is None


def test_a_short_run_shows_nothing(monkeypatch):
    terminal = watched(monkeypatch)
    with progress("Linting") as advance:
        assert advance is not None
        advance(1, 2)
        advance(2, 2)
    assert terminal.getvalue() == ""


def test_a_long_run_shows_how_far_it_is_and_cleans_up(monkeypatch):
    terminal = watched(monkeypatch)
    monkeypatch.setattr(_progress, "_PATIENCE", 0.0)
    with progress("Linting") as advance:
        assert advance is not None
        advance(1, 4)
        advance(2, 4)
    text = terminal.getvalue()
    assert "Linting" in text
    assert "50%" in text
    assert text.rstrip().endswith("\x1b[2K")
