"""What generators of random scripts share: a command line, and the account of what they found."""

import argparse
import collections
import random
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Found:
    """What became of one script.

    Attributes:
        kind: "passes", "refused", "eager raises", "chaotic" or "differs".
        what: what differs, or why it is refused.
        shown: the script, which is printed if it differs.
        how: the way in which it was ported, if there are several.
    """

    kind: str
    what: str
    shown: str
    how: str = ""


def varied(text: str, chosen: random.Random) -> tuple[str, list[str]]:
    """Return a text with one of the alternatives in each `<<a|b>>`, and those that were chosen."""
    picked: list[str] = []

    def pick(found: re.Match[str]) -> str:
        picked.append(chosen.choice(found[1].split("|")))
        return picked[-1]

    return re.sub(r"<<(.*?)>>", pick, text, flags=re.S), picked


def run_seeds(description: str | None, judged: Callable[[int, Path], Iterable[Found]]) -> None:
    """Run the scripts of some seeds, print what differs, and count the kinds.

    Args:
        description: of the program, for its help.
        judged: runs the script of a seed in a folder.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=100, help="how many scripts")
    parser.add_argument("--refusals", action="store_true", help="print all that does not pass")
    options = parser.parse_args()
    kinds: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.start, options.start + options.count):
            for found in judged(seed, Path(folder)):
                kinds[" ".join(filter(None, [found.how, found.kind]))] += 1
                if found.kind == "differs" or (options.refusals and found.kind != "passes"):
                    place = ", ".join(filter(None, [f"seed {seed}", found.how]))
                    print(f"=== {place}: {found.kind}: {found.what[:1500]}", flush=True)
                if found.kind == "differs":
                    print(found.shown, flush=True)
    print(dict(kinds))
