"""Explanations of exceptions: `explain_error`, and notes on exceptions that leave a block."""

import contextlib
import functools
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from tpuport.diagnosis import causes
from tpuport.diagnosis.causes._cause import Cause, Explanation, Raised
from tpuport.foundation.errors import TpuportError
from tpuport.foundation.tracebacks import trim
from tpuport.foundation.user_frames import (
    CodePlace,
    failing_line,
    is_inside,
    passes_through,
    running_module,
    user_places,
)

if TYPE_CHECKING:
    from tpuport.source.rewrite.finding import Finding

_MARK = "tpuport explains"
_PORTED = "model/ported_model.py"
# What is said of an error that tpuport or torchax did not mean to raise.
OWN_FAULT = f"{_MARK} (unforeseen-error)"


@dataclass(frozen=True)
class Diagnosis:
    """The meaning of an exception.

    Attributes:
        cause: The name of the cause, as in docs/diagnosis.md: `traced-value`.
        problem: What happened, in one sentence.
        remedies: What to do, the best first.
        file: The user's file that it comes from, None if no line of the traceback is the user's.
        line: The line in it, counted from 1.
        source_line: The code there.
        value: The value that it is about.
        details: Further facts, one per line.
        rule: The code of the rule that finds that line, if one does.
        rule_message: The rule's message about it.
    """

    cause: str
    problem: str
    remedies: tuple[str, ...]
    file: str | None = None
    line: int | None = None
    source_line: str | None = None
    value: str | None = None
    details: tuple[str, ...] = ()
    rule: str | None = None
    rule_message: str | None = None

    def __str__(self) -> str:
        place = "" if self.file is None else f"{self.file}:{self.line}: "
        lines = [f"{place}{self.problem}"]
        if self.source_line:
            lines.append(f"    {self.source_line}")
        if self.value:
            lines.append(f"The value: {self.value}")
        lines += (f"    {detail}" for detail in self.details)
        if self.rule:
            lines.append(
                f"The rule: {self.rule} {self.rule_message} (`tpuport explain {self.rule}`)"
            )
        lines.append(f"What to do: {self.remedies[0]}")
        lines += (f"            {remedy}" for remedy in self.remedies[1:])
        return "\n".join(lines)


def explain_error(error: BaseException) -> Diagnosis | None:
    """Explain an exception of torch, torchax or jax.

    Exceptions that it was raised from, and those of a group, are examined as well, the nearest ones
    first. Needs neither torch nor jax.

    Args:
        error: The exception, with its traceback.

    Returns:
        The diagnosis. None if no cause is known, and for tpuport's own errors, which explain
        themselves.
    """
    if isinstance(error, TpuportError):
        return None
    for one, places in _chain(error, _caller()):
        found = _explain(one, places)
        if found is not None:
            return found
    return None


def _caller() -> tuple[CodePlace, ...]:
    """Return the user's line that is running now, which the traceback does not reach yet."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    return () if frame is None else (CodePlace.at(frame.f_code.co_filename, frame.f_lineno),)


class explaining(contextlib.ContextDecorator):
    """Add an explanatory note to an exception that leaves the block.

    Its type and arguments do not change. An exception gets one note, however many such blocks it
    leaves. The traceback of an error that tpuport raises on purpose loses the frames of tpuport,
    which say nothing that its message does not; TPUPORT_DEBUG=1 keeps them.
    """

    def __enter__(self) -> None:
        """Enter the block."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Explain the exception that leaves the block, if any."""
        if isinstance(error, Exception):
            add_explanation(error)
            if isinstance(error, TpuportError):
                trim(error)


def add_explanation(error: BaseException) -> bool:
    """Add an explanatory note to an exception, unless it has one already.

    Returns:
        Whether it has such a note now.
    """
    if any(note.startswith(_MARK) for one, _ in _chain(error) for note in _notes(one)):
        return True
    try:
        diagnosis = explain_error(error)
    except Exception as bug:
        # A bug in here must not replace the user's exception.
        error.add_note(f"{_MARK} nothing: {type(bug).__name__}: {bug}")
        return False
    if diagnosis is None:
        return False
    error.add_note(f"{_MARK} ({diagnosis.cause}): {diagnosis}")
    return True


def _notes(error: BaseException) -> list[str]:
    return [note for note in getattr(error, "__notes__", ()) if isinstance(note, str)]


def _chain(
    error: BaseException, caller: tuple[CodePlace, ...] = ()
) -> Iterator[tuple[BaseException, tuple[CodePlace, ...]]]:
    """Yield the exception and those that led to it, each with the user's lines, innermost first.

    An exception that was raised and caught inside a library has no line of the user's. It takes the
    lines of the exception that it led to.
    """
    seen: set[int] = set()
    waiting: list[tuple[BaseException, tuple[CodePlace, ...]]] = [(error, caller)]
    while waiting:
        one, outer = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        places = tuple(user_places(one.__traceback__)) or outer
        yield one, places
        behind = [one.__cause__, None if one.__suppress_context__ else one.__context__]
        if isinstance(one, BaseExceptionGroup):
            behind += one.exceptions
        waiting += ((other, places) for other in behind if other is not None)


def _explain(error: BaseException, places: tuple[CodePlace, ...]) -> Diagnosis | None:
    raised = Raised(
        tuple(f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__),
        str(error),
        places[0] if places else None,
        passes_through(error.__traceback__, _PORTED),
        *_failed_inside(error),
        module=running_module(error.__traceback__),
    )
    for name, cause in find_causes().items():
        found = cause.explain(raised)
        if found is not None:
            return _diagnosis(name, found, raised.place, cause.RULES)
    return None


def _failed_inside(error: BaseException) -> tuple[str | None, str | None]:
    """Return the library of which a line failed unforeseen, and that line."""
    found = failing_line(error.__traceback__)
    if found is None:
        return None, None
    package, place, code = found
    # A name that the line does not have was looked up for the script: it is absent in eager, too.
    is_dynamic = isinstance(error, AttributeError) and error.name not in code.co_names
    return (None, None) if is_dynamic else (package, str(place))


def _diagnosis(
    cause: str, found: Explanation, place: CodePlace | None, codes: tuple[str, ...]
) -> Diagnosis:
    finding = None if place is None else _finding_at(place, codes)
    remedies = found.remedies
    if place is not None and finding is not None and _has_safe_fix(finding.code):
        remedies += (
            f"or have the line rewritten in the file itself: tpuport rewrite {place.file}",
        )
    return Diagnosis(
        cause,
        found.problem,
        remedies,
        *((None, None, None) if place is None else (place.file, place.line, place.source)),
        value=found.value,
        details=found.details,
        rule=finding and finding.code,
        rule_message=finding and finding.message,
    )


@functools.cache
def find_causes() -> dict[str, Cause]:
    """Return every cause by its name, its file's with dashes, in the order of asking them."""
    found: dict[str, Cause] = {}
    for info in sorted(pkgutil.iter_modules(causes.__path__), key=lambda m: m.name):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{causes.__name__}.{info.name}")
        name = "".join(word.title() for word in info.name.split("_"))
        found[info.name.replace("_", "-")] = getattr(module, name)()
    return dict(sorted(found.items(), key=lambda item: item[1].LAST))


def _finding_at(place: CodePlace, codes: tuple[str, ...]) -> "Finding | None":
    """Return the finding at a line of the first of these rules that has one."""
    if not codes:
        return None
    from tpuport.rules._apply import find

    try:
        source = Path(place.file).read_text(encoding="utf-8")
        # Without its folders: in a folder such as `tests` the rules would treat all of it as code
        # that is never traced, but this line was traced.
        findings = find(source, file=Path(place.file).name, strict=True)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        # A notebook's cell, an `exec` or a deleted file: the diagnosis has no rule then.
        return None
    here = {f.code: f for f in reversed(findings) if f.line <= place.line <= f.end_line}
    return next((here[code] for code in codes if code in here), None)


def _has_safe_fix(code: str) -> bool:
    from tpuport.lint.catalogue import NO_FIX, entry_named

    return entry_named(code).fix.partition(" ")[0] not in {NO_FIX, "unsafe"}
