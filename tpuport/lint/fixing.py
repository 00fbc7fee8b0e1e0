"""Rewriting of files with the selected rules' fixes, and a record of findings left and why."""

import os
import stat
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuport.foundation.errors import UsageError
from tpuport.foundation.files import write_atomically
from tpuport.lint.cache import Cache
from tpuport.lint.comments import find_directives
from tpuport.lint.notebooks import marked, marked_place, write_notebook
from tpuport.lint.records import RANK, Checked, Problem, Trouble
from tpuport.lint.run import FileFailure, Progress, Workers, attempt, processors
from tpuport.lint.settings import Settings
from tpuport.lint.sources import Source, UnreadableError, read_source
from tpuport.source.inference.inference import StaticKinds
from tpuport.source.rewrite.finding import Severity
from tpuport.source.rewrite.matching import Match
from tpuport.source.rewrite.rewriter import NotSettledError, RewriteResult, rewrite
from tpuport.source.syntax.module import Module

# Linting reads syntax of newer Pythons too; rewriting needs the Python that the code is for.
_VERSION = ".".join(map(str, sys.version_info[:2]))


@dataclass(frozen=True)
class Request:
    """The fixes to apply.

    Attributes:
        settings: The selected codes, and the mildest severity for which to report findings left.
        codes: The codes of all rules.
        unsafe: Whether to apply fixes that can change results.
    """

    settings: Settings
    codes: Sequence[str]
    unsafe: bool = False

    def options(self, file: str, reached: Sequence[str]) -> dict[str, Any]:
        """Return the options for one file.

        Args:
            file: The path of the file as the user knows it.
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
    """A finding that rewriting leaves, with the reason."""

    place: str
    code: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.code} left: {self.reason}"


@dataclass(frozen=True)
class Change:
    """The result of rewriting one file.

    Attributes:
        path: The file; None for standard input.
        file: Its path as the user knows it.
        before: Its text.
        after: Its new text, the same if nothing was applied.
        encoding: The encoding to write that text with.
        applied: Number of fixes of each code.
        left: The findings that stay and have at least the severity asked for.
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
        """Return whether there is anything to write."""
        return self.before != self.after


def rewrite_files(
    pairs: Sequence[tuple[Path, Checked]],
    request: Request,
    *,
    jobs: int | None = None,
    cache: Cache | None = None,
    progress: Progress | None = None,
) -> "list[Change | Problem]":
    """Compute the rewritten text of files, in their order, without writing anything.

    Args:
        pairs: Each file with the result of a lint run.
        request: The fixes to apply.
        jobs: Number of processes that may work at once; the number of processors if left out.
        cache: The cache of answers.
        progress: Callback for the number of files done.
    """
    inputs = [(path, request.options(one.file, one.reached)) for path, one in pairs]
    with Workers(jobs=jobs or processors(), cache=cache or Cache(None)) as workers:
        answers = workers.map(rewrite_file, inputs, progress)
    return [
        _result(answer, one.file, path) for answer, (path, one) in zip(answers, pairs, strict=True)
    ]


def rewrite_source(data: bytes, name: str, request: Request) -> "Change | Problem":
    """Compute the rewritten text of source that does not come from a file."""
    return _result(attempt(rewrite_file, data, name, request.options(name, ())), name, None)


def _result(answer: "Any | FileFailure", name: str, path: Path | None) -> "Change | Problem":
    if isinstance(answer, FileFailure):
        return Problem(name, answer.reason, answer.trouble)
    if "reason" in answer:
        return Problem(name, answer["reason"], Trouble(answer["trouble"]))
    left = tuple(Stays(*fields) for fields in answer["left"])
    applied = Counter[str](answer["applied"])
    texts = answer["before"], answer["after"], answer["encoding"]
    return Change(path, name, *texts, applied, left)


def rewrite_file(data: bytes, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrite one file and return the result as JSON, or the reason why it cannot be rewritten.

    Args:
        data: The content of the file.
        name: Its name; only the suffix matters.
        options: The options that `Request.options` returns.
    """
    trouble = Trouble.UNREAD
    try:
        return _rewrite(read_source(data, name), options)
    except UnreadableError as error:
        reason, trouble = error.reason, error.trouble
    except SyntaxError as error:
        place = f" in line {error.lineno}" if error.lineno else ""
        reason = f"no Python {_VERSION} that can be read{place}: {error.msg}"
    except UsageError as error:
        reason = str(error)
    except (RecursionError, MemoryError):
        reason = "nested too deeply to be read"
    except NotSettledError as error:
        reason, trouble = str(error), Trouble.INTERNAL
    return {"reason": reason, "trouble": trouble.value}


def _rewrite(source: Source, options: Mapping[str, Any]) -> dict[str, Any]:
    # Imported late: an answer from the cache needs no rules.
    from tpuport.rules._discovery import find_rules

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
    """Return a predicate that tells which findings in a parsed text a comment ignores."""
    directives = find_directives(module.text.text)

    def ignored(match: Match) -> bool:
        line: int = getattr(match.node, "lineno")  # noqa: B009 (nodes without a place have none)
        end: int = getattr(match.node, "end_lineno")  # noqa: B009
        return any(directive.covers(match.finding.code, line, end) for directive in directives)

    return ignored


# Writing.


def write_in_place(change: Change) -> Problem | None:
    """Overwrite a file with its new text, atomically and with the same permissions."""
    assert change.path is not None
    try:
        mode = stat.S_IMODE(change.path.stat().st_mode)
        # `os.replace` ignores the permissions of its target, but a read-only file is meant to stay.
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
        change: The result of rewriting the file.
        root: The folder that its path is relative to.
        folder: The folder that the copy of `root` goes into.
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
    """Return the root of the paths that copies keep: the current folder, or the files' own."""
    here = Path.cwd()
    absolute = [path.absolute() for path in paths]
    if all(path.is_relative_to(here) for path in absolute):
        return here
    return Path(os.path.commonpath([path.parent for path in absolute]))


def _encoded(change: Change) -> bytes:
    return change.after.encode(change.encoding)
