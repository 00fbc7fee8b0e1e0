"""The port report on a terminal, through rich: the verdict, then only the sections that apply."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tpuport.foundation.reporting.markup import plural, visible
from tpuport.reports import wording as fmt
from tpuport.reports.data import ReportData
from tpuport.reports.records import STAGES, Rewrite

WIDTH = 100
MAX_ROWS = 20
_MAX_CODE_LINES = 12
_BAR = 40
_ARRAY_WIDTH = 28
_MARKS = {"agrees": ("✔", "green"), "differs": ("✘", "red"), "not verified": ("?", "yellow")}


def render(report: ReportData) -> RenderableType:
    """Return the report as a rich renderable; names and source lines are never read as markup."""
    blocks: list[RenderableType] = [_verdict(report)]
    for title, body in _sections(report):
        blocks += [Text(""), Text(title, style="bold"), Padding(body, (0, 0, 0, 2))]
    return Group(*blocks)


def _verdict(report: ReportData) -> RenderableType:
    mark, color = _MARKS[report.verdict]
    grid = _grid(1)
    grid.add_row(Text(mark, style=f"bold {color}"), _text(fmt.headline(report), "bold"))
    if why := fmt.explanation(report):
        grid.add_row("", _text(why))
    for found in report.divergences:
        grid.add_row("", _text(fmt.divergence(found), color))
    for facts in filter(None, (fmt.facts(report), fmt.versions(report))):
        grid.add_row("", _text(" · ".join(facts), "dim"))
    return grid


def _sections(report: ReportData) -> Iterator[tuple[str, RenderableType]]:
    """Yield the title and body of each section that is not empty."""
    if report.notes:
        yield "Notes", _rows([("-", note) for note in report.notes])
    if report.parity:
        yield "Parity, worst first", _parity(report)
    if report.rewrites:
        yield f"Rewritten ({len(report.rewrites)})", _rewrites(report.rewrites)
    if report.branches:
        items = [(b.source, f"{b.how} · {fmt.place(b.file, b.line)}") for b in report.branches]
        yield f"Branches on traced values ({len(items)})", _items(items)
    if report.shims:
        items = [(f"{s.name}, {_calls(s.calls)}", f"{s.target}: {s.reason}") for s in report.shims]
        yield f"Shims ({len(items)})", _items(items)
    if report.registered_ops:
        rows = [(op.name, op.reason, _calls(op.calls)) for op in report.registered_ops]
        yield f"Ops that tpuport lowers ({len(rows)})", _rows(rows)
    yield from _compilation(report)


def _compilation(report: ReportData) -> Iterator[tuple[str, RenderableType]]:
    if report.retraces:
        rows = [
            (f"{r.method}, trace {r.index}", "\n".join(r.causes) or "cause unknown")
            for r in report.retraces
        ]
        yield f"Retraces ({len(rows)})", _rows(rows)
    if report.attention:
        items = [(fmt.attention(a), fmt.attention_detail(a)) for a in report.attention]
        yield f"Attention ({len(items)})", _items(items)
    if report.blocks:
        items = [(fmt.blocks(b), fmt.blocks_detail(b)) for b in report.blocks]
        yield f"Repeated blocks ({len(items)})", _items(items)
    if report.host:
        items = [(fmt.host(h), fmt.host_detail(h)) for h in report.host]
        yield f"Runs on the host ({len(items)})", _items(items)
    if report.constants:
        largest = sorted(report.constants, key=lambda c: -c.bytes)
        total = fmt.size(sum(c.bytes for c in largest))
        rows = [
            (fmt.size(c.bytes), fmt.array(c.dtype, c.shape), fmt.short_path(c.origin))
            for c in largest
        ]
        yield f"Constants passed as arguments ({len(rows)}, {total})", _rows(rows)
    if report.timing.total:
        yield f"Time, {fmt.seconds(report.timing.total)}", _timing(report)


def _parity(report: ReportData) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    table.add_column("value", overflow="fold")
    table.add_column("", overflow="fold", max_width=_ARRAY_WIDTH)
    table.add_column("error", justify="right", no_wrap=True)
    table.add_column("allowed", justify="right", no_wrap=True)
    shown = report.by_severity[:MAX_ROWS]
    for p in shown:
        mark, color = _MARKS["agrees" if p.ok else "differs"]
        path = _text(p.path)
        if not p.ok:
            path.append_text(_text(f"\n{fmt.worst_element(p)}", color))
        error, allowed = fmt.error_and_limit(p)
        table.add_row(
            Text(mark, style=color),
            path,
            _text(fmt.array(p.dtype, p.shape), "dim"),
            Text(error, style=color),
            allowed,
        )
    return Group(table, *_more(len(report.parity) - len(shown)))


def _rewrites(rewrites: Sequence[Rewrite]) -> RenderableType:
    grid = _grid(1)
    for r in rewrites[:MAX_ROWS]:
        title = f"{r.code} {r.safety}  {fmt.place(r.file, r.line)}"
        grid.add_row(_text(title, "dim"))
        for sign, color, code in (("-", "red", r.before), ("+", "green", r.after)):
            lines = code.strip("\n").splitlines()
            hidden = len(lines) - _MAX_CODE_LINES
            lines = lines[:_MAX_CODE_LINES] + ([f"... {hidden} more lines"] * (hidden > 0))
            marked = _grid(1)
            for line in lines:
                marked.add_row(Text(f"  {sign}", style=color), _text(line, color))
            grid.add_row(marked)
    return Group(grid, *_more(len(rewrites) - MAX_ROWS))


def _timing(report: ReportData) -> RenderableType:
    spent = {stage: getattr(report.timing, stage) for stage in STAGES}
    longest = max(spent.values())
    grid = _grid(2)
    for stage, value in spent.items():
        if value:
            bar = "█" * max(1, round(_BAR * value / longest))
            grid.add_row(stage, Text(bar, style="blue"), Text(fmt.seconds(value), justify="right"))
    return grid


def _rows(rows: Sequence[tuple[str, ...]]) -> RenderableType:
    grid = _grid(2)
    for row in rows[:MAX_ROWS]:
        grid.add_row(*(_text(cell, "" if i == 0 else "dim") for i, cell in enumerate(row)))
    return Group(grid, *_more(len(rows) - MAX_ROWS))


def _items(items: Sequence[tuple[str, str]]) -> RenderableType:
    """Return a line for each title, with its detail indented below."""
    lines: list[RenderableType] = []
    for title, detail in items[:MAX_ROWS]:
        lines += [_text(title), Padding(_text(detail, "dim"), (0, 0, 0, 4))]
    return Group(*lines, *_more(len(items) - MAX_ROWS))


def _more(hidden: int) -> list[Text]:
    return [Text(f"+{hidden} more", style="dim")] if hidden > 0 else []


def _calls(num: int) -> str:
    return plural(num, "call")


def _grid(gap: int) -> Table:
    return Table.grid(padding=(0, gap, 0, 0))


def _text(content: str, style: str = "") -> Text:
    """Return text that folds instead of losing its end."""
    return Text(visible(content), style=style, overflow="fold")
