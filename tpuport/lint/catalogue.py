"""The rules as people ask about them: what `explain` shows and codes are checked with."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from tpuport.errors import UsageError
from tpuport.lint.pseudo import UnusedIgnore
from tpuport.lint.spelling import nearest
from tpuport.rules._discovery import find_rules
from tpuport.source.finding import Severity

if TYPE_CHECKING:
    from tpuport.lint.cache import Cache
    from tpuport.rules._rule import Example, Rule

NO_FIX = "none"


@dataclass(frozen=True)
class Entry:
    """One rule.

    Attributes:
        name: Its class.
        fix: How safe its fix is, such as `exact` or `close (rtol 1e-06)`; `none` if it has none.
        page: Its docstring.
    """

    code: str
    name: str
    message: str
    severity: Severity
    fix: str
    page: str
    examples: "tuple[Example, ...]" = ()
    clean: tuple[str, ...] = ()


@cache
def catalogue() -> tuple[Entry, ...]:
    """Every rule, ordered by code."""
    own = Entry(
        code=UnusedIgnore.CODE,
        name=UnusedIgnore.__name__,
        message=UnusedIgnore.MESSAGE,
        severity=UnusedIgnore.SEVERITY,
        fix=NO_FIX,
        page=inspect.getdoc(UnusedIgnore) or "",
    )
    return (own, *(_entry(rule) for rule in find_rules()))


def known_codes(cache: "Cache") -> list[str]:
    """The codes of all rules. From the cache, so that a run it answers need not load the rules."""
    key = cache.key("codes")
    codes = cache.get(key)
    if codes is None:
        codes = [entry.code for entry in catalogue()]
        cache.put(key, codes)
    return codes


def entry_named(wanted: str) -> Entry:
    """The rule with a code, or a name in any spelling.

    Raises:
        UsageError: there is none.
    """
    entries = catalogue()
    by_name = {name.lower(): entry for entry in entries for name in (entry.code, entry.name)}
    key = wanted.replace("-", "").replace("_", "").lower()
    if key in by_name:
        return by_name[key]
    near = nearest(key, list(by_name))
    hint = f" Did you mean {by_name[near].code}?" if near else ""
    raise UsageError(f"There is no rule {wanted}.{hint} `tpuport rules` lists them all.")


def _entry(rule: "type[Rule]") -> Entry:
    return Entry(
        code=rule.CODE,
        name=rule.__name__,
        message=rule.MESSAGE,
        severity=rule.SEVERITY,
        fix=_fix(rule, rule.EXAMPLES),
        page=inspect.getdoc(rule) or "",
        examples=rule.EXAMPLES,
        clean=rule.CLEAN,
    )


def _fix(rule: "type[Rule]", examples: "Sequence[Example]") -> str:
    if all(example.after is None for example in examples):
        return NO_FIX
    safety = rule.SAFETY
    return f"{safety.name} (rtol {safety.rtol:g})" if safety.rtol else safety.name
