"""What a compiled program communicates, counted in its text."""

import re

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# An asynchronous one is two instructions, of which the first counts.
_INSTRUCTION = re.compile(rf"=\s+\S.*?\s({'|'.join(KINDS)})(?:-start)?\(")


def count_collectives(text: str) -> dict[str, int]:
    """How often each kind of collective stands in the text of a compiled program.

    Args:
        text: `compiled.as_text()`, HLO after the SPMD partitioner. The body of a loop stands there
            once, however often it runs.

    Returns:
        Only the kinds that are there.
    """
    counts: dict[str, int] = dict.fromkeys(KINDS, 0)
    for line in text.splitlines():
        found = _INSTRUCTION.search(line)
        if found:
            counts[found[1]] += 1
    return {kind: num for kind, num in counts.items() if num}
