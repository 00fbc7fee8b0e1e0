"""A run's outcome as SARIF 2.1.0, the format that code hosts and editors read.

https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tpuport.foundation.version import __version__
from tpuport.lint.catalogue import CatalogueEntry, catalogue
from tpuport.lint.output import Style
from tpuport.lint.records import Outcome, Problem, Reported, Trouble
from tpuport.source.rewrite.finding import Severity

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_LEVELS = {
    Severity.ERROR: "error",
    Severity.SILENT: "error",
    Severity.SLOW: "warning",
    Severity.DEVICE: "note",
    Severity.NOTE: "note",
}


def to_sarif(outcome: Outcome, style: Style) -> str:
    """Write one SARIF run: the rules with findings, the findings, and files not linted."""
    del style
    entries = [entry for entry in catalogue() if any(f.code == entry.code for f in outcome.shown)]
    places = {entry.code: place for place, entry in enumerate(entries)}
    driver = {
        "name": "tpuport",
        "semanticVersion": __version__,
        "rules": [_rule(entry) for entry in entries],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {
                "executionSuccessful": all(
                    problem.trouble is not Trouble.INTERNAL for problem in outcome.problems
                ),
                "toolExecutionNotifications": [_notification(p) for p in outcome.problems],
            }
        ],
        "results": [_result(finding, places) for finding in outcome.shown],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _rule(entry: CatalogueEntry) -> dict[str, Any]:
    page = inspect.cleandoc(entry.page)
    return {
        "id": entry.code,
        "name": entry.name,
        "shortDescription": {"text": page.partition("\n")[0]},
        "fullDescription": {"text": page.partition("\n## Why")[0].replace("## ", "")},
        "help": {"text": page, "markdown": page},
        "defaultConfiguration": {"level": _LEVELS[entry.severity]},
        "properties": {"severity": entry.severity.value, "fix": entry.fix},
    }


def _result(finding: Reported, places: dict[str, int]) -> dict[str, Any]:
    location: dict[str, Any] = {
        "physicalLocation": {
            "artifactLocation": {"uri": _uri(finding.file)},
            "region": {
                "startLine": finding.line,
                "startColumn": finding.column + 1,
                "endLine": finding.end_line,
                "endColumn": finding.end_column + 1,
                "snippet": {"text": "\n".join(finding.lines)},
            },
        }
    }
    if finding.cell:
        location["logicalLocations"] = [{"name": f"cell {finding.cell}", "kind": "cell"}]
    line = " ".join(finding.lines[0].split()) if finding.lines else ""
    text = f"{finding.code}\0{line}".encode()
    return {
        "ruleId": finding.code,
        "ruleIndex": places[finding.code],
        "level": _LEVELS[finding.severity],
        "message": {"text": finding.message},
        "locations": [location],
        "partialFingerprints": {"tpuportLine/v1": hashlib.sha256(text).hexdigest()[:32]},
        "properties": {"severity": finding.severity.value, "fix": finding.safety or "none"},
    }


def _notification(problem: Problem) -> dict[str, Any]:
    level = "note" if problem.trouble is Trouble.SKIPPED else "error"
    artifact = {"artifactLocation": {"uri": _uri(problem.file)}}
    return {
        "level": level,
        "message": {"text": str(problem)},
        "locations": [{"physicalLocation": artifact}],
    }


def _uri(file: str) -> str:
    path = Path(file)
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())
