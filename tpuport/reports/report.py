"""The object behind `ported.report`: what a port did, and how exactly it reproduces eager PyTorch.

Data only: `report_text` renders it for a terminal and `report_html` as one self-contained page.
Neither torch nor jax is imported, so a saved report can be read anywhere.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from tpuport.foundation.errors import UsageError
from tpuport.foundation.reporting.saved_report import SavedReport, plain_text
from tpuport.reports.records import AttentionCall as AttentionCall
from tpuport.reports.records import Branch as Branch
from tpuport.reports.records import Divergence as Divergence
from tpuport.reports.records import HoistedConstant as HoistedConstant
from tpuport.reports.records import Kind as Kind
from tpuport.reports.records import Parity as Parity
from tpuport.reports.records import Record as Record
from tpuport.reports.records import RegisteredOp as RegisteredOp
from tpuport.reports.records import RepeatedBlocks as RepeatedBlocks
from tpuport.reports.records import Retrace as Retrace
from tpuport.reports.records import Rewrite as Rewrite
from tpuport.reports.records import ShimUse as ShimUse
from tpuport.reports.records import Stage as Stage
from tpuport.reports.records import Timing as Timing
from tpuport.reports.records import from_plain, to_plain

if TYPE_CHECKING:
    from rich.console import RenderableType

Verdict = Literal["agrees", "differs", "not verified"]
_FORMAT = 1


@dataclass
class PortReport(SavedReport):
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

    model: str
    _: KW_ONLY
    class_file: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    num_parameters: int = 0
    parameter_bytes: int = 0
    num_buffers: int = 0
    buffer_bytes: int = 0
    verified: bool | None = None
    why_not_verified: str = ""
    parity: list[Parity] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    rewrites: list[Rewrite] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    shims: list[ShimUse] = field(default_factory=list)
    registered_ops: list[RegisteredOp] = field(default_factory=list)
    retraces: list[Retrace] = field(default_factory=list)
    attention: list[AttentionCall] = field(default_factory=list)
    blocks: list[RepeatedBlocks] = field(default_factory=list)
    constants: list[HoistedConstant] = field(default_factory=list)
    timing: Timing = field(default_factory=Timing)
    notes: list[str] = field(default_factory=list)

    def add(self, *records: Record) -> None:
        """Append each record to the list of its type."""
        for record in records:
            getattr(self, _LIST_OF[type(record)]).append(record)

    @contextmanager
    def timed(self, stage: Stage) -> Iterator[None]:
        """Add the seconds spent inside the `with` block to a stage, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = getattr(self.timing, stage) + time.perf_counter() - start
            self.timing = replace(self.timing, **{stage: spent})

    @property
    def verdict(self) -> Verdict:
        """Return the verdict of the comparison; a port that compared nothing never "agrees"."""
        if self.verified is False or self.divergences or not all(p.ok for p in self.parity):
            return "differs"
        return "agrees" if self.verified and self.parity else "not verified"

    @property
    def ok(self) -> bool:
        """Return whether values were compared and all of them agree."""
        return self.verdict == "agrees"

    @property
    def by_severity(self) -> list[Parity]:
        """Return the compared values, worst first."""
        return sorted(self.parity, key=lambda p: (-p.used, p.path))

    @property
    def worst(self) -> Parity | None:
        """Return the value that uses most of its tolerance, or None where nothing was compared."""
        return min(self.parity, key=lambda p: (-p.used, p.path), default=None)

    def __str__(self) -> str:
        """Return plain text of at most 100 columns, without colour codes."""
        from tpuport.reports.text import WIDTH

        return plain_text(self, WIDTH)

    def __rich__(self) -> "RenderableType":
        """Return the renderable that rich prints, at the width of the terminal."""
        from tpuport.reports.text import render

        return render(self)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data; a float that JSON cannot hold becomes `"nan"`, `"inf"` or
        `"-inf"`.
        """
        derived = {"format": _FORMAT, "ok": self.ok, "verdict": self.verdict}
        return derived | to_plain(self)

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
        given: dict[str, Any] = {f.name: data[f.name] for f in fields(cls)}
        for record, name in _LIST_OF.items():
            given[name] = [from_plain(record, item) for item in given[name]]
        given["timing"] = from_plain(Timing, given["timing"])
        return cls(**given)

    def to_json(self) -> str:
        """Return the report as standard JSON, indented."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return a report from the text of `to_json`; raise UsageError as `from_dict` does."""
        return cls.from_dict(json.loads(text))

    def to_html(self) -> str:
        """Return the report as one self-contained HTML page."""
        from tpuport.reports.html import to_html

        return to_html(self)


_LIST_OF: dict[type, str] = {
    Parity: "parity",
    Divergence: "divergences",
    Rewrite: "rewrites",
    Branch: "branches",
    ShimUse: "shims",
    RegisteredOp: "registered_ops",
    Retrace: "retraces",
    AttentionCall: "attention",
    RepeatedBlocks: "blocks",
    HoistedConstant: "constants",
}
