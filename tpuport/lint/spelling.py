"""Suggestions for misspelt names."""

import difflib
import itertools
from collections.abc import Sequence


def nearest(given: str, known: Sequence[str]) -> str | None:
    """Return the known name nearest to a misspelt one; among equals, the longest common prefix."""
    near = difflib.get_close_matches(given, known, n=10)
    best = difflib.SequenceMatcher(None, given, near[0]).ratio() if near else 0.0
    alike = [name for name in near if difflib.SequenceMatcher(None, given, name).ratio() == best]

    def same(name: str) -> int:
        pairs = zip(given, name, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    return max(alike, key=same, default=None)
