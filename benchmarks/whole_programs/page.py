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
    "rounding": "what differs does so in eager PyTorch too, with rounding errors put in",
    "excepted": "[the promises](promises.md) name it: a number or a tensor of it, one result or"
    " two, the sign of a zero",
    "slow": "given up after some seconds: branches with many paths",
    "eager raises": "eager PyTorch raises at the first call: nothing was compared",
    "silent": "a value, a dtype, an argument or a state differs without an error",
    "gradient": "a gradient differs without an error",
    "crash": "an exception from inside of tpuport, torch or jax that is no error of tpuport",
    "error missed": "eager PyTorch raises, the port does not",
    "error made": "the port raises an error of the user's code that eager PyTorch does not",
    "other error": "both raise, by classes that no handler would catch together",
    "wrong line": "a refusal that names a line outside of the program",
}


def read(log: Path) -> dict[int, Verdict]:
    """Return the verdicts of a log by their seeds."""
    found = [json.loads(line) for line in log.read_text().splitlines()]
    return {one.pop("seed"): Verdict(**one) for one in found}


# What `--loops` writes, after the rest.
_LOOPS = "\n## Loops\n"


def write(found: dict[int, Verdict], commit: str, *, loops: bool) -> None:
    """Write the page, or its section on loops, and keep the other part.

    Args:
        found: what became of each program, by its seed.
        commit: what was run.
        loops: whether they are `loops.program`.
    """
    rest, _, section = PAGE.read_text().partition(_LOOPS)
    if loops:
        section = _section(found, commit)
    else:
        rest = page(found, commit)
    PAGE.write_text(rest + _LOOPS + section)


def _section(found: dict[int, Verdict], commit: str) -> str:
    kinds = Counter(one.kind for one in found.values())
    lines = [
        "",
        "Written by `python -m benchmarks.whole_programs --loops --log FILE --page COMMIT`. Each"
        " program is one loop: `x = torch.cat([x, y])` in one tensor or more, `out[:, t] = y`,"
        " lists that are appended to, caches, inner loops, `break`; over ranges, rows, `enumerate`"
        " and `zip`, or a `while`. Loops of few rounds are made one program as long ones are, two"
        " calls are compared, and `topk` is not generated.",
        "",
        f"The last run: {len(found):,} loops on {commit};"
        f" {sum(v.calls for v in found.values()):,} calls and"
        f" {sum(v.gradients for v in found.values()):,} sets of gradients were compared.",
        "",
        "| outcome | programs |",
        "|---|---|",
        *(f"| {kind} | {kinds[kind]:,} |" for kind in _MEANING),
        "",
        "| refused | code | message | for example |",
        "|---|---|---|---|",
        *_refusals(verdict for verdict in found.values() if verdict.kind == "refused"),
        "",
        "Finds that are open:",
        "",
        *(_finds([(seed, v) for seed, v in found.items() if v.kind in FINDS]) or ["None."]),
    ]
    return "\n".join(lines) + "\n"


def page(found: dict[int, Verdict], commit: str) -> str:
    """Return the text of the page.

    Args:
        found: what became of each program, by its seed.
        commit: what was run.
    """
    verdicts = list(found.values())
    kinds = Counter(one.kind for one in verdicts)
    compared = [one for one in verdicts if one.kind not in ("eager raises", "slow")]
    lines = [
        "# Random programs",
        "",
        "Written by `python -m benchmarks.whole_programs --log FILE --page COMMIT`. Random modules"
        " with masks, slices, branches, loops, state and in-place writes go through `convert`."
        " Eager PyTorch is the judge of three calls: outputs, arguments, buffers, Python state,"
        " what is raised, and the gradients of parameters and inputs. Later calls have hostile"
        " inputs: empty and full masks, ties, zeros, NaN, infinities, indices out of range, other"
        " sizes. What differs is compared with eager PyTorch in float64, with rounding errors put"
        " in too. `make fuzz` runs it and prints each find as a small script.",
        "",
        f"The last run: {len(verdicts):,} programs on {commit}. {len(compared):,} of them run in"
        f" eager PyTorch; {sum(v.calls for v in verdicts):,} calls and"
        f" {sum(v.gradients for v in verdicts):,} sets of gradients were compared.",
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
        *(_finds([(seed, v) for seed, v in found.items() if v.kind in FINDS]) or ["None."]),
        "",
        "What earlier runs found is in tests/exactness/test_whole_programs.py.",
        "",
        "Not generated: random numbers; writes of several values to one element without"
        " `accumulate`, and a `masked_scatter_` that reads what it writes, which PyTorch leaves"
        " undefined; integers and Python numbers of 64 bits; an int32 index of `gather` or"
        " `scatter_add` that is expanded, whose elements PyTorch 2.13 takes from wrong places."
        " Not compared: gradients at NaN and infinities, of programs that return NaN, or where"
        " eager PyTorch's are NaN (a zero cotangent times an infinite derivative), and what it"
        " leaves half written when it raises; gradients of `topk`, since PyTorch leaves open"
        " which of two equal elements counts.",
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


def _finds(found: list[tuple[int, Verdict]]) -> list[str]:
    whats = [(seed, one, one.what.partition("\n")[0][:200]) for seed, one in found]
    return [f"- seed {seed}, {one.kind}: {what}" for seed, one, what in whats]
