"""Patterns for dotted names, which select the parameters or modules that a rule applies to."""

import difflib
import functools
import re
from collections.abc import Iterable
from typing import Final

from tpuport.foundation.errors import UsageError

REGEX_PREFIX: Final = "re:"
_SHOWN = 4


@functools.cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern, which has to match the full name.

    `*` matches anything within one part of a dotted name, `**` matches any number of parts,
    also none: `layers.*.mlp.*_proj.weight`, `**.bias`, `**`. Everything else is literal. A
    pattern that starts with `re:` is a regular expression.

    Raises:
        UsageError: The regular expression is wrong, or `**` is only a piece of a part.
    """
    if pattern.startswith(REGEX_PREFIX):
        try:
            return re.compile(pattern.removeprefix(REGEX_PREFIX))
        except re.error as error:
            raise UsageError(f"the pattern {pattern!r} is no regular expression: {error}") from None
    parts = pattern.split(".")
    if any("**" in part and part != "**" for part in parts):
        raise UsageError(
            f"in the pattern {pattern!r} a ** is not a whole part: write 'blocks.**.weight', or *"
            " for anything within one part"
        )
    made, separator = "", ""
    for index, part in enumerate(parts):
        if part != "**":
            made += separator + "[^.]*".join(map(re.escape, part.split("*")))
            separator = r"\."
        elif index == len(parts) - 1:
            made += rf"(?:{separator}[^.]+)*" if separator else ".*"
        else:
            made += rf"{separator}(?:[^.]+\.)*"
            separator = ""
    return re.compile(made)


def matches(pattern: str, name: str) -> bool:
    """Return whether a name matches a pattern (see `compiled`)."""
    return compiled(pattern).fullmatch(name) is not None


def generalised(name: str) -> str:
    """Return a name with each numeric part replaced by `*`, such as `layers.*.w`."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def nearest(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the generalised names closest to a pattern that matches none, best first.

    If none is similar, return the first names.
    """
    known = list(dict.fromkeys(generalised(name) for name in names if name))
    ends = [name for name in known if name.rpartition(".")[2] == pattern.rpartition(".")[2]]
    close = difflib.get_close_matches(pattern, known, n=_SHOWN, cutoff=0.5)
    return list(dict.fromkeys([*ends, *close]) or known)[:_SHOWN]


def refuse_unmatched(patterns: Iterable[str], names: Iterable[str], what: str) -> None:
    """Refuse a pattern that matches none of the names.

    Raises:
        UsageError: A pattern matches no name; the message shows similar names.
    """
    names = list(names)
    for pattern in patterns:
        if any(matches(pattern, name) for name in names):
            continue
        close = nearest(pattern, names)
        hint = f"; there are {', '.join(map(repr, close))}" if close else ""
        raise UsageError(f"the pattern {pattern!r} matches no {what}{hint}")
