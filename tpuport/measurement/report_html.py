"""A measurement as one HTML page: no script, nothing loaded, light and dark by preference."""

from tpuport.doctor.finding import Status
from tpuport.foundation.reporting.templates import render
from tpuport.measurement.judging import expectation, shown
from tpuport.measurement.records import Quantity, Result
from tpuport.measurement.report import MeasureReport
from tpuport.measurement.report_text import calibration_lines, share
from tpuport.reports import plots
from tpuport.reports.plots import Bar


def to_html(report: MeasureReport) -> str:
    """Return the report as a page to attach to an issue; its policy forbids loading anything."""
    device = report.outcome.device
    return render(
        "measurement/templates/report.html.j2",
        report=report,
        svg=plots,
        told=[one for one in report.findings if one.status is not Status.OK],
        groups={
            title: [_bar(result) for result in results]
            for title, results in report.groups().items()
        },
        calibration=[] if report.calibration is None else calibration_lines(report.calibration),
        facts=[
            *([] if device is None else [f"{device.count} x {device.kind} ({device.platform})"]),
            report.measured_at,
            *(f"{name} {version}" for name, version in report.versions.items()),
        ],
    )


def _bar(result: Result) -> Bar:
    """Return a row: what share of the expected speed was reached, and the numbers below it."""
    expected = expectation(result)
    numbers = shown(result.value, result)
    if result.kind is Quantity.ERROR:
        numbers += f", {expected} is allowed"
    elif expected:
        numbers += f", {expected} expected"
    amount = result.ratio or 0.0
    if result.kind is Quantity.ERROR and result.expected:
        amount = result.value / result.expected
    return Bar(
        result.name,
        share(result) or numbers,
        min(1.0, amount),
        " · ".join(filter(None, (numbers if share(result) else "", result.remark))),
        result.job,
    )
