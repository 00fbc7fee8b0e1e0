"""Rewriting of loaded functions, without touching their files, modules or classes.

`rewrite_function` reads a function's source, applies the rules at the places where a trace met
traced values, and compiles the result to a code object that fits the function. `swapped` puts such
code objects in place for a while.
"""

import gc
import inspect
import linecache
import textwrap
import traceback
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any, Literal

from tpuport.source.inference.kinds import ObservedKinds, Site
from tpuport.source.rewrite import codegen
from tpuport.source.rewrite.finding import Applied, Left
from tpuport.source.rewrite.matching import RuleVisitor, normal_line_breaks
from tpuport.source.rewrite.rewriter import Session
from tpuport.source.syntax.text import SourceText

# An indented function needs something to be indented in; this line stands for no line of the file.
_HEADER = "if True:\n"


@dataclass(frozen=True)
class LiveRewrite:
    """A function's new code, not yet installed.

    Attributes:
        function: The function that was read.
        original: Its code object.
        code: The new one: same name, parameters, free variables, file and line numbers.
        file: The file that the function was read from.
        line: The line that it starts on, decorators included.
        before: Its source, without common indentation.
        after: The source that `code` was compiled from, without common indentation.
        applied: The fixes made, each with its own before and after.
        left: Findings that stay, with reasons.
    """

    function: FunctionType
    original: CodeType
    code: CodeType
    file: str
    line: int
    before: str
    after: str
    applied: tuple[Applied, ...]
    left: tuple[Left, ...]

    def __bool__(self) -> Literal[True]:
        return True

    @property
    def lines(self) -> frozenset[int]:
        """Return the lines of the file whose findings the rewrite removed."""
        return frozenset(
            line
            for applied in self.applied
            for line in range(applied.finding.line, applied.finding.end_line + 1)
        )

    def contains(self, code: CodeType) -> bool:
        """Return whether a code object is the new code or belongs to a function nested in it."""
        return any(inner is code for inner in codegen.nested_codes(self.code))


@dataclass(frozen=True)
class Refusal:
    """The reason why a function was not rewritten.

    It is false in a test, so that `if rewrite := rewrite_function(...)` works.

    Attributes:
        reason: The obstacle, as the end of "not rewritten: ...".
        left: Findings of rules that have no fix here, with reasons.
    """

    reason: str
    left: tuple[Left, ...] = ()

    def __bool__(self) -> Literal[False]:
        return False


def functions_with(code: CodeType) -> list[FunctionType]:
    """Return the live functions that run a code object or that create functions which do.

    To change a nested function, the functions that create it have to be rewritten. A nested
    function that a decorator or an earlier call has already created must be rewritten itself.
    """
    if "<locals>" not in code.co_qualname:  # no function creates it: half the time of what follows
        referrers = gc.get_referrers(code)
        return [f for f in referrers if type(f) is FunctionType and f.__code__ is code]
    return [
        candidate
        for candidate in gc.get_objects()
        if type(candidate) is FunctionType
        and candidate.__code__.co_filename == code.co_filename
        and any(inner is code for inner in codegen.nested_codes(candidate.__code__))
    ]


def functions_that_ran(code: CodeType, error: BaseException) -> list[FunctionType]:
    """Return the functions with a code object that ran when it raised an error, by their frames.

    Those around it on the stack that create such functions are among them. A search of all that
    lives, as `functions_with`, takes as long as the trace of a small model.
    """
    found: dict[int, FunctionType] = {}
    ran = False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        ran = ran or frame.f_code is code
        if any(inner is code for inner in codegen.nested_codes(frame.f_code)):
            held = (f for f in gc.get_referents(frame) if type(f) is FunctionType)
            found |= {id(f): f for f in held if f.__code__ is frame.f_code}
    return list(found.values()) if ran else []


def site_of(frame: FrameType) -> Site:
    """Return the place in a user's file that a frame is executing, for `rewrite_function`."""
    positions = list(frame.f_code.co_positions())
    index = frame.f_lasti // 2  # an offset in bytes; `co_positions` has an entry per two-byte unit
    line, _, column, _ = positions[index] if 0 <= index < len(positions) else (None,) * 4
    return Site(line if line is not None else frame.f_lineno, column)


def rewrite_function(
    function: Callable[..., Any],
    *,
    sites: Collection[Site | tuple[int, int | None] | int],
    rules: Sequence[type[RuleVisitor]],
) -> LiveRewrite | Refusal:
    """Rewrite the lines of a function where a trace needed concrete values.

    A nested function is rewritten as part of the function that defines it, because each run creates
    it anew. For a decorated function pass the inner one, which the decorator keeps.

    Args:
        function: A Python function or bound method, as the user left it (outside `swapped`).
        sites: Lines of its file where Python asked for the truth or number of a traced value, with
            the column where it is known.
        rules: The rules to apply.

    Returns:
        The rewrite, or the reason why there is none.

    Raises:
        NotSettledError: rules undo each other's work.
    """
    plain: object = getattr(function, "__func__", function)
    if not isinstance(plain, FunctionType):
        return Refusal(f"a {type(plain).__name__} has no Python source")
    code = plain.__code__
    try:
        text = _source_of(plain)
        codegen.check_source(text, code)
    except (OSError, codegen.MismatchError) as obstacle:
        return Refusal(str(obstacle))
    session = Session(
        [rule() for rule in rules],
        ObservedKinds(sites),
        file=code.co_filename,
        imports_inside=True,
    )
    new = session.run(text)
    left = tuple(session.left)
    if not session.applied:
        reasons = "; ".join(f"line {item.finding.line}: {item.reason}" for item in left)
        return Refusal(reasons or "no rule knows what to do with these lines", left)
    try:
        new_code = codegen.compile_like(new, code)
    except codegen.MismatchError as obstacle:
        return Refusal(str(obstacle), left)
    return LiveRewrite(
        function=plain,
        original=code,
        code=new_code,
        file=code.co_filename,
        line=code.co_firstlineno,
        before=_shown(text),
        after=_shown(new),
        applied=tuple(session.applied),
        left=left,
    )


@contextmanager
def swapped(rewrites: Iterable[LiveRewrite]) -> Generator[None]:
    """Run functions with their rewritten code inside a `with` block.

    Afterwards every function has the same code object as before, even after an exception.
    """
    undo: list[tuple[FunctionType, CodeType]] = []
    try:
        for rewrite in rewrites:
            function: Any = rewrite.function
            undo.append((function, function.__code__))
            function.__code__ = rewrite.code
        yield
    finally:
        for function, code in reversed(undo):
            function.__code__ = code


def _source_of(function: FunctionType) -> SourceText:
    """Return the definition of a function as its file has it.

    Raises:
        OSError: there is no source, or the function is a lambda.
    """
    code = function.__code__
    if code.co_name == "<lambda>":
        raise OSError("it is a lambda")
    # If the file was rewritten at import, its text differs from the code that runs.
    rewritten = getattr(function.__globals__.get("__loader__"), "rewritten_text", None)
    if isinstance(rewritten, SourceText):
        return _rewritten_source(rewritten, code)
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, function.__globals__)
    first = code.co_firstlineno
    if len(lines) < first:
        raise OSError(f"the source of {code.co_filename} is not available")
    source = _block(lines[first - 1 :])
    origins = list(range(first, first + source.count("\n") + 1))
    return _indentable(source, origins, _numbered(source, first))


def _rewritten_source(text: SourceText, code: CodeType) -> SourceText:
    """Return the definition of a function in the text of its rewritten file.

    Raises:
        OSError: the text does not contain it.
    """
    lines = [f"{line}\n" for line in text.lines]
    for place, origin in enumerate(text.origins):
        starts = lines[place].lstrip().startswith(("@", "def ", "async def "))
        if origin != code.co_firstlineno or not starts:
            continue
        source = _block(lines[place:])
        origins = text.origins[place : place + source.count("\n") + 1]
        found = _indentable(source, origins, text.original)
        with suppress(codegen.MismatchError):
            codegen.check_source(found, code)
            return found
    raise OSError(f"the rewritten source of {code.co_qualname} is not available")


def _block(lines: Sequence[str]) -> str:
    """Return the definition that lines start with.

    Raises:
        OSError: they do not parse.
    """
    try:
        block = inspect.getblock(lines)
    except (IndentationError, SyntaxError) as error:
        raise OSError(f"its source does not parse ({error})") from error
    return normal_line_breaks("".join(block)).rstrip("\n")


def _indentable(source: str, origins: Sequence[int], original: Mapping[int, str]) -> SourceText:
    if source.startswith((" ", "\t")):
        return SourceText(_HEADER + source, [origins[0], *origins], original)
    return SourceText(source, origins, original)


def _numbered(source: str, first: int) -> dict[int, str]:
    return dict(enumerate(source.split("\n"), first))


def _shown(text: SourceText) -> str:
    return textwrap.dedent(text.text.removeprefix(_HEADER))
