"""`report.json` and `report.html` of `tpuport port`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpuport.foundation.files import write_atomically
from tpuport.foundation.reporting.templates import render
from tpuport.foundation.version import __version__
from tpuport.repository.stages import DONE, FAILED, NEEDS_YOU, StageRecord

DOES_NOT_FIT = "does not fit"
# What a person asks, and the stage that answers it.
QUESTIONS = {
    "What is there to start?": "entry",
    "What stands in the way?": "read",
    "What can be rewritten without a doubt?": "patch",
    "Can it run, and is it equal?": "verify",
    "Does it fit, and what does a step cost?": "fit",
}
_HOW = {
    "read": "from the source, nothing was run",
    "run": "by running it on this machine",
    "compiled": "by compiling for the slice, which was not there",
}


@dataclass(frozen=True)
class RepositoryReport:
    """What `tpuport port` found.

    Attributes:
        repository: The folder.
        slice_name: The slice of TPUs that was asked about.
        stages: The stages by name.
        files: What is in the folder of results, by what it is for.
    """

    repository: str
    slice_name: str
    stages: dict[str, StageRecord]
    files: dict[str, str]

    @property
    def passed(self) -> bool:
        """Return whether no stage failed or waits for a person."""
        return not any(one.state in (FAILED, NEEDS_YOU) for one in self.stages.values())

    @property
    def outcome(self) -> str:
        """Return the worst of the stages: `failed`, `does not fit`, `needs you`, or `done`."""
        states = {one.state for one in self.stages.values()}
        fit = self.stages["fit"]
        if any(one.state == FAILED for one in self.stages.values() if one is not fit):
            return FAILED
        if fit.state == FAILED:
            return DOES_NOT_FIT if "compiled" in fit.result else FAILED
        return NEEDS_YOU if NEEDS_YOU in states else DONE

    @property
    def next_steps(self) -> list[str]:
        """Return what a person has to do, in order."""
        return [f"{one.name}: {one.next}" for one in self.stages.values() if one.next]

    def to_json(self) -> str:
        """Return everything as JSON; the keys are documented in docs/port.md."""
        found: dict[str, Any] = {
            "tpuport": __version__,
            **asdict(self),
            "passed": self.passed,
            "outcome": self.outcome,
            "next_steps": self.next_steps,
        }
        return json.dumps(found, indent=1)

    def to_html(self) -> str:
        """Return the page."""
        rows = [(question, self.stages[name]) for question, name in QUESTIONS.items()]
        checks = [
            {"stage": stage["name"], **check}
            for stage in self._verification().get("stages", ())
            for check in stage["checks"]
        ]
        return render(
            "repository/templates/port.html.j2",
            report=self,
            rows=rows,
            how=_HOW,
            checks=checks,
            notes=self._verification().get("notes", ()),
            undecided=self._verification().get("undecided", ""),
            todo=self.stages["read"].result.get("todo", []),
            candidates=self.stages["entry"].result.get("candidates", []),
            arguments=self.stages["entry"].result.get("arguments"),
            seen=[
                (name, kind, one)
                for name in ("verify", "fit")
                for kind, found in self.stages[name].result.get("seen", {}).items()
                for one in found
            ],
            version=__version__,
            DONE=DONE,
        )

    def _verification(self) -> dict[str, Any]:
        return self.stages["verify"].result.get("verification", {})

    def save(self, folder: Path) -> None:
        """Write `report.json` and `report.html`."""
        write_atomically(folder / "report.json", self.to_json().encode())
        write_atomically(folder / "report.html", self.to_html().encode(errors="backslashreplace"))


def read_stages(folder: Path) -> dict[str, StageRecord]:
    """Return the stages of an earlier call; none if there was none or its file cannot be read."""
    try:
        found = json.loads((folder / "report.json").read_text())
        return {name: StageRecord(**one) for name, one in found["stages"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def is_ours(folder: Path) -> bool:
    """Return whether a folder is empty, or holds the results of an earlier call."""
    if not folder.exists() or read_stages(folder):
        return True
    # A call that was killed before its first report leaves the start of one.
    return all(path.name.startswith(".report.") for path in folder.iterdir())


def lines(report: RepositoryReport) -> Sequence[str]:
    """Return the report for a terminal: a line for each question, then what to do."""
    marks = {DONE: "✔", FAILED: "✘", NEEDS_YOU: "?"}
    found = [
        f"{marks.get(report.stages[name].state, '·')} {question}\n    {report.stages[name].answer}"
        for question, name in QUESTIONS.items()
    ]
    if report.next_steps:
        found += ["What to do next:", *(f"    {step}" for step in report.next_steps)]
    return found
