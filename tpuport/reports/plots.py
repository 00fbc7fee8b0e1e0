"""The pictures of the HTML port report, as inline SVG.

Horizontal positions are percentages and vertical ones pixels, so a picture fills any width while
its text keeps its size.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from tpuport.foundation.reporting.markup import Markup, join, plural, tag
from tpuport.reports.records import Divergence, Parity
from tpuport.reports.wording import by_kind, number

_DOT = 3.5
_STEP = 6.6  # distance between the centres of stacked dots, in pixels
_NOMINAL_WIDTH = 560.0  # the width at which dots just do not overlap
_MAX_STACK = 120.0
_LANE_HEAD = 24.0
_EDGE = 14.0  # width of the bins for identical and for non-finite values, in percent
_MAX_TICKS = 8
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class BarPart(NamedTuple):
    """One piece of a stacked bar, with the line of its legend.

    Attributes:
        look: Its class in the style sheet.
        amount: What its width shows.
        name: What it stands for.
        words: The amount, for reading.
        remark: What follows it in the legend.
    """

    look: str
    amount: float
    name: str = ""
    words: str = ""
    remark: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.words}"


class Bar(NamedTuple):
    """One row of a bar chart.

    Attributes:
        name: What it stands for.
        words: The amount, for reading.
        amount: What its length shows.
        under: What the line below says.
        title: The whole name, where `name` is short.
    """

    name: str
    words: str
    amount: float
    under: str = ""
    title: str = ""


class ErrorScale:
    """The log axis on which errors are placed, with bins at the ends for 0 and for infinity.

    Args:
        errors: The errors to show.
        limits: The tolerances to show.
    """

    def __init__(self, errors: Sequence[float], limits: Sequence[float]) -> None:
        values = [*errors, *limits]
        exponents = [math.log10(v) for v in values if 0 < v < math.inf]
        self.low = math.floor(min(exponents, default=-7))
        self.high = max(math.ceil(max(exponents, default=-4) + 0.15), self.low + 1)
        self.left = _EDGE if any(v == 0 for v in values) else 2.0
        self.right = 100 - (_EDGE if any(not v < math.inf for v in errors) else 2.0)

    def at(self, error: float) -> float:
        """Return the position of an error, in percent of the width."""
        if error == 0:
            return self.left / 2
        if not error < math.inf:
            return (100 + self.right) / 2
        share = (math.log10(error) - self.low) / (self.high - self.low)
        return self.left + (self.right - self.left) * share

    def limit(self, tolerance: float) -> float:
        """Return the position of a tolerance; only identical values fit a tolerance of 0."""
        return self.left if tolerance == 0 else min(self.at(tolerance), self.right)

    def grid(self, height: float) -> Markup:
        """Return a hairline at every decade."""
        return join(
            _line(self.at(10.0**exponent), 0, height, class_="grid")
            for exponent in range(self.low, self.high + 1)
        )

    def ticks(self, y: float) -> Markup:
        """Return the labels under the axis."""
        every = math.ceil((self.high - self.low + 1) / _MAX_TICKS)
        first = self.high - every * ((self.high - self.low) // every)
        labels = [
            _label(self.at(10.0**e), y, f"10{str(e).translate(_SUPERSCRIPT)}", "middle")
            for e in range(first, self.high, every)
            if e > self.low or self.left < _EDGE
        ]
        if self.left == _EDGE:
            labels.append(_label(0, y, "identical", "start"))
        if self.right == 100 - _EDGE:
            labels.append(_label(100, y, "not finite", "end"))
        return join(labels)


def scale_of(parity: Sequence[Parity], divergences: Sequence[Divergence]) -> ErrorScale:
    """Return the one axis on which all errors of a report are drawn."""
    errors = [plotted(p) for p in parity]
    errors += [e for d in divergences for e in (d.max_rel, d.input_max_rel)]
    return ErrorScale(errors, [p.tolerance for p in parity])


def swarm(parity: Sequence[Parity], scale: ErrorScale) -> Markup:
    """Return a dot at each value's error, one lane a kind, with the tolerances of the lane."""
    lanes, top = [], 0.0
    for kind, group in by_kind(list(parity)).items():
        lane, height = _lane(kind, group, scale)
        lanes.append(tag("g", lane, transform=f"translate(0 {_px(top)})"))
        top += height
    label = f"Relative error of {plural(len(parity), 'value')} on a logarithmic axis"
    return _svg(
        top + 20,
        join([scale.grid(top), *lanes, scale.ticks(top + 16)]),
        class_="swarm",
        label=label,
    )


def track(error: float, look: str, scale: ErrorScale, *, limit: float | None = None) -> Markup:
    """Return one row of a dot plot: a dot at its error, and the tolerance if there is one."""
    parts = [scale.grid(16), _line_h(0, 100, 8, class_="axis")]
    if limit is not None:
        at = scale.limit(limit)
        parts += [_wash(at, 0, 16), _line(at, 0, 16, class_="limit")]
    parts.append(_dot(scale.at(error), 8, look, radius=5))
    return _svg(16, join(parts), class_="track", label=f"relative error {number(error)}")


def axis(scale: ErrorScale) -> Markup:
    """Return the tick labels under a column of tracks."""
    return _svg(18, scale.ticks(13), class_="track", label="logarithmic axis of relative error")


def stacked_bar(pieces: Sequence[BarPart], label: str, *, height: int = 28) -> Markup:
    """Return one bar cut into pieces, all of them visible."""
    total = sum(piece.amount for piece in pieces)
    parts, left = [], 0.0
    for piece in pieces:
        width = 100 * piece.amount / total
        parts.append(
            tag(
                "rect",
                x=_pc(left),
                y="0",
                width=_pc(max(width, 0.3)),
                height=str(height),
                class_=f"stage {piece.look}",
            )
        )
        left += width
    return _svg(height, join(parts), class_="stack", label=label)


def bar(share: float, label: str) -> Markup:
    """Return one horizontal bar that fills this share of the width."""
    filled = tag(
        "rect", x="0", y="3", width=_pc(max(100 * share, 0.4)), height="10", rx="2", class_="bar"
    )
    return _svg(16, filled, class_="track", label=label)


def _lane(kind: str, group: Sequence[Parity], scale: ErrorScale) -> tuple[Markup, float]:
    """Return the dots of one kind, stacked where they would overlap, and their height."""
    columns = _columns(sorted(group, key=lambda p: scale.at(plotted(p))), scale)
    tallest = max(len(column) for _, column in columns)
    step = min(_STEP, _MAX_STACK / tallest)
    height = _LANE_HEAD + tallest * step + 8
    limits = sorted({p.tolerance for p in group})
    parts = [_wash(scale.limit(limits[-1]), 0, height)]
    parts += [_line(scale.limit(limit), 0, height, class_="limit") for limit in limits]
    parts.append(_line_h(0, 100, height, class_="axis"))
    dots = [
        _dot(x, height - 7 - level * step, look(p), title=f"{p.path}: {number(p.max_rel)}")
        for x, column in columns
        for level, p in enumerate(column)
    ]
    parts.append(tag("g", *dots, class_="dense" if step < _DOT else None))
    parts.append(_label(0, 15, plural(len(group), kind), "start", class_="lane"))
    at = scale.limit(limits[-1])
    words = "allowed " + " and ".join(number(limit) for limit in limits[-2:])
    parts.append(
        _label(at, 15, words, "end", class_="limit", dx=-5)
        if at > 55
        else _label(at, 15, words, "start", class_="limit", dx=5)
    )
    return join(parts), height


def _columns(ordered: Sequence[Parity], scale: ErrorScale) -> list[tuple[float, list[Parity]]]:
    """Gather dots that would overlap in columns at the middle of their positions, in percent.

    Source: Wilkinson, Dot plots, The American Statistician 53(3), 1999. A dot moves by less than
    its own radius, and never to the other side of a tolerance: a column is of one look.
    """
    width = 100 * _STEP / _NOMINAL_WIDTH
    groups: list[list[Parity]] = []
    for p in ordered:
        first = groups[-1][0] if groups else None
        near = first and scale.at(plotted(p)) - scale.at(plotted(first)) < width
        if near and first and look(first) == look(p):
            groups[-1].append(p)
        else:
            groups.append([p])
    middles = [(scale.at(plotted(g[0])) + scale.at(plotted(g[-1]))) / 2 for g in groups]
    return list(zip(middles, groups, strict=True))


def look(parity: Parity) -> str:
    """Return the class of a dot: `ok`, `bad`, or `ring` if the absolute error was accepted."""
    if not parity.ok:
        return "bad"
    return "ring" if parity.max_rel > parity.tolerance else "ok"


def plotted(parity: Parity) -> float:
    """Return the error to plot; values that cannot be compared go to the far right."""
    return math.inf if parity.problem or math.isnan(parity.max_rel) else parity.max_rel


def _svg(height: float, body: Markup, *, class_: str, label: str) -> Markup:
    return tag(
        "svg",
        body,
        class_=class_,
        width="100%",
        height=_px(height),
        role="img",
        aria_label=label,
    )


def _dot(x: float, y: float, class_: str, *, radius: float = _DOT, title: str = "") -> Markup:
    told = [tag("title", title)] if title else []
    return tag("circle", *told, cx=_pc(x), cy=_px(y), r=_px(radius), class_=class_)


def _wash(left: float, top: float, bottom: float) -> Markup:
    """Return the shaded region beyond a tolerance."""
    return tag(
        "rect",
        x=_pc(left),
        y=_px(top),
        width=_pc(100 - left),
        height=_px(bottom - top),
        class_="beyond",
    )


def _line(x: float, top: float, bottom: float, *, class_: str) -> Markup:
    return tag("line", x1=_pc(x), x2=_pc(x), y1=_px(top), y2=_px(bottom), class_=class_)


def _line_h(left: float, right: float, y: float, *, class_: str) -> Markup:
    return tag("line", x1=_pc(left), x2=_pc(right), y1=_px(y), y2=_px(y), class_=class_)


def _label(
    x: float, y: float, text: str, anchor: str, *, class_: str = "tick", dx: float | None = None
) -> Markup:
    return tag("text", text, x=_pc(x), y=_px(y), dx=dx, text_anchor=anchor, class_=class_)


def _pc(value: float) -> str:
    return f"{value:.2f}%"


def _px(value: float) -> str:
    return f"{value:.1f}"
