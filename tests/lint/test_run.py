"""Runs: order, processes, two passes, the cache, and work that fails."""

import json
import os
import stat
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.lint import passes
from tpuport.foundation.files import write_atomically
from tpuport.lint import cache as caching
from tpuport.lint import run as running
from tpuport.lint.cache import Cache, fingerprint
from tpuport.lint.records import Checked, Problem, Reported, Trouble
from tpuport.lint.run import Passes, run
from tpuport.source.rewrite.finding import Severity

ALONE = Passes(check=passes.check, connect=lambda summaries: {})
TWO = Passes(check=passes.check, connect=passes.connect)
FILES = {"a.py": "def f():\n    pass\n", "b.py": "def g():\n    pass\n", "c.py": "x = 1\n"}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What work was done since the last time it was asked."""
    monkeypatch.setenv("TPUPORT_TEST_LOG", str(tmp_path))
    path = tmp_path / "log"

    def read() -> Counter[str]:
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return Counter(line.rpartition(" ")[0] for line in lines)

    return read


def paths(root: Path) -> list[Path]:
    return sorted(path.relative_to(root) for path in root.glob("*.py"))


# Order and processes.


def test_results_come_in_the_order_of_the_files(project):
    root = project({f"{name}.py": "x" * size for size, name in enumerate("badc")})
    checked = run(paths(root), passes=Passes(check=passes.slow))
    assert [(one.file, one.functions) for one in checked] == [
        ("a.py", 1),
        ("b.py", 0),
        ("c.py", 3),
        ("d.py", 2),
    ]


def test_processes_give_what_one_does(project, branch, monkeypatch):
    root = project({f"m{number}.py": branch + "\n" * number for number in range(12)})
    alone = run(paths(root), jobs=1)
    monkeypatch.setattr(running, "MIN_PARALLEL_BYTES", 0)
    monkeypatch.setattr(running, "_MIN_BATCH_BYTES", 300)
    assert run(paths(root), jobs=3) == alone
    assert all(one.findings for one in alone)


def test_work_is_spread_over_processes(project, log, monkeypatch, tmp_path):
    root = project({f"m{number}.py": "x = 1\n" for number in range(12)})
    monkeypatch.setattr(running, "MIN_PARALLEL_BYTES", 0)
    monkeypatch.setattr(running, "_MAX_BATCH", 1)
    run(paths(root), jobs=2, passes=ALONE)
    processes = {line.rpartition(" ")[2] for line in (tmp_path / "log").read_text().splitlines()}
    assert str(os.getpid()) not in processes
    assert log().total() == 12


def test_little_work_stays_in_this_process(project, log, tmp_path):
    root = project(FILES)
    run(paths(root), jobs=4, passes=ALONE)
    processes = {line.rpartition(" ")[2] for line in (tmp_path / "log").read_text().splitlines()}
    assert processes == {str(os.getpid())}
    assert log().total() == 3


def test_progress_is_told_to_the_end(project):
    root = project(FILES)
    told = []
    run(paths(root), jobs=1, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]


# Work that fails.


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_in_one_file_is_reported_and_the_others_done(project, monkeypatch, jobs: int):
    monkeypatch.setattr(running, "MIN_PARALLEL_BYTES", 0)
    root = project({"bad.py": "x", "a.py": "xx", "z.py": "xxx"})
    a, bad, z = run(paths(root), jobs=jobs, passes=Passes(check=passes.raise_error))
    assert (a.functions, z.functions) == (2, 3)
    (problem,) = bad.problems
    assert problem.trouble is Trouble.INTERNAL
    assert str(problem).startswith("bad.py: internal error, KeyError at passes.py:")
    assert str(problem).endswith("What to do: report this as a bug of tpuport")
    assert "in raise_error: 'a\\nb'" in str(problem)


def test_the_end_of_a_process_costs_one_file(project, monkeypatch):
    monkeypatch.setattr(running, "MIN_PARALLEL_BYTES", 0)
    root = project({"bad.py": "x", "a.py": "xx", "z.py": "xxx"})
    a, bad, z = run(paths(root), jobs=2, passes=Passes(check=passes.end_process))
    assert (a.functions, z.functions) == (2, 3)
    (problem,) = bad.problems
    assert problem.trouble is Trouble.INTERNAL
    assert str(problem).startswith("bad.py: ended the process that worked on it.")


def test_a_file_that_is_gone_is_reported(project):
    root = project({"a.py": "x = 1\n"})
    (root / "link.py").symlink_to("nowhere.py")
    _, gone = run(paths(root))
    assert gone.problems == (Problem("link.py", "cannot be read: No such file or directory"),)


# Two passes.


def test_facts_come_from_all_files_and_go_to_those_they_are_about(project, log):
    root = project(FILES)
    checked = run(paths(root), passes=TWO)
    given = [one.problems[0].reason for one in checked]
    assert given == [
        str({"strict": False, "facts": "def g():"}),
        str({"strict": False, "facts": "x = 1"}),
        str({"strict": False}),
    ]
    assert log().total() == 3 + 2


def test_a_file_that_could_not_be_read_has_no_say_in_facts(project):
    root = project({"a.py": "x = 1\n", "bad.py": "x", "c.py": b"\0"})
    seen = []
    only = Passes(passes.raise_error, lambda summaries: seen.append(dict(summaries)) or {})
    run(paths(root), passes=only)
    assert seen == [{}]
    run(paths(root), passes=Passes(connect=lambda found: seen.append(sorted(found)) or {}))
    assert seen[1] == ["a.py", "bad.py"]


def test_only_what_changed_is_done_again(project, log):
    root = project(FILES)
    cache = Cache(root / "cache")
    first = run(paths(root), cache=cache, passes=TWO)
    assert log().total() == 5
    assert run(paths(root), cache=cache, passes=TWO) == first
    assert log() == {}
    # Its own text changes, but nothing that others have to know.
    project({"b.py": "def g():\n    return 1\n"})
    run(paths(root), cache=cache, passes=TWO)
    assert log() == {"check b.py -": 1, "check b.py x = 1": 1}
    # Now the facts of the one before it change too.
    project({"b.py": "def h():\n    return 1\n"})
    run(paths(root), cache=cache, passes=TWO)
    assert log() == {"check b.py -": 1, "check b.py x = 1": 1, "check a.py def h():": 1}


# By itself the file says that `scale` is the script's.
HELPER = """import torch


def main():
    scale(1)


def scale(x):
    y = torch.relu(x)
    if y.max() > 0:
        y = y + 1
    return y
"""
USER = """import torch

from .helper import scale


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        return scale(x)
"""


def test_a_helper_is_part_of_the_step_that_calls_it_elsewhere(project):
    project({"pkg/__init__.py": "", "pkg/helper.py": HELPER, "pkg/net.py": USER})
    names = [Path("pkg/helper.py"), Path("pkg/net.py")]
    (alone,) = run(names[:1])
    helper, net = run(names)
    assert alone.reached == net.reached == ()
    assert helper.reached == ("scale",)
    assert helper.functions == 1
    assert (alone.functions, alone.findings) == (0, ())
    assert [finding.code for finding in helper.findings] == ["TPU101"]


# The cache.


def test_strict_is_another_question(project, log):
    root = project(FILES)
    cache = Cache(root / "cache")
    run(paths(root), cache=cache, passes=ALONE)
    run(paths(root), cache=cache, strict=True, passes=ALONE)
    assert log()["check a.py -"] == 2


def test_equal_files_in_equal_places_have_one_answer_each_under_its_name(project, log):
    """What a file is for counts, which its name and the folders around it say."""
    name = "far/data/a.py"
    root = project({name: "x = 1\n", f"near/{name}": "x = 1\n", "b.py": "x = 1\n"})
    cache = Cache(root / "cache")
    run([Path(name)], cache=cache, passes=ALONE)
    (found,) = run([Path("near") / name], cache=cache, passes=ALONE)
    assert found.file == found.problems[0].file == f"near/{name}"
    assert log().total() == 1
    run([Path("b.py")], cache=cache, passes=ALONE)
    assert log().total() == 1


def test_failed_work_is_not_kept(project):
    root = project({"bad.py": "x"})
    for _ in range(2):
        (bad,) = run(paths(root), cache=Cache(root / "cache"), passes=Passes(passes.raise_error))
        assert bad.problems[0].trouble is Trouble.INTERNAL
    assert not list(root.glob("cache/*/*/*.json"))


@pytest.mark.parametrize("damage", [b"", b"x", b"{}", b'0\n{"findings": []}', None])
def test_a_damaged_record_counts_as_absent(project, log, damage):
    root = project(FILES)
    cache = Cache(root / "cache")
    first = run(paths(root), cache=cache, passes=ALONE)
    log()
    for path in root.glob("cache/*/*/*.json"):
        path.write_bytes(path.read_bytes()[:-2] if damage is None else damage)
    assert run(paths(root), cache=cache, passes=ALONE) == first
    assert log().total() == 3


def test_the_record_of_another_question_is_not_taken(project):
    root = project()
    cache = Cache(root / "cache")
    one, two = cache.key("one"), cache.key("two")
    cache.put(one, 1)
    cache.put(two, 2)
    cache._path(two).write_bytes(cache._path(one).read_bytes())
    assert (cache.get(one), cache.get(two)) == (1, None)


def test_a_new_version_of_tpuport_asks_again(project, log, monkeypatch):
    root = project(FILES)
    run(paths(root), cache=Cache(root / "cache"), passes=ALONE)
    monkeypatch.setattr(caching, "fingerprint", lambda: "other")
    run(paths(root), cache=Cache(root / "cache"), passes=ALONE)
    assert log()["check a.py -"] == 2


def test_the_fingerprint_follows_the_code(monkeypatch, tmp_path):
    before = fingerprint.__wrapped__()
    assert before == fingerprint()
    package = tmp_path / "tpuport"
    (package / "rules").mkdir(parents=True)
    monkeypatch.setattr(caching, "__file__", str(package / "lint/cache.py"))
    empty = fingerprint.__wrapped__()
    (package / "rules/a.py").write_text("x = 1\n")
    one = fingerprint.__wrapped__()
    (package / "rules/a.py").write_text("x = 2\n")
    assert len({before, empty, one, fingerprint.__wrapped__()}) == 4


def test_a_cache_that_cannot_be_written_keeps_nothing(project):
    root = project({"cache": "a file"})
    cache = Cache(root / "cache")
    key = cache.key("x")
    cache.put(key, 1)
    cache.put(key, 1)
    assert cache.get(key) is None


def test_git_leaves_the_cache_alone(project):
    root = project()
    Cache(root / "cache").put("ab", 1)
    assert (root / "cache/.gitignore").read_text() == "*\n"
    assert (root / "cache/CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172")


def test_old_records_are_deleted_at_most_once_a_day(project):
    root = project()
    Cache(root / "cache").put("ab", 1)
    (old,) = root.glob("cache/*/*/*.json")
    month_ago = time.time() - 40 * 24 * 3600
    os.utime(old, (month_ago, month_ago))
    Cache(root / "cache").put("cd", 1)
    assert old.exists()
    os.utime(root / "cache/.pruned", (month_ago, month_ago))
    Cache(root / "cache").put("ef", 1)
    assert not old.exists()


def test_runs_at_the_same_time_do_not_disturb_each_other(project, branch):
    root = project({f"m{number}.py": branch + "\n" * number for number in range(8)})
    expected = run(paths(root), jobs=1)
    results = []
    threads = [
        threading.Thread(
            target=lambda: results.append(run(paths(root), jobs=1, cache=Cache(root / "cache")))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4
    assert not list(root.rglob("*.tmp-*"))


# Writing and records.


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write_atomically(path, b"one", mode=0o640)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"two")
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]


def test_records_survive_json():
    finding = Reported(
        *("a.py", 1, 2, 3, 4, "TPU101", "TensorBranch", Severity.SILENT, "é"),
        cell=2,
        safety="exact",
        function=1,
        lines=("x", "y"),
        ignored=(0,),
    )
    checked = Checked("a.py", (finding,), (), (Problem("a.py", "no"),), functions=3)
    assert Checked.from_json(json.loads(json.dumps(checked.to_json())), "a.py") == checked
