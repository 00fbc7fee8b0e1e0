"""What someone may have meant who got a name slightly wrong."""

import difflib
import os
from collections.abc import Sequence


def nearest(given: str, known: Sequence[str]) -> str | None:
    """What someone may have meant; of several that are as near the one that starts most alike."""
    near = difflib.get_close_matches(given, known, n=10)
    best = difflib.SequenceMatcher(None, given, near[0]).ratio() if near else 0.0
    alike = [name for name in near if difflib.SequenceMatcher(None, given, name).ratio() == best]
    return max(alike, key=lambda name: len(os.path.commonprefix([given, name])), default=None)
