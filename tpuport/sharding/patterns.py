"""Patterns for dotted names: which parameters or modules a rule is about."""

import functools
import re
from typing import Final

from tpuport.errors import UsageError

REGEX_PREFIX: Final = "re:"


@functools.cache
def compiled(pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern, which a whole name has to match.

    `*` stands for anything within one part of a dotted name, `**` for any number of whole parts,
    also none: `layers.*.mlp.*_proj.weight`, `**.bias`, `**`. Everything else is literal. After
    `re:` comes a regular expression instead.

    Raises:
        UsageError: the regular expression is wrong, or `**` is not a whole part.
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
    """Whether a name matches a pattern (see `compiled`)."""
    return compiled(pattern).fullmatch(name) is not None


def generalised(name: str) -> str:
    """The pattern of a name in which each part that is a number stands for any: `layers.*.w`."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))
