"""What someone may have meant who got a name slightly wrong."""

import difflib
import itertools
from collections.abc import Sequence


def nearest(given: str, known: Sequence[str]) -> str | None:
    """What someone may have meant; of several that are as near the one that starts most alike."""
    near = difflib.get_close_matches(given, known, n=10)
    best = difflib.SequenceMatcher(None, given, near[0]).ratio() if near else 0.0
    alike = [name for name in near if difflib.SequenceMatcher(None, given, name).ratio() == best]

    def same(name: str) -> int:
        pairs = zip(given, name, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    return max(alike, key=same, default=None)
