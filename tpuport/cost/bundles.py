"""A kernel's schedule, read from the final bundles that libtpu writes.

A bundle is what a TensorCore starts in one cycle. The text has one entry a bundle, `0x1f LB: > {}`,
in which a jump is `sbr.rel (%p) target = $region52`, and a region's first bundle says `Start region
52`, or `Start/End empty region 52` where it is only a place to jump to. A jump forward skips the
bundles between; a jump backward makes a loop.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tpuport.foundation.errors import TpuportError

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|\d+)\s+(?:([A-Z]{2}):|\s:|:)\s*[> ]*\{", re.M)
_JUMP = re.compile(r"sbr\.rel[^;}]*?target = \$region(\d+)")
_LABEL = re.compile(r"(?:Start|Start/End empty) region (\d+)")
_PRODUCT = re.compile(r"= v(?:dwg\.|matmul|matpush)")
_OPERATION = re.compile(r"exit bundle: %[\w.-]+ = ([\w-]+)\(")
_BOUNDS = re.compile(r"^iteration_bounds: \(([\d, ]+)\)", re.M)
# Bundles after a jump that run whether it is taken or not.
_DELAY_SLOTS = 4


class ScheduleFormatError(TpuportError):
    """The text that libtpu wrote has an unknown form."""


@dataclass(frozen=True)
class Span:
    """Bundles that belong together: a loop's body, or those that one jump skips.

    Args:
        start: first bundle.
        stop: one after the last.
        products: bundles in it that start work of a matrix unit, those of inner spans included.
        is_loop: whether it is the body of a loop.
        inner: spans within it, in order.
    """

    start: int
    stop: int
    products: int
    is_loop: bool
    inner: tuple["Span", ...] = ()

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def own(self) -> int:
        """Return the number of its bundles, without those of inner spans."""
        return len(self) - sum(len(span) for span in self.inner)

    def walk(self) -> Iterator["Span"]:
        """Yield this span and all spans within it, outermost first."""
        yield self
        for span in self.inner:
            yield from span.walk()


@dataclass(frozen=True)
class Bundles:
    """The schedule of one kernel.

    Args:
        whole: all bundles as one span.
        grid: the grid that the text names. It names none if all operands are in VMEM already, since
            no step has to fetch its blocks.
        operation: the operation of XLA that the text names, "" for none.
    """

    whole: Span
    grid: tuple[int, ...]
    operation: str = ""

    @property
    def is_kernel(self) -> bool:
        """Return whether a Pallas kernel has this schedule, and no operation of XLA itself."""
        return self.operation == "custom-call"


def read_bundles(text: str) -> Bundles:
    """Read a file `*-final_bundles.txt` of libtpu's dump (known: 0.0.42 to 0.0.52).

    Raises:
        ScheduleFormatError: the text has an unknown form.
    """
    entries = list(_BUNDLE.finditer(text))
    if not entries:
        raise _unknown("no bundle such as '0x1f : > { ... }' is in it")
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    bodies: list[int] = []
    products: list[int] = []
    for index, entry in enumerate(entries):
        if int(entry[1], 0) != index:
            raise _unknown(f"bundle {index} is called {entry[1]}")
        stop = entries[index + 1].start() if index + 1 < len(entries) else len(text)
        body = text[entry.start() : stop]
        jumps += [(index, target) for target in _JUMP.findall(body)]
        for label in _LABEL.findall(body):
            labels.setdefault(label, index)
        if entry[2] == "PB":
            bodies.append(index)
        if _PRODUCT.search(body):
            products.append(index)
    if text.count("sbr.rel") and not jumps:
        raise _unknown("its jumps do not say where to")
    spans = _spans(jumps, labels, bodies, len(entries))
    bounds = _BOUNDS.search(text)
    grid = tuple(int(n) for n in bounds[1].split(",") if n.strip()) if bounds else ()
    named = _OPERATION.search(text)
    whole = _nest(Span(0, len(entries), 0, False), spans, products)
    return Bundles(whole, grid, named[1] if named else "")


def _spans(
    jumps: list[tuple[int, str]], labels: dict[str, int], bodies: list[int], num: int
) -> list[Span]:
    found = []
    for at, label in jumps:
        # No region starts behind the last bundle; a core without work jumps there.
        target = labels.get(label, num)
        after = min(at + 1 + _DELAY_SLOTS, num)
        if target <= at:
            found.append(Span(target, after, 0, True))
            continue
        start = next((body for body in bodies if at < body <= after), after)
        if start < target:
            found.append(Span(start, target, 0, False))
    # Outer spans come before the spans within them, as `_nest` needs.
    return sorted(set(found), key=lambda span: (span.start, -span.stop, not span.is_loop))


def _nest(outer: Span, spans: list[Span], products: list[int]) -> Span:
    inner: list[Span] = []
    while spans:
        first, rest = spans[0], spans[1:]
        within = [span for span in rest if span.start < first.stop]
        if any(span.stop > first.stop for span in within):
            raise _unknown(f"its jumps cross, at bundles {first.start} to {first.stop}")
        inner.append(_nest(first, within, products))
        spans = rest[len(within) :]
    num = sum(outer.start <= at < outer.stop for at in products)
    return Span(outer.start, outer.stop, num, outer.is_loop, tuple(inner))


def _unknown(reason: str) -> ScheduleFormatError:
    return ScheduleFormatError(
        f"The schedule that libtpu wrote cannot be read: {reason}. What to do: use a libtpu from"
        " 0.0.42 to 0.0.52, whose form is known"
    )
