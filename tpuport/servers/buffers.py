"""Findings and fixes of the text in an editor, which may differ from the file."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpuport.lint.cache import Cache
from tpuport.lint.catalogue import CatalogueEntry, entry_named, known_codes
from tpuport.lint.files import is_excluded
from tpuport.lint.fixing import Change, Request, ignored_by_comments, rewrite_source
from tpuport.lint.outcome import decide
from tpuport.lint.records import Problem, Reported
from tpuport.lint.run import run_source
from tpuport.lint.settings import Settings, find_config, load_settings
from tpuport.rules._discovery import find_rules
from tpuport.source.rewrite.matching import Match
from tpuport.source.rewrite.rewriter import NotSettledError, rewrite
from tpuport.source.syntax.module import Module


@dataclass(frozen=True)
class BufferEdit:
    """Lines to replace, counted from 0: from `first` on, up to `last` without it."""

    first: int
    last: int
    text: str


def settings_of(path: Path) -> Settings:
    """Return the configuration for a file, from the nearest pyproject.toml.

    Raises:
        UsageError: it is wrong.
    """
    return load_settings(find_config(path.parent), start=path.parent)


def findings_of(text: str, path: Path, settings: Settings) -> Sequence[Reported]:
    """Return what lint shows of a text; what other files say of it is not known here."""
    if is_excluded(path, settings):
        return ()
    # Which findings have a fix is asked when the editor asks for it: that takes most of the time.
    checked = run_source(
        text.encode(errors="replace"), str(path), strict=settings.strict, fixes=False
    )
    return decide([checked], settings, known=known_codes(Cache(None))).shown


def fixed(text: str, path: Path, finding: Reported) -> str | None:
    """Return a text with one finding fixed; None if its rule has no fix that is proved for it."""
    rules = [rule for rule in find_rules() if finding.code == rule.CODE]
    wanted = finding.line, finding.column
    passes = 0

    def others(module: Module) -> Callable[[Match], bool]:
        nonlocal passes
        passes += 1
        first, ignored = passes == 1, ignored_by_comments(module)

        def stays(match: Match) -> bool:
            place = match.finding.line, match.finding.column
            return not first or place != wanted or ignored(match)

        return stays

    try:
        result = rewrite(text, rules=rules, file=str(path), unsafe=True, ignored=others)
    except (SyntaxError, NotSettledError, RecursionError):
        return None
    return result.source if result.applied else None


def all_fixed(text: str, path: Path, settings: Settings) -> str | None:
    """Return a text with every safe fix applied; None if there is none."""
    request = Request(settings, known_codes(Cache(None)))
    change = rewrite_source(text.encode(), str(path), request)
    if isinstance(change, Problem):
        return None
    assert isinstance(change, Change)
    return change.after if change.changed else None


def edits(before: str, after: str) -> list[BufferEdit]:
    """Return the replacements of lines that make one text of another."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    matcher = difflib.SequenceMatcher(None, old, new, False)
    return [
        BufferEdit(a, b, "".join(new[c:d]))
        for kind, a, b, c, d in matcher.get_opcodes()
        if kind != "equal"
    ]


def summary(code: str) -> str:
    """Return the beginning of a rule's page as Markdown."""
    entry: CatalogueEntry = entry_named(code)
    paragraphs = entry.page.split("\n\n")
    head = f"**{entry.code} {entry.name}** ({entry.severity}, fix: {entry.fix})"
    return "\n\n".join([head, entry.message, *paragraphs[:2], f"`tpuport explain {entry.code}`"])
