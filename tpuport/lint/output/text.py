"""A run's outcome for a terminal: findings with source, one per line, or counted by rule."""

import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence

from tpuport.foundation.reporting.markup import plural, visible
from tpuport.lint.output import Style
from tpuport.lint.records import RANK, Outcome, Reported
from tpuport.lint.summary import PortingSummary, summarise
from tpuport.source.rewrite.finding import Severity

COLORS = {
    Severity.ERROR: "31",
    Severity.SILENT: "35",
    Severity.SLOW: "33",
    Severity.DEVICE: "34",
    Severity.NOTE: "36",
}
_BOLD, _DIM, _RULE, _GOOD, _FRAME = "1", "2", "1", "32", "34"
_BAR = 40
# Files and lines that the summary names.
_MOST_FILES, _MOST_LINES = 8, 12
_PIECES = " ▏▎▍▌▋▊▉█"


class Paint:
    """Terminal colours, or plain text if they are off."""

    def __init__(self, on: bool) -> None:
        self.on = on

    def __call__(self, text: str, *codes: str) -> str:
        """Wrap text in the escape sequence of these colour codes."""
        return f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if self.on and text else text


def full(outcome: Outcome, style: Style) -> str:
    """Write each finding with its source, underlined, and advice."""
    paint = Paint(style.color)
    blocks = ["\n".join(_block(finding, paint)) for finding in outcome.shown]
    return _join([*blocks, *_end(outcome, style, paint)], "\n\n")


def concise(outcome: Outcome, style: Style) -> str:
    """Write each finding on one line."""
    paint = Paint(style.color)
    lines = [f"{_place(finding, paint)}: {_title(finding, paint)}" for finding in outcome.shown]
    end = _end(outcome, style, paint)
    return _join(lines + ([""] if lines and end else []) + end, "\n")


def statistics(outcome: Outcome, style: Style) -> str:
    """Write the number of findings of each rule, the most frequent first."""
    paint = Paint(style.color)
    counts = Counter((finding.code, finding.rule) for finding in outcome.shown)
    lines = []
    for (code, rule), count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        own = [finding for finding in outcome.shown if finding.code == code]
        worst = min((finding.severity for finding in own), key=RANK.__getitem__)
        fixable = sum(finding.safety in ("exact", "close") for finding in own)
        fixes = f"  {fixable:,} fixable" if fixable else ""
        length = _bar(count / max(counts.values()), 20)
        lines.append(
            f"{count:>7,}  {paint(f'{length:<20}', COLORS[worst])}  {paint(code, _BOLD)}  "
            f"{paint(f'{worst:<6}', COLORS[worst])}  {rule}{paint(fixes, _DIM)}"
        )
    end = _end(outcome, style, paint)
    return _join(lines + ([""] if lines and end else []) + end, "\n")


def _join(parts: Sequence[str], between: str) -> str:
    return between.join(parts) + "\n" if parts else ""


# One finding.


def _title(finding: Reported, paint: Paint) -> str:
    mark = {"": "", "unsafe": "[unsafe fix] "}.get(finding.safety, "[*] ")
    severity = paint(finding.severity.value, COLORS[finding.severity], _BOLD)
    code = paint(finding.code, COLORS[finding.severity], _BOLD)
    return f"{code} {paint(mark, _GOOD)}{severity}: {visible(finding.message)}"


def _place(finding: Reported, paint: Paint) -> str:
    place = visible(finding.place)
    return paint(place, _BOLD)


def _block(finding: Reported, paint: Paint) -> Iterator[str]:
    width = len(str(finding.line + len(finding.lines) - 1))
    gutter = " " * width
    yield _title(finding, paint)
    yield f"{gutter}{paint('-->', _FRAME)} {visible(finding.place)}"
    yield paint(f"{gutter} |", _FRAME)
    for number, line in enumerate(finding.lines, start=finding.line):
        yield f"{paint(f'{number:>{width}} |', _FRAME)} {visible(line)}".rstrip()
        if carets := _carets(finding, number, line):
            color = COLORS[finding.severity]
            yield f"{paint(f'{gutter} |', _FRAME)} {paint(carets, color, _BOLD)}"
    hidden = finding.end_line - finding.line + 1 - len(finding.lines)
    if hidden > 0:
        rest = paint(f"... {plural(hidden, 'more line')}", _DIM)
        yield f"{paint(f'{gutter} |', _FRAME)} {rest}"
    yield f"{gutter} {paint('=', _FRAME)} {paint('help:', _BOLD)} {advice(finding)}"


def advice(finding: Reported) -> str:
    """Return advice about a finding, in one line."""
    why = f"`tpuport explain {finding.code}` says why"
    match finding.safety:
        case "":
            return f"{why} and what to do"
        case "unsafe":
            return f"`tpuport rewrite --unsafe` has a fix that can change results; {why}"
        case "close":
            return f"`tpuport rewrite` fixes this within the rule's tolerance; {why}"
        case _:
            return f"`tpuport rewrite` fixes this with the same results; {why}"


def _carets(finding: Reported, number: int, line: str) -> str:
    """Return the underline of the part of a line that a finding is about."""
    start = finding.column if number == finding.line else len(line) - len(line.lstrip())
    end = finding.end_column if number == finding.end_line else len(line.rstrip())
    before = _columns(visible(line[:start]))
    if start >= end:
        return ""
    # A tab's width depends on its column, so both ends are measured from the line's start.
    return " " * before + "^" * max(1, _columns(visible(line[:end])) - before)


def _columns(text: str) -> int:
    """Return the number of terminal columns that text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


# The end of a run.


def _end(outcome: Outcome, style: Style, paint: Paint) -> list[str]:
    if not style.summary:
        return []
    lines = [_count(outcome, paint), *(_aside(outcome, paint))]
    summary = summarise(outcome)
    if summary.functions or summary.total or summary.devices:
        lines += ["", *_summary(summary, paint)]
    return ["\n".join(lines)]


def _count(outcome: Outcome, paint: Paint) -> str:
    if not outcome.shown:
        return paint(f"Nothing found in {plural(outcome.files, 'file')}.", _GOOD)
    files = len({finding.file for finding in outcome.shown})
    counts = Counter(finding.severity for finding in outcome.shown)
    parts = ", ".join(
        paint(f"{counts[severity]:,} {severity.value}", COLORS[severity])
        for severity in RANK
        if counts[severity]
    )
    found = plural(len(outcome.shown), "finding")
    return f"Found {found} in {files:,} of {plural(outcome.files, 'file')}: {parts}."


def _aside(outcome: Outcome, paint: Paint) -> Iterator[str]:
    for severity, count in outcome.hidden.items():
        yield paint(
            f"{plural(count, 'finding')} of severity {severity} not shown; "
            f"--severity {severity} shows them.",
            _DIM,
        )
    if outcome.baselined:
        yield paint(f"{plural(outcome.baselined, 'finding')} in the baseline not shown.", _DIM)
    if outcome.stale:
        yield paint(
            f"{plural(outcome.stale, 'finding')} of the baseline no longer found; "
            "--write-baseline drops them.",
            _DIM,
        )


def _summary(summary: PortingSummary, paint: Paint) -> Iterator[str]:
    if summary.functions:
        bar = _bar(summary.share, _BAR)
        rest = "░" * (_BAR - len(bar))
        ready = f"{summary.ready:,} of {plural(summary.functions, 'step function')} ready"
        yield paint("Portability", _BOLD)
        yield f"  {paint(bar, _GOOD)}{paint(rest, _DIM)}  {_percent(summary.share)}, {ready}"
        if summary.setup:
            where = plural(summary.setup, "blocking finding")
            yield f"  {where} outside of step functions, in imports and set-up"
    if summary.total:
        yield from _work(summary, paint)
    if summary.devices:
        yield from _devices(summary, paint)


def _devices(summary: PortingSummary, paint: Paint) -> Iterator[str]:
    lines = sum(len(numbers) for _, numbers in summary.devices)
    where = f"{plural(lines, 'line')} in {plural(len(summary.devices), 'file')}"
    yield f"{paint('Host code for CUDA', _BOLD)}: {where}; `tpuport run` answers most"
    for file, numbers in summary.devices[:_MOST_FILES]:
        listed = ", ".join(map(str, numbers[:_MOST_LINES]))
        more = f", +{len(numbers) - _MOST_LINES}" if len(numbers) > _MOST_LINES else ""
        yield f"  {visible(file)}: {paint(listed + more, _DIM)}"
    if (left := len(summary.devices) - _MOST_FILES) > 0:
        yield paint(f"  and {plural(left, 'more file')}", _DIM)


def _work(summary: PortingSummary, paint: Paint) -> Iterator[str]:
    yield paint("Order of work", _BOLD)
    most = max((step.count for step in summary.steps), default=1)
    for number, step in enumerate(summary.steps, start=1):
        codes = ", ".join(f"{code} {count:,}" for code, count in step.codes[:4])
        more = f", +{len(step.codes) - 4}" if len(step.codes) > 4 else ""
        color = COLORS[Severity.ERROR if step.blocking else Severity.SLOW]
        yield (
            f"  {number}. {paint(f'{_bar(step.count / most, 12):<12}', color)} {step.count:>5,}"
            f"  {step.title} {paint(f'({codes}{more})', _DIM)}"
        )
    yield f"Fixes: {_fixes(summary)}"


def _fixes(summary: PortingSummary) -> str:
    safe = sum(summary.safeties.get(name, 0) for name in ("exact", "close"))
    unsafe = summary.safeties.get("unsafe", 0)
    if not safe and not unsafe:
        return f"none of the {plural(summary.total, 'finding')} can be fixed automatically."
    more = f" and {unsafe:,} more with --unsafe" if unsafe else ""
    return f"`tpuport rewrite` fixes {safe:,} of {plural(summary.total, 'finding')}{more}."


def _percent(share: float) -> str:
    """Format a share as a percentage, rounded down so that 100 % means all."""
    return f"{int(share * 100)} %"


def _bar(share: float, width: int) -> str:
    eighths = max(1, round(share * width * 8)) if share > 0 else 0
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_PIECES[rest] if rest else "")
