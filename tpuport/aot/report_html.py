"""A compile report as one HTML page: no script, nothing loaded, light and dark by preference."""

from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files

from tpuport.aot.report import CompileReport
from tpuport.aot.report_text import estimate_title, explanation, headline, held_title, setting
from tpuport.foundation.reporting.markup import Markup, join, page, tag
from tpuport.reports import wording as fmt
from tpuport.reports.plots import bar, stacked_bar

_NUM_ROWS = 16

# Name and value of one row, the text below it, and the amount that its bar shows.
_Row = tuple[str, str, str, float]


def to_html(report: CompileReport) -> str:
    """Render the report as a page to open from disk; its policy forbids it to load anything."""
    sections = [
        tag("section", tag("h2", title), body, id=name)
        for name, title, body in _sections(report)
        if body
    ]
    main = tag("main", _header(report), *sections)
    style = files("tpuport.aot").joinpath("report.css").read_text(encoding="utf-8")
    return page(headline(report), main, style=style)


def _header(report: CompileReport) -> Markup:
    mark = tag("span", "✓" if report.fits else "✕", class_="mark", aria_hidden="true")
    lead = tag("p", f"{explanation(report)}.", class_="lead")
    facts = tag("p", setting(report), class_="facts")
    body = tag("div", tag("h1", headline(report)), lead, facts)
    return tag("header", mark, body, class_="roomy" if report.fits else "tight")


def _sections(report: CompileReport) -> Iterator[tuple[str, str, Markup | str]]:
    yield "memory", "Memory of a chip", _memory(report)
    yield "advice", "What to try, in this order", _list(report.advice, "ol")
    yield "held", held_title(report), _held(report)
    if report.estimate is not None:
        yield "time", estimate_title(report), _time(report)
    yield "products", "FLOPs of products, by dtypes of both operands", _products(report)
    yield "fp32", "Products with float32 operands", _fp32(report)
    yield "attention", "Attention", _attention(report)
    yield "collectives", "Communication of a chip in a step", _collectives(report)
    yield "findings", "Findings", _list([*report.findings, *_remarks(report)], "ul")
    yield "constants", "Constants of the host in the program", _constants(report)
    yield "compiling", "Time on this machine", _compiling(report)


def _memory(report: CompileReport) -> Markup:
    parts = [(name, value) for name, value in report.memory.parts().items() if value]
    pieces = [(name.partition(" ")[0], float(value)) for name, value in parts]
    free = report.memory.available - report.memory.peak
    said = ", ".join(f"{name} {fmt.size(value)}" for name, value in parts)
    if free > 0:
        pieces.append(("free", float(free)))
        said += f", {fmt.size(free)} free"
        parts.append(("free", free))
    legend = [
        tag("li", tag("i", class_=name.partition(" ")[0]), name, tag("b", fmt.size(value)))
        for name, value in parts
    ]
    return join([stacked_bar(pieces, said), tag("ul", *legend, class_="legend")])


def _held(report: CompileReport) -> Markup | str:
    return _rows(
        (
            f"{one.module or 'the model'}{f' x {one.count}' if one.count > 1 else ''}",
            fmt.size(one.bytes),
            f"{one.shape} {one.operation}",
            one.bytes,
        )
        for one in report.held
    )


def _time(report: CompileReport) -> Markup:
    assert report.estimate is not None
    parts = [part for part in report.estimate.parts if part.seconds]
    said = ", ".join(f"{part.name} {fmt.seconds(part.seconds)}" for part in parts)
    legend = [
        tag("li", tag("i", class_=p.name), p.name, tag("b", fmt.seconds(p.seconds)), f" {p.how}")
        for p in parts
    ]
    picture = stacked_bar([(p.name, p.seconds) for p in parts], said) if parts else ""
    assumed = [tag("li", line) for line in report.estimate.assumptions]
    return join(
        [picture, tag("ul", *legend, class_="legend"), tag("ul", *assumed, class_="assumed")]
    )


def _products(report: CompileReport) -> Markup | str:
    found = report.work.products if report.work else ()
    return _rows(
        (one.dtypes, f"{fmt.tera(one.flops)} T", f"{one.count:,} in a step", one.flops)
        for one in found
    )


def _fp32(report: CompileReport) -> Markup | str:
    found = report.work.fp32_products if report.work else ()
    return _rows(
        (
            one.module or "no module",
            f"{fmt.tera(one.flops)} T",
            f"{one.dtypes}, {one.count:,} in a step",
            one.flops,
        )
        for one in found
    )


def _attention(report: CompileReport) -> Markup | str:
    found = report.work.attention if report.work else ()
    return _rows(
        (
            f"{one.module or 'the model'} x {one.count}",
            fmt.size(one.bytes) if one.bytes else "no scores",
            f"{one.kernel} {one.shape}",
            one.bytes,
        )
        for one in found
    )


def _collectives(report: CompileReport) -> Markup | str:
    found = report.work.collectives if report.work else ()
    return _rows(
        (
            f"{one.kind} of {one.group_size} chips x {one.count}",
            fmt.size(one.bytes),
            " · ".join(filter(None, (one.module or "no module", one.rule))),
            one.bytes,
        )
        for one in found
    )


def _remarks(report: CompileReport) -> list[str]:
    work = report.work
    if work is None:
        return []
    remarks = [f"not counted: {line}" for line in work.unknown]
    if work.copied_bytes:
        remarks.append(
            f"copies that change a layout write {fmt.size(work.copied_bytes)} a chip in a step"
        )
    return remarks


def _constants(report: CompileReport) -> Markup | str:
    return _rows((one.shape, fmt.size(one.bytes), one.name, one.bytes) for one in report.captured)


def _compiling(report: CompileReport) -> Markup:
    seconds = report.seconds
    parts = [("trace", seconds.trace), ("lower", seconds.lower), ("compile", seconds.compile)]
    return join(
        [
            _rows((name, fmt.seconds(value), "", value) for name, value in parts),
            tag("p", f"{report.equations:,} equations in the traced program", class_="how"),
        ]
    )


def _rows(rows: Iterable[_Row]) -> Markup | str:
    rows = list(rows)
    most = max((row[3] for row in rows), default=0) or 1
    made = [_row(row, most) for row in rows]
    if not made:
        return ""
    shown, rest = made[:_NUM_ROWS], made[_NUM_ROWS:]
    parts = [tag("div", *shown, class_="plot")]
    if rest:
        more = tag("summary", f"{len(rest):,} smaller ones")
        parts.append(tag("details", more, tag("div", *rest, class_="plot"), class_="all"))
    return join(parts)


def _row(row: _Row, most: float) -> Markup:
    name, value, under, amount = row
    share = amount / most
    return tag(
        "div",
        tag("span", tag("code", name), class_="name"),
        bar(share, f"{name}: {value}") if share else tag("span"),
        tag("span", value, class_="value"),
        tag("code", under, class_="under") if under else "",
        class_="row",
    )


def _list(lines: Sequence[str], kind: str) -> Markup | str:
    return tag(kind, *(tag("li", line) for line in lines)) if lines else ""
