"""Rewrites files: the fixes of the rules asked for, and an account of what was left and why."""

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpuport.errors import UsageError
from tpuport.lint.cache import write_atomically
from tpuport.lint.comments import find_directives
from tpuport.lint.files import shown_path
from tpuport.lint.notebooks import marked, marked_place, write_notebook
from tpuport.lint.records import RANK, Problem, Trouble
from tpuport.lint.settings import Settings
from tpuport.lint.sources import Source, UnreadableError, read_source
from tpuport.source.discovery import find_rules
from tpuport.source.engine import Match
from tpuport.source.kinds import Oracle, StaticKinds
from tpuport.source.module import Module
from tpuport.source.rewriter import NotSettledError, RewriteResult, rewrite


@dataclass(frozen=True)
class Stays:
    """A finding that rewriting leaves, and why."""

    place: str
    code: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.code} left: {self.reason}"


@dataclass(frozen=True)
class Change:
    """What rewriting makes of one file.

    Attributes:
        path: The file; None for standard input.
        file: Its path as the user knows it.
        before: Its text.
        after: Its new text, the same if nothing was applied.
        encoding: What to write that text with.
        applied: How often each code was fixed.
        left: The findings that stay, as far as their severity is asked for.
    """

    path: Path | None
    file: str
    before: str
    after: str
    encoding: str
    applied: Counter[str]
    left: tuple[Stays, ...]

    @property
    def changed(self) -> bool:
        """Whether there is anything to write."""
        return self.before != self.after


def rewrite_file(
    path: Path, settings: Settings, *, unsafe: bool, reached: Iterable[str] = ()
) -> "Change | Problem":
    """What rewriting makes of a file, which stays as it is.

    Args:
        path: The file.
        settings: Which rules to apply.
        unsafe: Whether to apply fixes that can change results.
        reached: The functions of the file that only steps in other files reach.
    """
    name = shown_path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        return Problem(name, f"cannot be read: {error.strerror or error}")
    return rewrite_bytes(data, name, settings, unsafe=unsafe, path=path, reached=reached)


def rewrite_bytes(
    data: bytes,
    name: str,
    settings: Settings,
    *,
    unsafe: bool,
    path: Path | None = None,
    reached: Iterable[str] = (),
) -> "Change | Problem":
    """The same for a file's content, with the path it goes by."""
    kinds = StaticKinds(frozenset(reached))
    try:
        return _rewrite(read_source(data, name), name, settings, unsafe, path, kinds)
    except UnreadableError as error:
        return Problem(name, error.reason, error.trouble)
    except SyntaxError as error:
        place = f" in line {error.lineno}" if error.lineno else ""
        return Problem(name, f"no Python 3 that can be read{place}: {error.msg}")
    except UsageError as error:
        return Problem(name, str(error))
    except (RecursionError, MemoryError):
        return Problem(name, "nested too deeply to be read")
    except NotSettledError as error:
        return Problem(name, str(error), Trouble.INTERNAL)


def _rewrite(
    source: Source, name: str, settings: Settings, unsafe: bool, path: Path | None, kinds: Oracle
) -> Change:
    rules = [rule for rule in find_rules() if settings.selects_in(rule.CODE, Path(name))]
    text = source.text if source.notebook is None else marked(source.notebook)
    result = rewrite(
        text, rules=rules, kinds=kinds, file=name, unsafe=unsafe, ignored=ignored_by_comments
    )
    after = source.raw
    if result.applied:
        after = result.source
        if source.notebook is not None:
            after = write_notebook(source.raw, source.notebook, after)
    return Change(
        path=path,
        file=name,
        before=source.raw,
        after=after,
        encoding=source.encoding,
        applied=Counter(applied.code for applied in result.applied),
        left=_stays(result, source, name, settings),
    )


def _stays(
    result: RewriteResult, source: Source, name: str, settings: Settings
) -> tuple[Stays, ...]:
    most = RANK[settings.severity]
    found: list[Stays] = []
    for left in result.left:
        finding = left.finding
        if RANK[finding.severity] > most:
            continue
        line, cell = finding.line, ""
        if source.notebook is not None:
            number, line = marked_place(source.notebook, line)
            cell = f"cell {number}:"
        place = f"{name}:{cell}{line}:{finding.column + 1}"
        found.append(Stays(place, finding.code, left.reason))
    return tuple(found)


def ignored_by_comments(module: Module) -> Callable[[Match], bool]:
    """Says which findings in a parsed text a comment asks to ignore."""
    directives = find_directives(module.text.text)

    def ignored(match: Match) -> bool:
        line: int = getattr(match.node, "lineno")  # noqa: B009 (nodes without a place have none)
        end: int = getattr(match.node, "end_lineno")  # noqa: B009
        return any(directive.covers(match.finding.code, line, end) for directive in directives)

    return ignored


# Writing.


def write_in_place(change: Change) -> Problem | None:
    """Write a file's new text over it; its permissions stay, and it is never there in part."""
    assert change.path is not None
    try:
        mode = stat.S_IMODE(change.path.stat().st_mode)
        # What is read-only is so on purpose; replacing the file would get around that.
        if not os.access(change.path, os.W_OK):
            return Problem(change.file, "not written: the file is read-only")
        write_atomically(change.path, _encoded(change), mode=mode)
    except OSError as error:
        return Problem(change.file, f"not written: {error.strerror or error}")
    except UnicodeEncodeError as error:
        return Problem(change.file, f"not written: {error.reason} in {change.encoding}")
    return None


def write_to(change: Change, root: Path, folder: Path) -> Problem | None:
    """Write a file's text to the same place in another folder.

    Args:
        change: What became of the file.
        root: What its path is relative to.
        folder: Where the copy of that root is.
    """
    assert change.path is not None
    target = folder / change.path.absolute().relative_to(root)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = stat.S_IMODE(change.path.stat().st_mode)
        write_atomically(target, _encoded(change), mode=mode | stat.S_IWUSR)
    except OSError as error:
        return Problem(change.file, f"not written to {target}: {error.strerror or error}")
    except UnicodeEncodeError as error:
        return Problem(change.file, f"not written: {error.reason} in {change.encoding}")
    return None


def common_root(paths: Sequence[Path]) -> Path:
    """The folder that copies of files keep their paths from: the current one, or theirs."""
    here = Path.cwd()
    absolute = [path.absolute() for path in paths]
    if all(path.is_relative_to(here) for path in absolute):
        return here
    return Path(os.path.commonpath([path.parent for path in absolute]))


def _encoded(change: Change) -> bytes:
    return change.after.encode(change.encoding)
