"""Choose the tests that `make test` leaves out: what they run, faster tests run as well.

As a plugin of pytest it measures the CPU time of each test and the lines of the package that it
runs, into the folder of TPUPORT_MEASURED; `python -m tests.choosing FOLDER` then writes COVERED.
`make choose-tests` does both.
"""

import argparse
import heapq
import json
import os
import shlex
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
COVERED = Path(__file__).with_name("covered.txt")
_HEAD = """\
# Tests whose lines of the package other tests run as well; see "Which tests `make test` runs" in
# README.md. Written by `make choose-tests`.
"""
# Of a test that takes less nothing is gained. Lines that other processes run are not measured.
_LEAST_SECONDS, _LARGEST_SHARE_OF_OTHERS = 0.3, 0.2
# Its last test asks what the others of it have met.
_WHOLE = ("tests/source/test_fuzz.py",)

Line = tuple[str, int]  # of a file


@dataclass
class Measured:
    """What tests take and run.

    Attributes:
        seconds: CPU time of each test, and of it that of other processes that it starts.
        lines: The tests that run each line.
    """

    seconds: dict[str, tuple[float, float]]
    lines: Mapping[Line, set[str]]


def covered() -> set[str]:
    """Return the ids of the tests that are left out."""
    lines = COVERED.read_text(encoding="utf-8").splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def of_mutants() -> tuple[str, ...]:
    """Return the files and folders of tests that find the mutants."""
    listed = tomllib.loads((ROOT / "tests/mutants/mutants.toml").read_text(encoding="utf-8"))
    words = [word for mutant in listed["mutant"] for word in shlex.split(mutant["tests"])]
    return tuple(sorted({word for word in words if word.startswith("tests/")}))


def choose(
    measured: Measured,
    seconds: float,
    whole: tuple[str, ...] = (),
    before: Collection[str] = (),
) -> tuple[list[str], int]:
    """Choose tests to leave out, those first that run the fewest lines of their own for their time.

    One test of each file stays, and those that work in other processes.

    Args:
        measured: The measurement.
        seconds: CPU time of the tests that stay.
        whole: Files and folders whose tests all stay.
        before: The ids of tests that were left out before, and stay so.

    Returns:
        The ids of the tests to leave out, and the number of lines that nothing else runs.
    """
    runs: dict[str, list[Line]] = defaultdict(list)
    for line, tests in measured.lines.items():
        for test in tests:
            runs[test].append(line)
    count = Counter({line: len(tests) for line, tests in measured.lines.items()})
    known = {test: None for test in before if test in measured.seconds}
    count.subtract(line for test in known for line in runs[test])
    in_file = Counter(test.partition("::")[0] for test in measured.seconds.keys() - known.keys())

    def price(test: str) -> float:
        own = sum(count[line] == 1 for line in runs[test])
        return (own + 1) / measured.seconds[test][0]

    queue = [
        (price(test), test)
        for test, (total, others) in measured.seconds.items()
        if total >= _LEAST_SECONDS and others < _LARGEST_SHARE_OF_OTHERS * total and runs[test]
        if not test.startswith(whole) and test not in known
    ]
    heapq.heapify(queue)
    left = sum(total for test, (total, _) in measured.seconds.items() if test not in known)
    out, lost = [*known], sum(number == 0 for number in count.values())
    while queue and left > seconds:
        _, test = heapq.heappop(queue)
        # Its lines may be its own by now. Prices only rise, so the first of the queue is compared.
        now = price(test)
        if queue and now > queue[0][0]:
            heapq.heappush(queue, (now, test))
            continue
        file = test.partition("::")[0]
        if in_file[file] == 1:
            continue
        in_file[file] -= 1
        lost += sum(count[line] == 1 for line in runs[test])
        for line in runs[test]:
            count[line] -= 1
        left -= measured.seconds[test][0]
        out.append(test)
    return sorted(out), lost


# -- measuring -------------------------------------------------------------------------------------


class _Recorder:
    """Measures the tests of one process."""

    def __init__(self, folder: Path) -> None:
        import coverage

        folder.mkdir(parents=True, exist_ok=True)
        name = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self._coverage = coverage.Coverage(
            data_file=str(folder / f"{name}.coverage"),
            source=[str(ROOT / name) for name in ("tpuport", "recipes")],
            config_file=False,
        )
        self._seconds = (folder / f"{name}.jsonl").open("w", encoding="utf-8")
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        before = os.times()
        try:
            return (yield)
        finally:
            spent = [b - a for a, b in zip(before[:4], os.times()[:4], strict=True)]
            line = json.dumps([item.nodeid, sum(spent), sum(spent[2:])])
            self._seconds.write(line + "\n")
            self._coverage.switch_context("between tests")

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        self._seconds.close()


def pytest_configure(config: pytest.Config) -> None:
    """Measure, in the processes that run tests."""
    folder, distributed = os.environ.get("TPUPORT_MEASURED"), getattr(config.option, "dist", "no")
    if folder and (hasattr(config, "workerinput") or distributed == "no"):
        config.pluginmanager.register(_Recorder(Path(folder).resolve()))


def read(folder: Path) -> Measured:
    """Read the measurements of all processes."""
    from coverage import CoverageData

    seconds: dict[str, tuple[float, float]] = {}
    lines: dict[Line, set[str]] = defaultdict(set)
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            test, total, others = json.loads(text)
            seconds[test] = (total, others)
    for path in sorted(folder.glob("*.coverage")):
        data = CoverageData(str(path))
        data.read()
        for file in data.measured_files():
            for number, tests in data.contexts_by_lineno(file).items():
                lines[file, number].update(tests)
    return Measured(seconds, lines)


def main(given: list[str] | None = None) -> None:
    """Choose, write the list, and say what it leaves out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of TPUPORT_MEASURED")
    parser.add_argument(
        "--seconds", type=float, default=1200, help="CPU time of the tests that stay, as measured"
    )
    parser.add_argument("--anew", action="store_true", help="forget what was left out before")
    options: Any = parser.parse_args(given)
    measured = read(options.folder)
    before = () if options.anew else covered()
    out, lost = choose(measured, options.seconds, (*_WHOLE, *of_mutants()), before)
    COVERED.write_text(_HEAD + "".join(f"{test}\n" for test in out), encoding="utf-8")
    total = sum(seconds for seconds, _ in measured.seconds.values())
    left = total - sum(measured.seconds[test][0] for test in out)
    share = lost / max(len(measured.lines), 1)
    sys.stdout.write(
        f"{len(out)} of {len(measured.seconds)} tests left out: {left:.0f} of {total:.0f} s stay,"
        f" and {lost} of {len(measured.lines)} lines ({share:.2%}) run in those tests alone.\n"
    )


if __name__ == "__main__":
    main()
