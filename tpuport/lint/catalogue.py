"""The catalogue of rules that `rules` and `explain` show and that codes are checked against."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from tpuport.foundation.errors import UsageError
from tpuport.lint.pseudo import UnusedIgnore
from tpuport.lint.spelling import nearest
from tpuport.source.rewrite.finding import Severity

if TYPE_CHECKING:
    from tpuport.lint.cache import Cache
    from tpuport.rules._rule import Example, Rule

NO_FIX = "none"


@dataclass(frozen=True)
class CatalogueEntry:
    """One rule.

    Attributes:
        name: The name of its class.
        fix: The safety of its fix, such as `exact` or `close (rtol 1e-06)`; `none` without a fix.
        page: The docstring of its class.
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
def catalogue() -> tuple[CatalogueEntry, ...]:
    """Return every rule, ordered by code."""
    # Imported late: an answer from the cache needs no rules.
    from tpuport.rules._discovery import find_rules

    own = CatalogueEntry(
        code=UnusedIgnore.CODE,
        name=UnusedIgnore.__name__,
        message=UnusedIgnore.MESSAGE,
        severity=UnusedIgnore.SEVERITY,
        fix=NO_FIX,
        page=inspect.getdoc(UnusedIgnore) or "",
    )
    return (own, *(_entry(rule) for rule in find_rules()))


def known_codes(cache: "Cache") -> list[str]:
    """Return the codes of all rules, from the cache where possible: loading all rules is slow."""
    key = cache.key("codes")
    codes = cache.get(key)
    if codes is None:
        codes = [entry.code for entry in catalogue()]
        cache.put(key, codes)
    return codes


def entry_named(wanted: str) -> CatalogueEntry:
    """Return the rule with a code, or with a name in any spelling.

    Raises:
        UsageError: there is no such rule.
    """
    entries = catalogue()
    by_name = {name.lower(): entry for entry in entries for name in (entry.code, entry.name)}
    key = wanted.replace("-", "").replace("_", "").lower()
    if key in by_name:
        return by_name[key]
    near = nearest(key, list(by_name))
    hint = f" Did you mean {by_name[near].code}?" if near else ""
    raise UsageError(f"There is no rule {wanted}.{hint} `tpuport rules` lists them all.")


def _entry(rule: "type[Rule]") -> CatalogueEntry:
    return CatalogueEntry(
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
