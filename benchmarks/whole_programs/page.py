"""Writes docs/fuzzing.md from the verdicts of a run."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from benchmarks.whole_programs.judge import FINDS, Verdict

PAGE = Path(__file__).parent.parent.parent / "docs" / "fuzzing.md"
_MEANING = {
    "passes": "all calls and gradients are eager PyTorch's",
    "refused": "an error of tpuport that names the line",
    "rounding": "a difference that float64 and rounding errors put in explain; the program ends there",
    "eager raises": "eager PyTorch raises at the first call: nothing was compared",
    "silent": "a value, a dtype, an argument or a state differs without an error",
    "gradient": "a gradient differs without an error",
    "crash": "an exception from inside of tpuport, torch or jax that is no error of tpuport",
    "error missed": "eager PyTorch raises, the port does not",
    "error made": "the port raises an error of the user's code that eager PyTorch does not",
    "other error": "both raise, by classes that no handler would catch together",
    "wrong line": "a refusal that names a line outside of the program",
}


def read(log: Path) -> list[Verdict]:
    """Return the verdicts of a log."""
    found = [json.loads(line) for line in log.read_text().splitlines()]
    return [Verdict(**{k: v for k, v in one.items() if k != "seed"}) for one in found]


def page(verdicts: list[Verdict], commit: str) -> str:
    """Return the text of the page.

    Args:
        verdicts: what became of each program.
        commit: what was run.
    """
    kinds = Counter(one.kind for one in verdicts)
    compared = [one for one in verdicts if one.kind != "eager raises"]
    lines = [
        "# Random programs",
        "",
        "Written by `python -m benchmarks.whole_programs --log FILE --page COMMIT`. Random modules with masks,"
        " slices, branches, loops, state and in-place writes go through `convert`; eager PyTorch is the judge"
        " of outputs, arguments, buffers and Python state of three calls (later ones with hostile inputs:"
        " empty and full masks, ties, zeros, NaN, infinities, indices out of range, other sizes), of what is"
        " raised, and of the gradients of parameters and inputs of one of the calls. What differs is compared"
        " with eager PyTorch in float64, also with rounding errors put in. `make fuzz` runs it, prints each"
        " find as a small script, and the seed makes the program again.",
        "",
        f"The last run: {len(verdicts):,} programs on {commit}; {len(compared):,} of them run in eager PyTorch,"
        f" {sum(v.calls for v in verdicts):,} calls and {sum(v.gradients for v in verdicts):,} gradients were"
        " compared.",
        "",
        "| outcome | programs | |",
        "|---|---|---|",
        *(f"| {kind} | {kinds[kind]:,} | {_MEANING[kind]} |" for kind in _MEANING),
        "",
        "## Refusals by cause",
        "",
        "A program ends at its first refusal. The line is one that was named.",
        "",
        "| programs | code | message | for example |",
        "|---|---|---|---|",
        *_refusals(verdict for verdict in verdicts if verdict.kind == "refused"),
        "",
        "## Finds that are open",
        "",
        *(_finds([v for v in verdicts if v.kind in FINDS]) or ["None."]),
        "",
        "What earlier runs found is in tests/exactness/test_whole_programs.py.",
        "",
        "Not generated: random numbers; several writes to one element through an index without `accumulate`,"
        " whose result and gradient PyTorch leaves undefined; integers and Python numbers that need 64 bits.",
    ]
    return "\n".join(lines) + "\n"


def _refusals(refused: Iterable[Verdict]) -> list[str]:
    counts: Counter[tuple[str, str]] = Counter()
    lines: dict[tuple[str, str], str] = {}
    for one in refused:
        code, _, message = one.what.partition(" ")
        # Shapes, places and numbers are the program's own.
        message = re.sub(r"\S*whole_program_\d+\S*", "...", message)
        key = code, re.sub(r"\([^()]*\[.*|\d+", "N", message)[:110].replace("|", "\\|")
        counts[key] += 1
        if len(one.line) < len(lines.get(key, "x" * 100)):
            lines[key] = one.line
    return [
        f"| {count} | {key[0]} | {key[1]} | `{lines.get(key, '').replace('|', chr(92) + '|')}` |"
        for key, count in counts.most_common()
    ]


def _finds(found: list[Verdict]) -> list[str]:
    return [f"- {one.kind}: {one.what[:200]}" for one in found]
