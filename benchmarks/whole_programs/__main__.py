"""Runs programs, prints finds as scripts, and writes docs/fuzzing.md."""

import argparse
import gc
import json
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.newer_versions import without_emitters

# jax reads these once, when it is first imported: as in tests/conftest.py.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "XLA_FLAGS",
    " ".join(
        (
            *without_emitters(),
            *("--xla_cpu_parallel_codegen_split_count=1", "--xla_cpu_multi_thread_eigen=false"),
        )
    ),
)

import jax
import torch

from benchmarks.whole_programs import loops
from benchmarks.whole_programs.judge import FINDS, Judge, Verdict
from benchmarks.whole_programs.page import read, write
from benchmarks.whole_programs.programs import Maker, Program
from benchmarks.whole_programs.shrink import shrink

# A process keeps compiled programs until it is told not to.
_FORGET = 200
# The seed of a program that passes.
_PLAIN = 4


def main() -> None:
    """Run the programs of some seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1000, help="how many programs")
    parser.add_argument("--log", type=Path, help="a file of verdicts: adds those that it lacks")
    parser.add_argument("--minutes", type=float, default=1e9, help="end after this time")
    parser.add_argument(
        "--page", metavar="COMMIT", help="write docs/fuzzing.md from the log, as of"
    )
    parser.add_argument("--loops", action="store_true", help="loops that grow, write and append")
    options = parser.parse_args()
    if options.page:
        write(read(options.log), options.page, loops=options.loops)
        return
    make = loops.program if options.loops else lambda seed: Maker(seed).program()
    torch.set_num_threads(1)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, loops.rolled(short=options.loops):
        judge = Judge(Path(folder))
        plain = Maker(_PLAIN).program()
        judge.run(plain)  # torch and jax import more when they are first used
        gc.freeze()  # a look for the functions of a line goes through all other objects
        log: Path | None = options.log
        known = read(log) if log is not None and log.exists() else {}
        for seed in range(options.start, options.start + options.count):
            if time.perf_counter() - began > 60 * options.minutes:
                break
            if seed in known:
                continue
            program = make(seed)
            verdict = judge.run(program)
            if verdict.kind == "slow" and judge.run(plain).kind != "passes":
                message = f"giving up seed {seed} broke the process: go on with another"
                raise SystemExit(message)
            if log is not None:
                with log.open("a") as lines:
                    lines.write(json.dumps({"seed": seed, **asdict(verdict)}) + "\n")
            if verdict.kind in FINDS:
                report(judge, program, verdict)
            if seed % _FORGET == 0:
                jax.clear_caches()


def report(judge: Judge, program: Program, verdict: Verdict) -> None:
    """Print a find as a script, made small."""
    small = shrink(program, lambda one: judge.run(one).kind == verdict.kind)
    last = judge.run(small)
    print(f"=== {verdict.kind}, seed {program.seed}: {last.what} {last.line}")
    text = small.script()
    print(text[text.index("    def forward(self, x, y") :], flush=True)


if __name__ == "__main__":
    main()
