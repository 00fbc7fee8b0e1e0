"""The process that has the devices: runs jobs and writes a JSON line for all that happens.

A job that hangs can be ended with its process. The process that watches must not take the devices.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tpuport.foundation.errors import MissingExtraError, UsageError
from tpuport.foundation.reporting.json_codec import encoded
from tpuport.measurement.records import Result

Job = Callable[[], Iterable[Result]]
Say = Callable[[dict[str, Any]], None]


def jobs_of(bench: Any, targets: Iterable[str]) -> dict[str, Job]:
    """Return all jobs by name, in the order in which they run."""
    from tpuport.measurement import kernels, links, programs, rates

    several = bench.device.count > 1
    # A GPU has kernels in Pallas' interpreter only, and a port there does not call them.
    on_gpu = bench.device.platform == "gpu"
    checks = (*kernels.CHECKS, *(kernels.SHARDED if several else ()))
    return {
        "products": partial(rates.products, bench),
        "memory": partial(rates.memory, bench),
        "host": partial(rates.host, bench),
        **({"links": partial(links.links, bench)} if several else {}),
        **({"collectives": partial(links.collectives, bench)} if several else {}),
        **{f"kernel {one.name}": partial(kernels.compare, one, bench) for one in checks},
        **({} if on_gpu else {"kernel times": partial(kernels.times, bench)}),
        **{
            f"program {programs.name_of(target)}": partial(programs.measure, target, bench)
            for target in targets
        },
    }


def chosen(jobs: dict[str, Job], only: Iterable[str]) -> dict[str, Job]:
    """Return the jobs that are asked for, all if none is; one that there is not fails."""

    def missing() -> Iterable[Result]:
        raise UsageError(f"there is no such job here: expected one of {', '.join(jobs)}")

    return {name: jobs.get(name, missing) for name in only} or jobs


def run(say: Say, bench: Any, jobs: dict[str, Job], done: Iterable[str] = ()) -> None:
    """Run jobs, and say what they give; one that fails does not keep the others from running.

    Args:
        say: Takes what happened.
        bench: The devices.
        jobs: Jobs by name.
        done: Names of jobs to leave out.
    """
    say({"device": encoded(bench.device), "jobs": list(jobs)})
    for name, job in jobs.items():
        if name in done:
            continue
        say({"begins": name})
        start = time.perf_counter()
        for event in _events(name, job):
            say(event)
        say({"ends": name, "seconds": time.perf_counter() - start})
    say({"finished": True})


def _events(name: str, job: Job) -> Iterator[dict[str, Any]]:
    """Yield the results of a job, and its error if it raises one: anything may be wrong here."""
    try:
        for result in job():
            yield {"result": encoded(result)}
    except Exception as error:
        if isinstance(error, ModuleNotFoundError):
            error = MissingExtraError.from_import(name, error) or error
        yield {"error": f"{type(error).__name__}: {error}", "job": name}


def main() -> None:
    """Run as a process: write to the file descriptor of `--to`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", type=int, required=True)
    parser.add_argument("--done", nargs="*", default=[])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--target", nargs="*", default=[])
    given = parser.parse_args()
    with os.fdopen(given.to, "w", encoding="utf-8", buffering=1) as out:

        def say(event: dict[str, Any]) -> None:
            out.write(json.dumps(event) + "\n")

        try:
            from tpuport.measurement.bench import this_bench

            bench = this_bench()
        except Exception as error:
            say({"refused": f"{type(error).__name__}: {error}"})
            return
        targets = given.target or _recipes()
        jobs = jobs_of(bench, targets)
        run(say, bench, chosen(jobs, given.only), given.done)


def _recipes() -> list[str]:
    from tpuport.measurement.programs import recipes_here

    return recipes_here(Path.cwd())


if __name__ == "__main__":
    main()
