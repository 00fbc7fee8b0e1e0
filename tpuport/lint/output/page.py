"""A run's outcome as one HTML page, without scripts or external files, in light and dark."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from tpuport.foundation.reporting.markup import plural
from tpuport.foundation.reporting.templates import render
from tpuport.foundation.version import __version__
from tpuport.lint.output import Style
from tpuport.lint.output.text import advice
from tpuport.lint.records import RANK, Outcome, Reported
from tpuport.lint.summary import PortingSummary, summarise
from tpuport.source.rewrite.finding import Severity

MEANING = {
    Severity.ERROR: "stops the trace",
    Severity.SILENT: "wrong without a word",
    Severity.SLOW: "costs time or memory",
    Severity.DEVICE: "host code for CUDA",
    Severity.NOTE: "worth knowing",
}
_MAX_CELLS = 1500
_MAX_ROWS = 30
_OPEN_FILES = 3


def to_html(outcome: Outcome, style: Style) -> str:
    """Write the page. Names and source lines are escaped, so that they are shown as text."""
    del style
    summary = summarise(outcome)
    by_file = [(file, list(found)) for file, found in groupby(outcome.shown, lambda f: f.file)]
    classes, legend = _functions(outcome, summary)
    scale = max(1, -(-len(classes) // _MAX_CELLS))
    return render(
        "lint/output/templates/page.html.j2",
        blocked=any(summary.severities.get(name) for name in ("error", "silent")),
        headline=_headline(summary),
        lead=_lead(outcome),
        facts=_facts(outcome),
        sections=_sections(outcome, summary),
        cells=classes[::scale],
        scale=scale,
        legend=legend,
        steps=[
            (step, [f for f in outcome.counted if f.code.startswith(step.start)])
            for step in summary.steps
        ],
        most_of_a_step=max((step.count for step in summary.steps), default=0),
        by_file=by_file,
        ranked=sorted(by_file, key=lambda item: (-len(item[1]), item[0])),
        max_rows=_MAX_ROWS,
        open_files=_OPEN_FILES,
        problems=outcome.problems,
        num_files=outcome.files,
        version=__version__,
        advice=advice,
        anchor=_anchor,
        excerpt=_excerpt,
        shares=_shares,
    )


def _headline(summary: PortingSummary) -> str:
    if summary.functions:
        return f"{int(summary.share * 100)} % of the step is ready for TPU"
    return "No code of a training or sampling step here"


def _lead(outcome: Outcome) -> str:
    counts = Counter(finding.severity for finding in outcome.shown)
    lead = ", ".join(f"{counts[s]:,} {s} ({MEANING[s]})" for s in RANK if counts[s])
    return f"{plural(len(outcome.shown), 'finding')}{': ' if lead else '.'}{lead}"


def _facts(outcome: Outcome) -> list[str]:
    facts = [f"{count:,} of severity {name} not shown" for name, count in outcome.hidden.items()]
    return facts + ([f"{outcome.baselined:,} in the baseline"] if outcome.baselined else [])


def _sections(outcome: Outcome, summary: PortingSummary) -> dict[str, str]:
    """Return the titles of the sections that have something to show, by their anchors."""
    found: dict[str, str] = {}
    if summary.functions:
        found["functions"] = "Functions of the step"
    if summary.steps:
        found["order"] = "Order of work"
    if outcome.shown:
        found |= {"files": "Files", "findings": "Findings"}
    if outcome.problems:
        found["problems"] = "Not linted"
    return found


def _functions(
    outcome: Outcome, summary: PortingSummary
) -> tuple[list[str], list[tuple[str, str, int]]]:
    """Return the colour of each function, that of its worst finding, and the legend."""
    worst: dict[tuple[str, int, int], Severity] = {}
    for finding in outcome.counted:
        key = (finding.file, finding.cell, finding.function)
        if finding.function:
            worst[key] = min(
                worst.get(key, finding.severity), finding.severity, key=RANK.__getitem__
            )
    counts = Counter(worst.values())
    classes = [severity.value for severity in RANK for _ in range(counts[severity])]
    classes += ["ready"] * (summary.functions - len(classes))
    legend = [(s.value, MEANING[s], counts[s]) for s in RANK if counts[s]]
    clean = summary.functions - sum(counts.values())
    return classes, [*legend, ("ready", "nothing found", clean)]


def _shares(findings: Sequence[Reported]) -> list[tuple[str, bool, int]]:
    """Return the number of findings of each severity, those that can be fixed by themselves."""
    counts = Counter((f.severity, f.safety in ("exact", "close")) for f in findings)
    return [
        (severity.value, fixable, counts[severity, fixable])
        for severity in RANK
        for fixable in (False, True)
        if counts[severity, fixable]
    ]


def _excerpt(finding: Reported) -> Iterator[tuple[str, str, str, str]]:
    """Yield each line's number, and its text before, in and after the finding."""
    width = len(str(finding.line + len(finding.lines) - 1))
    for number, line in enumerate(finding.lines, start=finding.line):
        first, last = number == finding.line, number == finding.end_line
        start = finding.column if first else len(line) - len(line.lstrip())
        end = max(start, finding.end_column if last else len(line.rstrip()))
        yield f"{number:>{width}}", line[:start], line[start:end], line[end:]


def _anchor(finding: Reported) -> str:
    """Return the anchor of a finding's file."""
    return f"f-{finding.file.encode(errors='replace').hex()}"
