"""The report of `tpuport doctor --measure`: the file to calibrate with, a page, and text."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tpuport.cost.calibration import Calibration
from tpuport.doctor.finding import Check, Status
from tpuport.foundation.reporting.json_codec import decoded_text, encoded
from tpuport.foundation.reporting.markup import plural
from tpuport.foundation.reporting.saved_report import SavedReport, plain_text
from tpuport.measurement.judging import calibrate, judge
from tpuport.measurement.records import Measurements, Result

WIDTH = 110
# Groups of results on the page and at the terminal: title by how the names of their jobs begin.
GROUPS = {
    "products": "Matrix products",
    "memory": "Memory",
    "links": "Links",
    "collectives": "Collectives",
    "kernel times": "Times of kernels",
    "kernel": "Kernels against float64",
    "program": "Programs of the recipes",
    "host": "Host",
}


@dataclass(frozen=True)
class MeasureReport(SavedReport):
    """What was measured on a machine, and what follows from it.

    Attributes:
        outcome: Results and troubles.
        findings: What they mean.
        calibration: Rates for `tpuport.compile_for(calibration=)`; None without devices.
        measured_at: Day and time, ISO 8601.
        versions: Installed versions by package.
    """

    outcome: Measurements
    findings: tuple[Check, ...]
    calibration: Calibration | None
    measured_at: str
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def problems(self) -> tuple[Check, ...]:
        """Return the findings that are problems."""
        return tuple(one for one in self.findings if one.status is Status.PROBLEM)

    @property
    def is_meaningless(self) -> bool:
        """Return whether speeds say nothing, as on a CPU."""
        return self.outcome.device is not None and self.outcome.device.small

    def groups(self) -> dict[str, list[Result]]:
        """Return the results by the title of their group."""
        found: dict[str, list[Result]] = {}
        for result in self.outcome.results:
            start = next((one for one in GROUPS if result.job.startswith(one)), None)
            found.setdefault(result.job if start is None else GROUPS[start], []).append(result)
        return found

    def headline(self) -> str:
        """Return the verdict as one sentence."""
        device = self.outcome.device
        where = "this machine" if device is None else f"{device.count} x {device.kind}"
        if self.problems:
            return f"{where}: {plural(len(self.problems), 'problem')}"
        return f"{where}: everything that was tried works"

    def explanation(self) -> str:
        """Return how much was measured, and whether it means something."""
        outcome = self.outcome
        if outcome.device is None:
            return "Nothing was measured: jax cannot have the devices."
        jobs = plural(len(outcome.seconds), "job")
        spent = f"{sum(outcome.seconds.values()):.0f} s"
        text = f"{plural(len(outcome.results), 'number')} of {jobs} in {spent}."
        if self.is_meaningless:
            name = outcome.device.chip
            text += (
                " There is no TPU or GPU here: the same code ran at small sizes, and every speed is"
                f" meaningless (what is expected is of {name}). Errors count."
            )
        return text

    def to_json(self) -> str:
        """Return the report as JSON; `compile_for` reads the calibration in it."""
        return json.dumps(encoded(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "MeasureReport":
        """Read the report that `to_json` wrote.

        Raises:
            UsageError: The text is no such report.
        """
        return decoded_text(cls, text, "measurement")

    def to_html(self) -> str:
        """Return the report as a self-contained page."""
        from tpuport.measurement.report_html import to_html

        return to_html(self)

    def __str__(self) -> str:
        return plain_text(self, WIDTH)

    def __rich__(self) -> Any:
        from tpuport.measurement.report_text import render

        return render(self)


def make_report(
    outcome: Measurements, versions: Mapping[str, str | None], *, has_tpu: bool, measured_at: str
) -> MeasureReport:
    """Judge what was measured.

    Args:
        outcome: What was measured.
        versions: Installed versions by package, None for what is not installed.
        has_tpu: Whether the machine has the device file of a TPU.
        measured_at: Day and time, ISO 8601.
    """
    return MeasureReport(
        outcome,
        tuple(judge(outcome, versions, has_tpu=has_tpu)),
        calibrate(outcome, measured_at, versions),
        measured_at,
        {name: version for name, version in versions.items() if version is not None},
    )
