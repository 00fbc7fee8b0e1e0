"""A measurement on a terminal, through rich."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tpuport.cost.calibration import Calibration
from tpuport.doctor.finding import Check, Status
from tpuport.foundation.reporting.markup import visible
from tpuport.measurement.judging import expectation, rate, scaled, shown
from tpuport.measurement.records import Quantity, Result
from tpuport.measurement.report import MeasureReport

_LOOKS = {Status.PROBLEM: "bold red", Status.NOTE: "yellow"}


def render(report: MeasureReport) -> RenderableType:
    """Return the report as a rich renderable: the verdict, findings, then the numbers."""
    mark, color = ("✘", "red") if report.problems else ("✔", "green")
    head = Table.grid(padding=(0, 1))
    head.add_row(Text(mark, style=f"bold {color}"), Text(report.headline(), style="bold"))
    head.add_row("", Text(report.explanation()))
    blocks: list[RenderableType] = [head]
    for title, body in _sections(report):
        blocks += [Text(""), Text(title, style="bold"), Padding(body, (0, 0, 0, 2))]
    return Group(*blocks)


def _sections(report: MeasureReport) -> Iterable[tuple[str, RenderableType]]:
    told = [one for one in report.findings if one.status is not Status.OK]
    if told:
        yield "Findings", _findings(told)
    for title, results in report.groups().items():
        yield title, _numbers(results)
    if report.calibration is not None:
        yield "Calibration", Group(*map(Text, calibration_lines(report.calibration)))


def _findings(findings: list[Check]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for one in findings:
        status = Text(one.status, style=_LOOKS[one.status])
        grid.add_row(status, one.topic, Text(visible(one.text), overflow="fold"))
        if one.fix:
            grid.add_row("", "", Text(visible(one.fix), style="dim", overflow="fold"))
    return grid


def _numbers(results: list[Result]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for header in ("", "measured", "expected", "", ""):
        table.add_column(header, overflow="fold")
    for one in results:
        table.add_row(
            *(visible(one.name), shown(one.value, one), expectation(one), share(one)),
            Text(visible(one.remark), style="dim"),
        )
    return table


def share(result: Result) -> str:
    """Return the share of the expected speed, or whether an error is within its limit."""
    if result.kind is Quantity.ERROR:
        return "equal" if result.value <= (result.expected or 0) else "differs"
    return "" if result.ratio is None else f"{result.ratio:.0%}"


def calibration_lines(found: Calibration) -> list[str]:
    """Return the rates that `compile_for` would take, one a line."""
    rates = (
        ("products", found.dense_efficiency, "{:.1%} of the peak".format),
        ("int8 products", found.int8_ops, lambda x: scaled(x, "op/s")),
        ("memory", found.hbm_bandwidth, rate),
        ("a link, one way", found.ici_link_bandwidth, rate),
        ("kernels", found.kernel_factor, "{:.3g} times their schedules".format),
    )
    lines = [f"{name}: {words(value)}" for name, value, words in rates if value is not None]
    if found.platform != "tpu":
        return [*lines, f"measured on {found.device_kind}: compile_for refuses to estimate by it"]
    return [*lines, 'tpuport.compile_for(..., calibration="measurement.json")']
