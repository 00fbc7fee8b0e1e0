"""Rewrites files: the fixes of the rules asked for, and an account of what was left and why."""

import os
import stat
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuport.errors import UsageError
from tpuport.lint.cache import Cache, write_atomically
from tpuport.lint.comments import find_directives
from tpuport.lint.notebooks import marked, marked_place, write_notebook
from tpuport.lint.records import RANK, Checked, Problem, Trouble
from tpuport.lint.run import Failure, Progress, Workers, attempt, processors
from tpuport.lint.settings import Settings
from tpuport.lint.sources import Source, UnreadableError, read_source
from tpuport.rules._discovery import find_rules
from tpuport.source.engine import Match
from tpuport.source.finding import Severity
from tpuport.source.inference import StaticKinds
from tpuport.source.module import Module
from tpuport.source.rewriter import NotSettledError, RewriteResult, rewrite


@dataclass(frozen=True)
class Request:
    """Which fixes to apply.

    Attributes:
        settings: What is selected, and the mildest severity of which to say why it is left.
        codes: The codes that there are.
        unsafe: Whether to apply fixes that can change results.
    """

    settings: Settings
    codes: Sequence[str]
    unsafe: bool = False

    def options(self, file: str, reached: Sequence[str]) -> dict[str, Any]:
        """What it asks for in one file.

        Args:
            file: The path that the file goes by.
            reached: Its functions that only steps in other files reach.
        """
        selects = self.settings.selects_in
        return {
            "file": file,
            "codes": [code for code in self.codes if selects(code, Path(file))],
            "severity": self.settings.severity.value,
            "unsafe": self.unsafe,
            "reached": list(reached),
        }


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


def rewrite_files(
    pairs: Sequence[tuple[Path, Checked]],
    request: Request,
    *,
    jobs: int | None = None,
    cache: Cache | None = None,
    progress: Progress | None = None,
) -> "list[Change | Problem]":
    """What rewriting makes of files, which stay as they are; in their order.

    Args:
        pairs: Each file with what a run says of it.
        request: Which fixes to apply.
        jobs: How many processes may work at once; as many as there are processors if left out.
        cache: Where answers are kept.
        progress: Called now and then.
    """
    inputs = [(path, request.options(one.file, one.reached)) for path, one in pairs]
    with Workers(jobs=jobs or processors(), cache=cache or Cache(None)) as workers:
        answers = workers.map(rewrite_file, inputs, progress)
    return [
        _result(answer, one.file, path) for answer, (path, one) in zip(answers, pairs, strict=True)
    ]


def rewrite_source(data: bytes, name: str, request: Request) -> "Change | Problem":
    """The same for one text that is in no file."""
    return _result(attempt(rewrite_file, data, name, request.options(name, ())), name, None)


def _result(answer: "Any | Failure", name: str, path: Path | None) -> "Change | Problem":
    if isinstance(answer, Failure):
        return Problem(name, answer.reason, answer.trouble)
    if "reason" in answer:
        return Problem(name, answer["reason"], Trouble(answer["trouble"]))
    left = tuple(Stays(*fields) for fields in answer["left"])
    applied = Counter[str](answer["applied"])
    texts = answer["before"], answer["after"], answer["encoding"]
    return Change(path, name, *texts, applied, left)


def rewrite_file(data: bytes, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What rewriting makes of one file, as JSON; or why nothing.

    Args:
        data: The whole file.
        name: Its name; only the end matters.
        options: As `Request.options` gives them.
    """
    trouble = Trouble.UNREAD
    try:
        return _rewrite(read_source(data, name), options)
    except UnreadableError as error:
        reason, trouble = error.reason, error.trouble
    except SyntaxError as error:
        place = f" in line {error.lineno}" if error.lineno else ""
        reason = f"no Python 3 that can be read{place}: {error.msg}"
    except UsageError as error:
        reason = str(error)
    except (RecursionError, MemoryError):
        reason = "nested too deeply to be read"
    except NotSettledError as error:
        reason, trouble = str(error), Trouble.INTERNAL
    return {"reason": reason, "trouble": trouble.value}


def _rewrite(source: Source, options: Mapping[str, Any]) -> dict[str, Any]:
    result = rewrite(
        source.text if source.notebook is None else marked(source.notebook),
        rules=[rule for rule in find_rules() if rule.CODE in options["codes"]],
        kinds=StaticKinds(frozenset(options["reached"])),
        file=options["file"],
        unsafe=options["unsafe"],
        ignored=ignored_by_comments,
    )
    after = source.raw
    if result.applied:
        after = result.source
        if source.notebook is not None:
            after = write_notebook(source.raw, source.notebook, after)
    return {
        "before": source.raw,
        "after": after,
        "encoding": source.encoding,
        "applied": Counter(applied.code for applied in result.applied),
        "left": _stays(result, source, options),
    }


def _stays(
    result: RewriteResult, source: Source, options: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    most = RANK[Severity(options["severity"])]
    found: list[tuple[str, str, str]] = []
    for left in result.left:
        finding = left.finding
        if RANK[finding.severity] > most:
            continue
        line, cell = finding.line, ""
        if source.notebook is not None:
            number, line = marked_place(source.notebook, line)
            cell = f"cell {number}:"
        place = f"{options['file']}:{cell}{line}:{finding.column + 1}"
        found.append((place, finding.code, left.reason))
    return found


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
        if change.path.read_bytes() != change.before.encode(change.encoding):
            return Problem(change.file, "not written: the file has changed meanwhile")
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
