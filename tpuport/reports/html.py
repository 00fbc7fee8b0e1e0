"""The port report as one HTML page: no script, nothing loaded, light and dark by preference."""

import difflib
import re
from itertools import zip_longest
from typing import Any

from tpuport.foundation.reporting.markup import Markup
from tpuport.foundation.reporting.templates import render
from tpuport.reports import plots
from tpuport.reports import wording as fmt
from tpuport.reports.data import ReportData
from tpuport.reports.plots import Bar, BarPart
from tpuport.reports.records import STAGES

_SWARM_FROM = 9  # with fewer values the rows alone show everything
_WORST_ROWS = 10
_OPEN_REWRITES = 4
_LARGEST_CONSTANTS = 12
_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z0-9])|(?<=[A-Z0-9])(?=[A-Z][a-z])|(?<=_)")
_TOKENS = re.compile(r"\w+|\s+|[^\w\s]")

# The class of a line, and its parts with whether they changed.
_Line = tuple[str, list[tuple[str, bool]]]


def to_html(report: ReportData) -> str:
    """Return the report as a page to open from disk or attach; its policy forbids loading anything.

    Names, paths and source lines are shown as text, whatever they contain.
    """
    return render("reports/templates/report.html.j2", heading="h2", **_values(report))


def sections_of(report: ReportData) -> Markup:
    """Return the verdict and the sections of a report, for a page about several reports."""
    names = ("verdict", "sections")
    values = _values(report)
    return Markup(
        "".join(render(f"reports/templates/{n}.html.j2", heading="h3", **values) for n in names)
    )


def _values(report: ReportData) -> dict[str, Any]:
    """Return what the templates show."""
    ordered = report.by_severity
    worst = sum(not p.ok for p in ordered[: 2 * _WORST_ROWS])
    return {
        "report": report,
        "fmt": fmt,
        "svg": plots,
        "words": _WORDS.split,
        "scale": plots.scale_of(report.parity, report.divergences),
        "ordered": ordered,
        "has_rings": any(plots.look(p) == "ring" for p in ordered),
        "swarm_from": _SWARM_FROM,
        "num_open": max(_WORST_ROWS, worst),
        "num_open_rewrites": _OPEN_REWRITES,
        "diff": _diff,
        "constants": [
            Bar(
                fmt.short_path(c.origin),
                fmt.size(c.bytes),
                c.bytes,
                fmt.array(c.dtype, c.shape),
                c.origin,
            )
            for c in sorted(report.constants, key=lambda c: -c.bytes)
        ],
        "num_open_constants": _LARGEST_CONSTANTS,
        "stages": [
            BarPart(stage, spent, stage, fmt.seconds(spent))
            for stage in STAGES
            if (spent := getattr(report.timing, stage)) > 0
        ],
    }


def _diff(before: str, after: str) -> tuple[list[_Line], list[_Line]]:
    """Return the lines of both versions, aligned, with changes inside a line marked."""
    old, new = before.strip("\n").splitlines(), after.strip("\n").splitlines()
    left: list[_Line] = []
    right: list[_Line] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
        for was, now in zip_longest(old[a:b], new[c:d]):
            marks = _inside(was, now) if kind == "replace" and was and now else None
            left.append(_line(was, kind, "del", marks and marks[0]))
            right.append(_line(now, kind, "ins", marks and marks[1]))
    return left, right


def _line(text: str | None, kind: str, change: str, marked: list[tuple[str, bool]] | None) -> _Line:
    if text is None:
        return "none", []
    return "same" if kind == "equal" else change, marked or [(text, False)]


def _inside(was: str, now: str) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]] | None:
    """Return the parts of two lines, or None where little is shared."""
    a, b = _TOKENS.findall(was), _TOKENS.findall(now)
    matcher = difflib.SequenceMatcher(None, a, b, False)
    if matcher.ratio() < 0.4:
        return None
    found = matcher.get_opcodes()
    left = [("".join(a[i:j]), kind != "equal") for kind, i, j, _, _ in found if i < j]
    right = [("".join(b[k:m]), kind != "equal") for kind, _, _, k, m in found if k < m]
    return left, right
