"""The report of `tpuport.compile_for`, as text, JSON and a page."""

import json
from dataclasses import dataclass
from typing import Any

from tpuport.aot.records import Captured, HeldMemory, Memory, Seconds, Work
from tpuport.cost.records import Estimate
from tpuport.foundation.reporting.json_codec import decoded_text, encoded
from tpuport.foundation.reporting.saved_report import SavedReport, plain_text
from tpuport.reports.records import AttentionCall


@dataclass(frozen=True)
class CompileReport(SavedReport):
    """A report about a program compiled for a TPU that need not be present.

    Attributes:
        model: the model's class.
        what: `forward`, another method, or `training step`.
        topology: the slice, such as `v6e-8`; "" for a mesh of other devices.
        device: the kind of chip, as JAX calls it.
        mesh: size of each axis.
        rules: the name of the table of rules.
        memory: what one chip holds.
        seconds: how long it took to trace, lower and compile.
        held: arrays of `memory.temporaries` at the peak, the largest first.
        held_is_whole: whether `held` is instead the largest arrays that the program computes, on
            all chips together, because libtpu refused it without a list.
        work: FLOPs, bytes and communication of a step; only the traced program's if libtpu refused
            it.
        estimate: estimated time of a step with its assumptions; None if it was refused.
        attention: which kernel computes each attention of the code, on which line, and why.
        captured: constants of the host that the program holds, the largest first.
        constant_budget: most bytes of these that are not worth a finding.
        optimizer: optimizer of a training step, in words.
        equations: number of equations of the traced program.
        refused: libtpu's message, if it refused the program.
        advice: suggestions for a program that does not fit, the most effective first.
        quick: whether the compiler was told to spend less on making the program fast.
        findings: rules that look unintended, and other remarks.
        versions: versions of the packages that the result depends on.
    """

    model: str
    what: str
    topology: str
    device: str
    mesh: dict[str, int]
    rules: str
    memory: Memory
    seconds: Seconds
    held: tuple[HeldMemory, ...] = ()
    held_is_whole: bool = False
    work: Work | None = None
    estimate: Estimate | None = None
    attention: tuple[AttentionCall, ...] = ()
    captured: tuple[Captured, ...] = ()
    constant_budget: int = 0
    optimizer: str = ""
    equations: int = 0
    refused: str = ""
    quick: bool = False
    advice: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    versions: dict[str, str] | None = None

    @property
    def fits(self) -> bool:
        """Return whether a chip can hold the program."""
        return self.memory.fits

    @property
    def num_chips(self) -> int:
        """Return the number of chips of the mesh."""
        count = 1
        for size in self.mesh.values():
            count *= size
        return count

    @property
    def captured_bytes(self) -> int:
        """Return the bytes of all constants of the host."""
        return sum(one.bytes for one in self.captured)

    def to_json(self) -> str:
        """Return the report as JSON, in bytes and seconds; `from_json` reads it."""
        derived = {"fits": self.fits, "peak": self.memory.peak}
        return json.dumps({**encoded(self), **derived}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "CompileReport":
        """Read the report that `to_json` wrote.

        Raises:
            UsageError: the text is no such report.
        """
        return decoded_text(cls, text, "compile report")

    def to_html(self) -> str:
        """Return the report as a self-contained page."""
        from tpuport.aot.report_html import to_html

        return to_html(self)

    def __str__(self) -> str:
        from tpuport.aot.report_text import WIDTH

        return plain_text(self, WIDTH)

    def __rich__(self) -> Any:
        from tpuport.aot.report_text import render

        return render(self)
