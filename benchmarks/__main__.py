"""`python -m benchmarks`: all benchmarks in one process, with results in docs/benchmarks/."""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, measure, page
from benchmarks.contestants import (
    FORWARD,
    TRAINING,
    NoCompilerError,
    make_compiled,
    make_pure,
)
from benchmarks.models import Case, dit_stack, make_cases

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
OUT = PAGE.with_suffix("")

Compiled = dict[tuple[str, str], Callable[[], object]]


def main() -> None:
    """Run every benchmark; write results.json, results.svg and the tables of docs/benchmarks.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, few rounds: a smoke test"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder for results.json and .svg")
    parser.add_argument("--cores", type=int, default=1, help="number of cores to use (default: 1)")
    options = parser.parse_args()
    # Must come before XLA starts, which makes a thread for each core that it may use.
    machine.use_cores(options.cores)
    torch.set_num_threads(machine.num_cores())
    results = run(quick=options.quick)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")

    from benchmarks.plot import plot

    plot(results, options.out / "results.svg")
    print(f"wrote {options.out / 'results.svg'}")
    if options.out == OUT:
        page.update(PAGE, results)
        print(f"wrote {PAGE}")


def run(*, quick: bool = False) -> dict[str, Any]:
    """Take every measurement and return them as JSON-ready data."""
    rounds, seconds = (3, 0.01) if quick else (15, 0.2)
    staging_rounds = 1 if quick else 5
    cases = make_cases(quick=quick)
    compiled, skipped = _compile_first(cases[:1] if quick else cases)
    results: dict[str, Any] = {
        "versions": machine.versions(),
        "machine": machine.describe(),
        "rounds": {"step": rounds, "staging": staging_rounds},
        "step": [],
        "program": [],
        "staging": [],
        "skipped": skipped,
    }
    for case in cases:
        pure = make_pure(case)
        for what in (FORWARD, TRAINING):
            print(f"{case.name}, {what}", flush=True)
            steps, programs = measure.measure_steps(
                case, what, pure, compiled.get((case.name, what)), rounds=rounds, seconds=seconds
            )
            results["step"] += steps
            results["program"] += programs
            results["staging"] += measure.measure_staging(case, what, pure, rounds=staging_rounds)
        results["staging"] += measure.measure_first_result(case, rounds=staging_rounds)
    print("depth", flush=True)
    make = partial(dit_stack, width=32, tokens=16) if quick else dit_stack
    depths = (1, 2) if quick else (2, 8, 32)
    results["depth"] = measure.measure_depth(make, depths, rounds=staging_rounds)
    print("calls", flush=True)
    results["calls"] = measure.measure_calls(rounds=rounds, seconds=seconds)
    return results


def _compile_first(cases: list[Case]) -> tuple[Compiled, list[dict[str, str]]]:
    """Compile every case with torch.compile before torchax is imported.

    Return the compiled cases, and the reasons why others could not be compiled.
    """
    compiled: Compiled = {}
    skipped = []
    for case in cases:
        for what in (FORWARD, TRAINING):
            print(f"torch.compile of {case.name}, {what}", flush=True)
            try:
                compiled[case.name, what] = make_compiled(case, what)
            except NoCompilerError as error:
                skipped.append(
                    {"what": f"torch.compile, {case.name}, {what}", "reason": str(error)}
                )
    return compiled, skipped


if __name__ == "__main__":
    main()
