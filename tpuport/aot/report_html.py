"""A compile report as one HTML page: no script, nothing loaded, light and dark by preference."""

from typing import Any

from tpuport.aot import report_text
from tpuport.aot.records import Work
from tpuport.aot.report import CompileReport
from tpuport.foundation.reporting.templates import render
from tpuport.reports import plots
from tpuport.reports import wording as fmt
from tpuport.reports.plots import Bar, BarPart

_NUM_ROWS = 16


def to_html(report: CompileReport) -> str:
    """Render the report as a page to open from disk; its policy forbids it to load anything."""
    seconds = report.seconds
    return render(
        "aot/templates/report.html.j2",
        report=report,
        text=report_text,
        svg=plots,
        num_open=_NUM_ROWS,
        memory=_memory(report),
        step=[
            BarPart(one.name, one.seconds, one.name, fmt.seconds(one.seconds), one.how)
            for one in (report.estimate.parts if report.estimate else ())
            if one.seconds
        ],
        compiling=[
            Bar(name, fmt.seconds(value), value)
            for name, value in (
                ("trace", seconds.trace),
                ("lower", seconds.lower),
                ("compile", seconds.compile),
            )
        ],
        held=[
            Bar(
                f"{one.module or 'the model'}{f' x {one.count}' if one.count > 1 else ''}",
                fmt.size(one.bytes),
                one.bytes,
                f"{one.shape} {one.operation}",
            )
            for one in report.held
        ],
        constants=[
            Bar(one.shape, fmt.size(one.bytes), one.bytes, one.name) for one in report.captured
        ],
        calls=report_text.attention_lines(report),
        **_work(report.work or Work(0)),
    )


def _memory(report: CompileReport) -> list[BarPart]:
    amounts = report.memory.parts()
    amounts["free"] = max(0, report.memory.available - report.memory.peak)
    return [
        BarPart(name.partition(" ")[0], amount, name, fmt.size(amount))
        for name, amount in amounts.items()
        if amount
    ]


def _work(work: Work) -> dict[str, list[Any]]:
    """Return what the sections on the work of a step show."""
    remarks = [f"not counted: {line}" for line in work.unknown]
    if work.copied_bytes:
        remarks.append(
            f"copies that change a layout write {fmt.size(work.copied_bytes)} a chip in a step"
        )
    return {
        "remarks": remarks,
        "products": [
            Bar(one.dtypes, f"{fmt.tera(one.flops)} T", one.flops, f"{one.count:,} in a step")
            for one in work.products
        ],
        "fp32": [
            Bar(
                one.module or "no module",
                f"{fmt.tera(one.flops)} T",
                one.flops,
                f"{one.dtypes}, {one.count:,} in a step",
            )
            for one in work.fp32_products
        ],
        "attention": [
            Bar(
                f"{one.module or 'the model'} x {one.count}",
                fmt.size(one.bytes) if one.bytes else "no scores",
                one.bytes,
                f"{one.kernel} {one.shape}",
            )
            for one in work.attention
        ],
        "collectives": [
            Bar(
                f"{one.kind} of {one.group_size} chips x {one.count}",
                fmt.size(one.bytes),
                one.bytes,
                " · ".join(filter(None, (one.module or "no module", one.rule))),
            )
            for one in work.collectives
        ],
    }
