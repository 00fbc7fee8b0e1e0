"""The tests that `make test` leaves out run lines that other tests run."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import coverage

from tests.choosing import ROOT, Measured, choose, covered, of_mutants, read


def measured(**tests: tuple[float, str]) -> Measured:
    """Tests of one file by name, with their seconds and the lines that they run."""
    lines = defaultdict(set)
    for name, (_, letters) in tests.items():
        for letter in letters:
            lines["package.py", ord(letter)].add(f"tests/test_a.py::{name}")
    seconds = {f"tests/test_a.py::{name}": (time, 0.0) for name, (time, _) in tests.items()}
    return Measured(seconds, lines)


def names(found: tuple[list[str], int]) -> list[str]:
    return [test.partition("::")[2] for test in found[0]]


def test_a_test_whose_lines_others_run_is_left_out():
    given = measured(short=(1, "abc"), long=(9, "ab"), own=(5, "cdefgh"))
    assert names(choose(given, 8)) == ["long"]
    assert choose(given, 8)[1] == 0
    assert choose(given, 100) == ([], 0)


def test_one_of_two_that_run_the_same_stays():
    """The first that goes makes the lines of the other its own."""
    given = measured(one=(9, "abcdef"), two=(8, "abcdef"), other=(7, "xy"))
    assert names(choose(given, 16)) == ["one"]
    assert names(choose(given, 9)) == ["one", "other"]
    assert choose(given, 9)[1] == 2


def test_what_was_left_out_stays_so():
    given = measured(one=(9, "abcdef"), two=(8, "abcdef"), other=(7, "xy"))
    before = ["tests/test_a.py::two"]
    assert choose(given, 100, before=[*before, "gone"]) == (before, 0)
    found = choose(given, 9, before=before)
    assert (names(found), found[1]) == (["other", "two"], 2)


def test_the_last_of_a_file_and_what_starts_processes_stay():
    given = measured(one=(9, "ab"), two=(8, "ab"))
    assert names(choose(given, 0)) == ["one"]
    given.seconds["tests/test_a.py::one"] = (9, 5)
    given.seconds["tests/test_b.py::three"] = (1, 0)
    assert names(choose(given, 0)) == ["two"]
    assert choose(given, 0, ("tests/test_a.py",)) == ([], 0)
    given.seconds["tests/test_a.py::two"] = (0.2, 0)
    assert choose(given, 0) == ([], 0)


def test_what_finds_the_mutants_is_not_left_out():
    kept = of_mutants()
    assert not [test for test in covered() if test.startswith(kept)]


def test_measurements_of_all_processes_are_read(tmp_path: Path):
    for worker, test in enumerate(("tests/test_a.py::one", "tests/test_a.py::two")):
        (tmp_path / f"gw{worker}.jsonl").write_text(json.dumps([test, 2.0, 0.5]) + "\n")
        data = coverage.CoverageData(str(tmp_path / f"gw{worker}.coverage"))
        data.set_context(test)
        data.add_lines({str(tmp_path / "package.py"): [1, 2 + worker]})
        data.write()
    found = read(tmp_path)
    assert found.seconds["tests/test_a.py::two"] == (2.0, 0.5)
    by_number = {number: len(tests) for (_, number), tests in found.lines.items()}
    assert by_number == {1: 2, 2: 1, 3: 1}


def test_what_a_test_takes_and_runs_is_measured(tmp_path: Path):
    test = "tests/recipes/mae_dit/test_config.py::test_a_file_and_overrides"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    subprocess.run(
        [*command, "-p", "tests.choosing", test],
        cwd=ROOT,
        env={**os.environ, "TPUPORT_MEASURED": str(tmp_path / "measured")},
        check=True,
        capture_output=True,
    )
    found = read(tmp_path / "measured")
    (seconds,) = found.seconds.items()
    assert seconds[0] == test
    assert 0 <= seconds[1][1] <= seconds[1][0]
    files = {Path(file).name for (file, _), tests in found.lines.items() if test in tests}
    assert "config.py" in files


def test_what_is_left_out_is_there():
    """`make choose-tests` writes the list anew if a test of it was renamed."""
    texts: dict[str, str] = {}
    for test in covered():
        file, name = test.split("[")[0].split("::", 1)
        if file not in texts:
            texts[file] = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {name.split('::')[-1]}(" in texts[file], test
