"""Discovery of the rules by walking their folder: adding a rule means adding a file."""

import importlib
from functools import cache
from pathlib import Path
from types import ModuleType

from tpuport import rules
from tpuport.rules._rule import Rule


@cache
def find_rules() -> tuple[type[Rule], ...]:
    """Return every rule in `tpuport/rules`, ordered by code; files named `_*` hold none.

    Raises:
        ValueError: a file holds no rule or several, a class is not named after its file, or two
            rules share a code.
    """
    (folder,) = rules.__path__
    names = sorted(path.stem for path in Path(folder).glob("[!_]*.py"))
    found = [rule_in(importlib.import_module(f"{rules.__name__}.{name}")) for name in names]
    return check_codes(found)


def live_rules() -> tuple[type[Rule], ...]:
    """Return the rules that a trace asks to rewrite the lines which it cannot run."""
    return tuple(rule for rule in find_rules() if rule.LIVE)


def rule_in(module: ModuleType) -> type[Rule]:
    """Return the one rule that a rule file declares.

    Raises:
        ValueError: there is none, there are several, or its name is not that of the file.
    """
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Rule)
        and value.__module__ == module.__name__
    ]
    expected = "".join(word.title() for word in module.__name__.rpartition(".")[2].split("_"))
    if [rule.__name__ for rule in own] != [expected]:
        got = ", ".join(rule.__name__ for rule in own) or "none"
        raise ValueError(f"Expected {module.__name__} to hold the rule {expected}, got {got}.")
    return own[0]


def check_codes(found: list[type[Rule]]) -> tuple[type[Rule], ...]:
    """Return the rules ordered by code, after checking that no two share one.

    Raises:
        ValueError: two rules share a code.
    """
    by_code: dict[str, type[Rule]] = {}
    for rule in found:
        other = by_code.setdefault(rule.CODE, rule)
        if other is not rule:
            raise ValueError(
                f"Expected a code for each rule, got {rule.CODE} for both {other.__name__} and"
                f" {rule.__name__}."
            )
    return tuple(by_code[code] for code in sorted(by_code))
