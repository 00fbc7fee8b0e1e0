"""A run's outcome for programs: JSON and the annotations of GitHub's workflows."""

import json
from dataclasses import asdict
from typing import Any

from tpuport.foundation.version import __version__
from tpuport.lint.output import Style
from tpuport.lint.records import Outcome, Problem, Reported, Trouble
from tpuport.lint.summary import summarise
from tpuport.source.rewrite.finding import Severity

FORMAT = 1
_LEVELS = {
    Severity.ERROR: "error",
    Severity.SILENT: "error",
    Severity.SLOW: "warning",
    Severity.DEVICE: "notice",
    Severity.NOTE: "notice",
}


def to_json(outcome: Outcome, style: Style) -> str:
    """Write a JSON object with findings, problems and summary; lines and columns from 1."""
    del style
    summary = summarise(outcome)
    content = {
        "format": FORMAT,
        "tool": {"name": "tpuport", "version": __version__},
        "findings": [_finding(finding) for finding in outcome.shown],
        "problems": [_problem(problem) for problem in outcome.problems],
        "hidden": dict(outcome.hidden),
        "baselined": outcome.baselined,
        "files": outcome.files,
        "summary": {**asdict(summary), "share": round(summary.share, 4)},
    }
    return json.dumps(content, indent=1) + "\n"


def _finding(finding: Reported) -> dict[str, Any]:
    return {
        "file": finding.file,
        "cell": finding.cell or None,
        "line": finding.line,
        "column": finding.column + 1,
        "end_line": finding.end_line,
        "end_column": finding.end_column + 1,
        "code": finding.code,
        "rule": finding.rule,
        "severity": finding.severity.value,
        "message": finding.message,
        "fix": finding.safety or None,
    }


def _problem(problem: Problem) -> dict[str, str]:
    return {"file": problem.file, "reason": problem.reason, "kind": problem.trouble.value}


def to_github(outcome: Outcome, style: Style) -> str:
    """Write a workflow command for each finding, which GitHub shows next to the line."""
    del style
    lines = [_annotation(finding) for finding in outcome.shown]
    for problem in outcome.problems:
        level = "notice" if problem.trouble is Trouble.SKIPPED else "error"
        place = f"file={_escaped(problem.file, inside=True)}"
        lines.append(f"::{level} title=tpuport,{place}::{_escaped(str(problem))}")
    return "".join(f"{line}\n" for line in lines)


def _annotation(finding: Reported) -> str:
    fields = {
        "title": f"tpuport {finding.code}",
        "file": finding.file,
        "line": finding.line,
        "col": finding.column + 1,
        "endLine": finding.end_line,
        "endColumn": finding.end_column + 1,
    }
    if finding.cell:
        # A line of a cell is no line of the file.
        fields = {"title": fields["title"], "file": fields["file"]}
    written = ",".join(f"{name}={_escaped(value, inside=True)}" for name, value in fields.items())
    message = f"{finding.place}: {finding.code} {finding.message}"
    return f"::{_LEVELS[finding.severity]} {written}::{_escaped(message)}"


def _escaped(value: object, *, inside: bool = False) -> str:
    """Escape text as GitHub's actions toolkit does; `inside` for a value before the `::`."""
    text = str(value).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if inside else text
