"""A run's outcome as one HTML page, without scripts or external files, in light and dark."""

from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import groupby

from tpuport.foundation.reporting.markup import Markup, join, page, plural, tag, visible
from tpuport.foundation.version import __version__
from tpuport.lint.output import Style
from tpuport.lint.output.text import advice
from tpuport.lint.records import RANK, Outcome, Reported
from tpuport.lint.summary import PortingSummary, summarise
from tpuport.source.rewrite.finding import Severity

MEANING = {
    Severity.ERROR: "stops the trace",
    Severity.SILENT: "wrong without a word",
    Severity.SLOW: "costs time or memory",
    Severity.NOTE: "worth knowing",
}
_MAX_CELLS = 1500
_MAX_ROWS = 30
_OPEN_FILES = 3


def to_html(outcome: Outcome, style: Style) -> str:
    """Write the page. Names and source lines are escaped, so that they are shown as text."""
    del style
    summary = summarise(outcome)
    sections = list(_sections(outcome, summary))
    links = tag("nav", *(tag("a", title, href=f"#{name}") for name, title, _ in sections))
    bodies = [tag("section", tag("h2", title), body, id=name) for name, title, body in sections]
    main = tag("main", _verdict(outcome, summary), links, *bodies)
    footer = tag("footer", f"tpuport {__version__} · {plural(outcome.files, 'file')}")
    css = files("tpuport.lint.output").joinpath("page.css").read_text(encoding="utf-8")
    return page("tpuport lint", main, footer, style=css)


def _verdict(outcome: Outcome, summary: PortingSummary) -> Markup:
    blocked = any(summary.severities.get(name) for name in ("error", "silent"))
    if summary.functions:
        title = f"{int(summary.share * 100)} % of the step is ready for TPU"
    else:
        title = "No code of a training or sampling step here"
    counts = Counter(finding.severity for finding in outcome.shown)
    lead = ", ".join(f"{counts[s]:,} {s} ({MEANING[s]})" for s in RANK if counts[s])
    shown = plural(len(outcome.shown), "finding")
    facts = [f"{count:,} of severity {name} not shown" for name, count in outcome.hidden.items()]
    facts += [f"{outcome.baselined:,} in the baseline"] if outcome.baselined else []
    mark = tag("span", "!" if blocked else "✓", class_="mark", aria_hidden="true")
    words = [tag("h1", title), tag("p", f"{shown}{': ' if lead else '.'}{lead}", class_="lead")]
    words += [tag("p", " · ".join(facts), class_="facts")] if facts else []
    return tag("header", mark, tag("div", *words), class_="blocked" if blocked else "portable")


def _sections(outcome: Outcome, summary: PortingSummary) -> Iterator[tuple[str, str, Markup]]:
    if summary.functions:
        yield "functions", "Functions of the step", _functions(outcome, summary)
    if summary.steps:
        yield "order", "Order of work", _order(outcome, summary)
    if outcome.shown:
        yield "files", "Files", _files(outcome)
        yield "findings", "Findings", _findings(outcome)
    if outcome.problems:
        problems = tag("ul", *(tag("li", str(problem)) for problem in outcome.problems))
        yield "problems", "Not linted", problems


def _functions(outcome: Outcome, summary: PortingSummary) -> Markup:
    """Draw a square for each function, in the colour of its worst finding."""
    worst: dict[tuple[str, int, int], Severity] = {}
    for finding in outcome.counted:
        key = (finding.file, finding.cell, finding.function)
        if finding.function:
            worst[key] = min(
                worst.get(key, finding.severity), finding.severity, key=RANK.__getitem__
            )
    counts = Counter(worst.values())
    classes = [severity.value for severity in RANK for _ in range(counts[severity])]
    classes += ["ready"] * (summary.functions - len(classes))
    scale = max(1, -(-len(classes) // _MAX_CELLS))
    cells = tag("div", *(tag("i", class_=name) for name in classes[::scale]), class_="cells")
    each = f"Each square is {'a function' if scale == 1 else plural(scale, 'function')}"
    how = tag("p", f"{each} of the traced step, in the colour of its worst finding.", class_="how")
    legend = [
        tag("li", tag("i", class_=s.value), MEANING[s], tag("b", f"{counts[s]:,}"))
        for s in RANK
        if counts[s]
    ]
    clean = summary.functions - sum(counts.values())
    legend.append(tag("li", tag("i", class_="ready"), "nothing found", tag("b", f"{clean:,}")))
    return join([how, cells, tag("ul", *legend, class_="legend")])


def _order(outcome: Outcome, summary: PortingSummary) -> Markup:
    most = max(step.count for step in summary.steps)
    rows = [
        tag(
            "div",
            tag("span", tag("span", f"{number}.", class_="number"), step.title, class_="name"),
            _lane([f for f in outcome.counted if f.code.startswith(step.start)], most),
            tag("span", f"{step.count:,}", class_="value"),
            tag(
                "code", ", ".join(f"{code} {count:,}" for code, count in step.codes), class_="under"
            ),
            class_="row",
        )
        for number, step in enumerate(summary.steps, start=1)
    ]
    how = "Hatched: `tpuport rewrite` fixes it."
    return join([tag("p", how, class_="how"), tag("div", *rows, class_="plot")])


def _lane(findings: Sequence[Reported], most: int) -> Markup:
    """Draw a bar divided by severity, and each part by whether its findings can be fixed."""
    counts = Counter((f.severity, f.safety in ("exact", "close")) for f in findings)
    pieces = [
        tag(
            "i",
            class_=f"{severity} fixable" if fixable else severity.value,
            style=f"width:{100 * counts[severity, fixable] / most:.2f}%",
            title=f"{counts[severity, fixable]:,} {severity}{', fixable' if fixable else ''}",
        )
        for severity in RANK
        for fixable in (False, True)
        if counts[severity, fixable]
    ]
    return tag("div", *pieces, class_="lane")


def _files(outcome: Outcome) -> Markup:
    by_file = sorted(_by_file(outcome), key=lambda item: (-len(item[1]), item[0]))
    most = len(by_file[0][1])
    rows = [
        tag(
            "div",
            tag("a", tag("code", file), href=f"#{_file_anchor(found)}", class_="name"),
            _lane(found, most),
            tag("span", f"{len(found):,}", class_="value"),
            class_="row",
        )
        for file, found in by_file
    ]
    parts = [tag("div", *rows[:_MAX_ROWS], class_="plot")]
    if rest := rows[_MAX_ROWS:]:
        more = tag("summary", f"{plural(len(rest), 'more file')}")
        parts.append(tag("details", more, tag("div", *rest, class_="plot"), class_="all"))
    return join(parts)


def _by_file(outcome: Outcome) -> list[tuple[str, list[Reported]]]:
    return [(file, list(found)) for file, found in groupby(outcome.shown, lambda f: f.file)]


def _findings(outcome: Outcome) -> Markup:
    return join(
        tag(
            "details",
            tag("summary", tag("code", file), tag("small", plural(len(found), "finding"))),
            *(_finding(finding) for finding in found),
            class_="file",
            id=_file_anchor(found),
            open=number < _OPEN_FILES,
        )
        for number, (file, found) in enumerate(_by_file(outcome))
    )


def _finding(finding: Reported) -> Markup:
    anchor = _anchor(finding)
    cell = f"cell {finding.cell}, " if finding.cell else ""
    place = tag("a", f"{cell}line {finding.line}", href=f"#{anchor}")
    return tag(
        "div",
        tag(
            "p",
            tag("span", finding.severity.value, class_=f"tag {finding.severity}"),
            finding.message,
        ),
        tag("p", place, f" · {finding.code} {finding.rule} · {advice(finding)}", class_="about"),
        tag("pre", *_excerpt(finding)),
        class_="finding",
        id=anchor,
    )


def _excerpt(finding: Reported) -> Iterator[Markup]:
    width = len(str(finding.line + len(finding.lines) - 1))
    for number, line in enumerate(finding.lines, start=finding.line):
        first, last = number == finding.line, number == finding.end_line
        start = finding.column if first else len(line) - len(line.lstrip())
        end = max(start, finding.end_column if last else len(line.rstrip()))
        marked = tag("mark", line[start:end], class_=f"{finding.severity}-mark")
        yield tag("b", f"{number:>{width}}  ")
        yield join([visible(line[:start]), marked, visible(line[end:]), "\n"])


def _anchor(finding: Reported) -> str:
    return (
        f"{_file_anchor([finding])}-{finding.cell}-{finding.line}-{finding.column}-{finding.code}"
    )


def _file_anchor(found: Sequence[Reported]) -> str:
    return f"f-{found[0].file.encode(errors='replace').hex()}"
