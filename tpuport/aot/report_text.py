"""A compile report on a terminal, through rich."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tpuport.aot.report import CompileReport
from tpuport.foundation.reporting.markup import plural, visible
from tpuport.reports import wording as fmt

WIDTH = 110
_BAR = 36
_MAX_ROWS = 12
_MAX_FINDINGS = 8


def render(report: CompileReport) -> RenderableType:
    """Return the report as a rich renderable: the verdict, then only the sections that apply."""
    mark, color = ("✔", "green") if report.fits else ("✘", "red")
    grid = Table.grid(padding=(0, 1))
    grid.add_row(Text(mark, style=f"bold {color}"), Text(headline(report), style="bold"))
    grid.add_row("", Text(explanation(report)))
    grid.add_row("", Text(setting(report), style="dim"))
    blocks: list[RenderableType] = [grid]
    for title, body in _sections(report):
        blocks += [Text(""), Text(title, style="bold"), Padding(body, (0, 0, 0, 2))]
    return Group(*blocks)


def headline(report: CompileReport) -> str:
    """Return the verdict as one sentence: `LlamaForCausalLM, training step: fits v6e-8`."""
    where = report.topology or plural(report.num_chips, "device")
    verb = "fits" if report.fits else "does not fit"
    return f"{visible(report.model)}, {report.what}: {verb} {where}"


def explanation(report: CompileReport) -> str:
    """Return how much of the memory the program takes, or by how much it is too large."""
    memory = report.memory
    there = fmt.size(memory.available)
    if memory.refused:
        return f"libtpu refuses it: {fmt.size(memory.refused)} a chip needed, {there} available"
    if not report.fits:
        return f"{fmt.size(memory.peak)} a chip needed, {there} available"
    share = memory.peak / max(1, memory.available)
    return f"{fmt.size(memory.peak)} a chip at the peak, {share:.0%} of the {there} available"


def setting(report: CompileReport) -> str:
    """Return chips, mesh, rules and versions in one line."""
    axes = " ".join(f"{name}={size}" for name, size in report.mesh.items() if size > 1)
    parts = [
        f"{report.num_chips} x {report.device}",
        f"mesh {axes or 'of one chip'}",
        f"rules {report.rules or 'of your own'}",
    ]
    if report.optimizer:
        parts.append(f"optimizer {report.optimizer}")
    if report.quick:
        parts.append("compiled quickly, optimised less")
    parts += [f"{name} {version}" for name, version in (report.versions or {}).items()]
    return " · ".join(parts)


def _sections(report: CompileReport) -> Iterator[tuple[str, RenderableType]]:
    yield "Memory of a chip", _bars(list(report.memory.parts().items()))
    if report.advice:
        lines = [Text(f"{i}. {visible(line)}") for i, line in enumerate(report.advice, 1)]
        yield "What to try, in this order", Group(*lines)
    if report.held:
        yield held_title(report), _held(report)
    yield from _work(report)
    if report.estimate is not None:
        yield estimate_title(report), _estimate(report)
    if report.findings:
        yield "Findings", _lines(report.findings, _MAX_FINDINGS)
    if report.captured:
        title = f"Constants of the host in the program, {fmt.size(report.captured_bytes)}"
        rows = [(fmt.size(one.bytes), one.shape, one.name) for one in report.captured]
        yield title, _rows(("bytes", "array", "where"), rows)
    seconds = report.seconds
    spent = [("trace", seconds.trace), ("lower", seconds.lower), ("compile", seconds.compile)]
    words = ", ".join(f"{name} {fmt.seconds(value)}" for name, value in spent)
    yield "Time on this machine", Text(f"{words}; {report.equations:,} equations")


def held_title(report: CompileReport) -> str:
    """Return the title of the list of arrays."""
    if report.held_is_whole:
        return "Largest arrays that it computes, on all chips together"
    return "Temporaries when most is held, on one chip"


def estimate_title(report: CompileReport) -> str:
    """Return the sentence with the estimated time of a step."""
    assert report.estimate is not None
    by = ", by rates measured on a chip" if report.estimate.calibration else ""
    return f"A step would take about {fmt.seconds(report.estimate.seconds)}{by}"


def _held(report: CompileReport) -> RenderableType:
    rows = [
        (
            fmt.size(one.bytes),
            one.shape,
            f"x{one.count}" if one.count > 1 else "",
            one.module or "the model",
            one.operation,
        )
        for one in report.held
    ]
    return _rows(("bytes", "array", "", "module", "operation"), rows)


def _work(report: CompileReport) -> Iterator[tuple[str, RenderableType]]:
    work = report.work
    if work is None:
        return
    rows = [(fmt.tera(one.flops), one.dtypes, f"{one.count:,}") for one in work.products]
    yield flops_title(report), _rows(("TFLOP", "products of", "count"), rows)
    if work.attention:
        rows = [
            (one.kernel, one.shape, f"x{one.count}", one.module or "the model")
            for one in work.attention
        ]
        yield "Attention", _rows(("kernel", "scores", "", "module"), rows)
    if report.attention:
        yield "Attention in the code", _lines(attention_lines(report), _MAX_FINDINGS)
    if work.collectives:
        kinds = ", ".join(f"{kind} {fmt.size(num)}" for kind, num in work.bytes_by_kind().items())
        rows = [
            (
                fmt.size(one.bytes),
                f"{one.kind} of {one.group_size}",
                f"x{one.count}",
                one.module or "no module",
                one.rule,
            )
            for one in work.collectives
        ]
        header = ("bytes", "collective", "", "module", "caused by")
        yield f"Communication of a chip in a step: {kinds}", _rows(header, rows)
    if work.copied_bytes or work.padding_bytes:
        words = (
            f"copies that change a layout write {fmt.size(work.copied_bytes)} a chip in a step;"
            f" tiles add {fmt.size(work.padding_bytes)} to all arrays together"
        )
        yield "Layouts", Text(words)
    if work.unknown:
        yield "Not counted", _lines(work.unknown, _MAX_FINDINGS)


def attention_lines(report: CompileReport) -> list[str]:
    """Return for each attention of the code which kernel computes it, why, and where it is."""
    return [f"{fmt.attention(one)}; {fmt.attention_detail(one)}" for one in report.attention]


def flops_title(report: CompileReport) -> str:
    """Return the FLOPs of the model, and how much of its products chips repeat."""
    assert report.work is not None
    work = report.work
    title = f"FLOPs of a step: {fmt.tera(work.model_flops)} T in the model"
    if work.chip_flops:
        whole, once = work.chip_flops * report.num_chips, sum(one.flops for one in work.products)
        title += f"; products of {fmt.tera(whole)} T on all chips"
        title += f", {whole / once:.2f} times the model's" if once else ""
    return title


def _estimate(report: CompileReport) -> RenderableType:
    assert report.estimate is not None
    grid = Table.grid(padding=(0, 2))
    longest = max((part.seconds for part in report.estimate.parts), default=0) or 1
    for part in report.estimate.parts:
        if part.seconds:
            bar = "█" * max(1, round(_BAR / 2 * part.seconds / longest))
            grid.add_row(
                part.name, Text(bar, style="blue"), fmt.seconds(part.seconds), Text(part.how)
            )
    assumed = [Text(f"- {line}", style="dim") for line in report.estimate.assumptions]
    return Group(grid, *assumed)


def _bars(parts: Sequence[tuple[str, int]]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column()
    grid.add_column(justify="right")
    longest = max((value for _, value in parts), default=0) or 1
    for name, value in parts:
        if value:
            bar = "█" * max(1, round(_BAR * value / longest))
            grid.add_row(name, Text(bar, style="blue"), fmt.size(value))
    return grid


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for index, name in enumerate(header):
        justify = "right" if index == 0 and name in ("bytes", "TFLOP") else "left"
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows[:_MAX_ROWS]:
        table.add_row(*(Text(visible(cell)) for cell in row))
    return Group(table, *_more(len(rows) - _MAX_ROWS))


def _lines(lines: Sequence[str], most: int) -> RenderableType:
    shown = [Text(f"- {visible(line)}") for line in lines[:most]]
    return Group(*shown, *_more(len(lines) - most))


def _more(hidden: int) -> list[Text]:
    return [Text(f"+{hidden} more", style="dim")] if hidden > 0 else []
