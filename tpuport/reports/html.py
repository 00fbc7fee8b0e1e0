"""The port report as one HTML page: no script, nothing loaded, light and dark by preference."""

import difflib
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files

from tpuport.foundation.reporting.markup import Markup, join, page, plural, tag
from tpuport.reports import plots as svg
from tpuport.reports import wording as fmt
from tpuport.reports.data import ReportData
from tpuport.reports.plots import ErrorScale
from tpuport.reports.records import STAGES, Divergence, Parity, Retrace, Rewrite

_SWARM_FROM = 9  # with fewer values the rows alone show everything
_WORST_ROWS = 10
_OPEN_REWRITES = 4
_LARGEST_CONSTANTS = 12
_MARKS = {"agrees": "✓", "differs": "✕", "not verified": "?"}
_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z0-9])|(?<=[A-Z0-9])(?=[A-Z][a-z])|(?<=_)")
_TOKENS = re.compile(r"\w+|\s+|[^\w\s]")


def to_html(report: ReportData) -> str:
    """Return the report as a page to open from disk or attach; its policy forbids loading anything.

    Names, paths and source lines are shown as text, whatever they contain.
    """
    sections = list(_sections(report))
    links = [
        tag("a", summary, href=f"#{name}")
        for name, _, summary, _ in sections
        if summary is not None
    ]
    bodies = [tag("section", tag("h2", title), body, id=name) for name, title, _, body in sections]
    main = tag("main", _verdict(report), tag("nav", *links) if links else "", *bodies)
    footer = tag("footer", " · ".join(fmt.versions(report)))
    return page(fmt.headline(report), main, footer, style=style())


def style() -> str:
    """Return the style sheet of port reports."""
    return files("tpuport.reports").joinpath("report.css").read_text(encoding="utf-8")


def sections_of(report: ReportData) -> list[Markup]:
    """Return the parts of a report, for a page about several reports."""
    parts = [tag("section", tag("h3", title), body) for _, title, _, body in _sections(report)]
    return [_verdict(report), *parts]


def _verdict(report: ReportData) -> Markup:
    before, model, after = fmt.headline(report).partition(report.model)
    words = [part for word in _WORDS.split(model) for part in (tag("wbr"), word)]
    title = tag("h1", before, tag("code", *words), after)
    mark = tag("span", _MARKS[report.verdict], class_="mark", aria_hidden="true")
    return tag(
        "header",
        mark,
        tag(
            "div",
            title,
            tag("p", fmt.explanation(report), class_="lead"),
            *(tag("p", fact, class_="facts") for fact in [" · ".join(fmt.facts(report))] if fact),
        ),
        class_=report.verdict.replace(" ", "-"),
    )


def _sections(report: ReportData) -> Iterator[tuple[str, str, str | None, Markup]]:
    """Yield the anchor, title, link text and body of each section that is not empty."""
    scale = svg.scale_of(report.parity, report.divergences)
    if report.divergences:
        body = join(_divergence(found, scale) for found in report.divergences)
        yield "divergence", "Where it first differs", "first difference", body
    if report.notes:
        yield "notes", "Notes", None, tag("ul", *(tag("li", note) for note in report.notes))
    if report.parity:
        summary = plural(len(report.parity), "value")
        yield "parity", "Agreement with eager PyTorch", summary, _parity(report, scale)
    if report.rewrites:
        summary = plural(len(report.rewrites), "rewrite")
        yield "rewrites", "Source that was rewritten", summary, _rewrites(report.rewrites)
    yield from _substitutions(report)
    yield from _compilation(report)


def _substitutions(report: ReportData) -> Iterator[tuple[str, str, str, Markup]]:
    if report.branches:
        body = join(
            _item(tag("code", b.source.strip()), "", b.how, fmt.place(b.file, b.line))
            for b in report.branches
        )
        summary = plural(len(report.branches), "traced branch")
        yield "branches", "Branches decided on the device", summary, body
    if report.shims:
        body = join(
            _item(s.name, _calls(s.calls), s.reason, tag("code", s.target)) for s in report.shims
        )
        summary = plural(len(report.shims), "shim")
        yield "shims", "Calls served by a shim", summary, body
    if report.registered_ops:
        body = join(
            _item(tag("code", op.name), _calls(op.calls), op.reason) for op in report.registered_ops
        )
        summary = plural(len(report.registered_ops), "own lowering")
        yield "ops", "Ops that tpuport lowers itself", summary, body
    if report.attention:
        body = join(_item(fmt.attention(a), "", fmt.attention_detail(a)) for a in report.attention)
        summary = plural(len(report.attention), "sort of attention")
        yield "attention", "Attention kernels", summary, body
    if report.blocks:
        body = join(_item(fmt.blocks(b), "", fmt.blocks_detail(b)) for b in report.blocks)
        summary = f"{plural(len(report.blocks), 'set')} of blocks that are alike"
        yield "blocks", "Repeated blocks", summary, body


def _compilation(report: ReportData) -> Iterator[tuple[str, str, str, Markup]]:
    if report.retraces:
        body = join(_retrace(retrace) for retrace in report.retraces)
        summary = plural(len(report.retraces), "retrace")
        yield "retraces", "Causes of retraces", summary, body
    if report.constants:
        total = fmt.size(sum(c.bytes for c in report.constants))
        title = "Constants passed as arguments"
        yield "constants", title, f"{total} of constants", _constants(report)
    if report.timing.total:
        total = fmt.seconds(report.timing.total)
        yield "time", "Where the time went", f"{total} in all", _timing(report)


def _divergence(found: Divergence, scale: ErrorScale) -> Markup:
    rows = [("its inputs", found.input_max_rel, "ok"), ("its output", found.max_rel, "bad")]
    head = tag(
        "p",
        "Everything that runs before ",
        tag("code", found.module),
        " (",
        tag("code", found.cls),
        ") agrees; its own output does not.",
    )
    dots = join(
        tag(
            "div",
            tag("span", name, class_="name"),
            svg.track(error, look, scale),
            tag("span", fmt.number(error), class_="value"),
            class_="row",
        )
        for name, error, look in rows
    )
    last = tag("div", tag("span"), svg.axis(scale), tag("span"), class_="row axis-row")
    return tag("div", head, dots, last, class_="plot")


def _parity(report: ReportData, scale: ErrorScale) -> Markup:
    ordered = report.by_severity
    parts = [
        tag(
            "p",
            "Each dot is one value. It stands at its largest error, relative to the size of that "
            "value; the shaded side is out of tolerance. ",
            "A ring was accepted for its absolute error."
            if any(svg.look(p) == "ring" for p in ordered)
            else "",
            class_="how",
        )
    ]
    if len(ordered) >= _SWARM_FROM:
        parts.append(svg.swarm(report.parity, scale))
        parts.append(tag("h3", "Closest to their tolerance" if report.ok else "Worst first"))
    shown = ordered[: max(_WORST_ROWS, sum(not p.ok for p in ordered[: 2 * _WORST_ROWS]))]
    parts.append(
        tag(
            "div",
            *(_value(p, scale) for p in shown),
            tag("div", tag("span"), svg.axis(scale), tag("span"), class_="row axis-row"),
            class_="plot",
        )
    )
    if len(ordered) > len(shown):
        parts.append(
            tag(
                "details",
                tag("summary", f"All {plural(len(ordered), 'value')}"),
                _table(ordered),
                class_="all",
            )
        )
    return join(parts)


def _value(p: Parity, scale: ErrorScale) -> Markup:
    """Return one row of the dot plot, which opens to the numbers behind it."""
    error, allowed = fmt.error_and_limit(p)
    row = tag(
        "summary",
        tag("code", p.path, class_="name"),
        svg.track(svg.plotted(p), svg.look(p), scale, limit=p.tolerance),
        tag("span", "—" if p.problem else error, class_="value"),
        class_="row",
    )
    known = [
        ("value", f"{p.kind} {fmt.array(p.dtype, p.shape)}"),
        ("worst element", fmt.worst_element(p)),
        ("largest error", f"{fmt.number(p.max_abs)} absolute, {fmt.number(p.max_rel)} relative"),
        ("allowed", allowed),
    ]
    terms = [cell for name, text in known for cell in (tag("dt", name), tag("dd", text))]
    return tag("details", row, tag("dl", *terms), class_=None if p.ok else "failed")


def _table(parity: Sequence[Parity]) -> Markup:
    titles = ("value", "dtype and shape", "error", "allowed", "worst element")
    rows = [
        tag(
            "tr",
            tag("td", tag("code", p.path)),
            tag("td", tag("code", fmt.array(p.dtype, p.shape))),
            *(tag("td", text, class_="number") for text in fmt.error_and_limit(p)),
            tag("td", fmt.worst_element(p)),
            class_=None if p.ok else "failed",
        )
        for p in parity
    ]
    header = tag("thead", tag("tr", *(tag("th", title) for title in titles)))
    return tag("div", tag("table", header, tag("tbody", *rows)), class_="scroll")


def _rewrites(rewrites: Sequence[Rewrite]) -> Markup:
    return join(
        tag(
            "details",
            tag(
                "summary",
                tag("span", r.code, class_="code"),
                tag("span", r.safety, class_="safety"),
                tag("span", fmt.place(r.file, r.line), class_="place", title=r.file),
            ),
            _diff(r.before, r.after),
            open=i < _OPEN_REWRITES,
            class_="rewrite",
        )
        for i, r in enumerate(rewrites)
    )


def _diff(before: str, after: str) -> Markup:
    """Return both versions side by side, aligned by line, with changes inside a line marked."""
    old, new = before.strip("\n").splitlines(), after.strip("\n").splitlines()
    left: list[Markup] = []
    right: list[Markup] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
        for i in range(max(b - a, d - c)):
            was = old[a + i] if a + i < b else None
            now = new[c + i] if c + i < d else None
            marks = _inside(was, now) if kind == "replace" and was and now else None
            left.append(_line(was, kind, "del", marks and marks[0]))
            right.append(_line(now, kind, "ins", marks and marks[1]))
    return tag("div", tag("pre", *left), tag("pre", *right), class_="diff")


def _line(text: str | None, kind: str, change: str, marked: Markup | None) -> Markup:
    if text is None:
        return tag("span", "\n", class_="none")
    class_ = "same" if kind == "equal" else change
    return tag("span", marked if marked is not None else text, "\n", class_=class_)


def _inside(was: str, now: str) -> tuple[Markup, Markup] | None:
    """Return two lines with the differing tokens marked, or None where little is shared."""
    a, b = _TOKENS.findall(was), _TOKENS.findall(now)
    matcher = difflib.SequenceMatcher(None, a, b, False)
    if matcher.ratio() < 0.4:
        return None
    left: list[str] = []
    right: list[str] = []
    for kind, i, j, k, m in matcher.get_opcodes():
        for side, text in ((left, "".join(a[i:j])), (right, "".join(b[k:m]))):
            side.append(text if kind == "equal" or not text else tag("mark", text))
    return join(left), join(right)


def _retrace(retrace: Retrace) -> Markup:
    causes = []
    for cause in retrace.causes or ("cause unknown",):
        where, colon, change = cause.partition(": ")
        before, arrow, after = change.partition(" -> ")
        if not arrow:
            causes.append(tag("p", cause))
            continue
        shift = [tag("del", before), " → ", tag("ins", after)]
        causes.append(tag("p", tag("code", where), colon, tag("code", *shift)))
    title = tag("h3", tag("code", retrace.method), tag("small", f"trace {retrace.index}"))
    return tag("div", title, tag("div", *causes), class_="item")


def _constants(report: ReportData) -> Markup:
    ordered = sorted(report.constants, key=lambda c: -c.bytes)
    largest = max(ordered[0].bytes, 1)
    rows = [
        tag(
            "div",
            tag("span", tag("code", fmt.short_path(c.origin)), class_="name", title=c.origin),
            svg.bar(c.bytes / largest, f"{c.origin}: {fmt.size(c.bytes)}"),
            tag("span", fmt.size(c.bytes), class_="value"),
            tag("code", fmt.array(c.dtype, c.shape), class_="under"),
            class_="row",
        )
        for c in ordered
    ]
    shown, rest = rows[:_LARGEST_CONSTANTS], rows[_LARGEST_CONSTANTS:]
    parts = [tag("div", *shown, class_="plot")]
    if rest:
        more = tag("summary", f"{len(rest):,} smaller ones")
        parts.append(tag("details", more, tag("div", *rest, class_="plot"), class_="all"))
    return join(parts)


def _timing(report: ReportData) -> Markup:
    spent = [(stage, getattr(report.timing, stage)) for stage in STAGES]
    spent = [(stage, value) for stage, value in spent if value > 0]
    legend = [
        tag("li", tag("i", class_=stage), stage, tag("b", fmt.seconds(value)))
        for stage, value in spent
    ]
    said = ", ".join(f"{stage} {fmt.seconds(value)}" for stage, value in spent)
    return join([svg.stacked_bar(spent, said), tag("ul", *legend, class_="legend")])


def _item(title: str, aside: str, detail: str, place: str = "") -> Markup:
    head = tag("h3", title, tag("small", aside) if aside else "")
    where = tag("p", place, class_="place") if place else ""
    return tag("div", head, tag("div", tag("p", detail), where), class_="item")


def _calls(num: int) -> str:
    return plural(num, "call")
