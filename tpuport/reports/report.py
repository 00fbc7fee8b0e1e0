"""The object behind `ported.report`: what a port did, and how exactly it equals eager PyTorch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from rich.console import RenderableType

from tpuport.foundation.errors import UsageError
from tpuport.foundation.reporting.json_codec import decoded, encoded
from tpuport.foundation.reporting.saved_report import SavedReport, plain_text
from tpuport.reports.data import ReportData
from tpuport.reports.html import to_html
from tpuport.reports.text import WIDTH, render

_FORMAT = 1


@dataclass
class PortReport(ReportData, SavedReport):
    """A record of what `convert` did to a model, and how it compares with eager PyTorch.

    `str(report)` is plain text, `rich.print(report)` the same in colour. A report is filled while
    the port runs: `add` takes any record, `timed` measures a stage.

    Attributes:
        model: Class of the model.
        class_file: File that defines the class.
        versions: Package name to version.
        num_parameters: Elements over all parameters, a tied weight once.
        parameter_bytes: Bytes of all parameters.
        num_buffers: Elements over all buffers.
        buffer_bytes: Bytes of all buffers.
        verified: Whether the comparison ran and agreed; None where it did not run.
        why_not_verified: Why it did not run or did not agree, as a clause without a full stop.
        notes: Sentences for the reader.
    """

    def __str__(self) -> str:
        """Return plain text of at most 100 columns, without colour codes."""
        return plain_text(self, WIDTH)

    def __rich__(self) -> RenderableType:
        """Return the renderable that rich prints, at the width of the terminal."""
        return render(self)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data; a float that JSON cannot hold becomes `"nan"`, `"inf"` or
        `"-inf"`.
        """
        derived = {"format": _FORMAT, "ok": self.ok, "verdict": self.verdict}
        return derived | encoded(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return a report from the data of `to_dict`.

        Raises:
            UsageError: The data is not a report of this format.
        """
        if data.get("format") != _FORMAT:
            raise UsageError(
                f"Expected a port report of format {_FORMAT}, got format {data.get('format')!r}: "
                "read it with the tpuport version that wrote it."
            )
        return decoded(cls, data)

    def to_json(self) -> str:
        """Return the report as standard JSON, indented."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return a report from the text of `to_json`; raise UsageError as `from_dict` does."""
        return cls.from_dict(json.loads(text))

    def to_html(self) -> str:
        """Return the report as one self-contained HTML page."""
        return to_html(self)
