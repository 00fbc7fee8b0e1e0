"""The data of a port report: what `convert` did to a model, and how it compares with eager.

Neither torch nor jax is imported, so a saved report can be read anywhere.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Literal

from tpuport.reports.records import (
    AttentionCall,
    Branch,
    Divergence,
    HoistedConstant,
    HostPart,
    Parity,
    Record,
    RegisteredOp,
    RepeatedBlocks,
    Retrace,
    Rewrite,
    ShimUse,
    Stage,
    Timing,
)

Verdict = Literal["agrees", "differs", "not verified"]


@dataclass
class ReportData:
    """The fields of a `PortReport`, which documents them, and what follows from them."""

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
    host: list[HostPart] = field(default_factory=list)
    constants: list[HoistedConstant] = field(default_factory=list)
    timing: Timing = field(default_factory=Timing)
    notes: list[str] = field(default_factory=list)

    def add(self, *records: Record) -> None:
        """Append each record to the list of its type."""
        for record in records:
            getattr(self, LIST_OF[type(record)]).append(record)

    def add_worst(self, *records: Parity) -> None:
        """Add compared values of one more call: of each value the worst is kept."""
        known = {(one.kind, one.path): i for i, one in enumerate(self.parity)}
        for record in records:
            index = known.get((record.kind, record.path))
            if index is None:
                self.parity.append(record)
            elif record.used > self.parity[index].used:
                self.parity[index] = record

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


LIST_OF: dict[type, str] = {
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
    HostPart: "host",
}
