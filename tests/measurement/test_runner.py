"""The process with the devices is watched: jobs that hang, die or are refused are told apart."""

import json
import os
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tpuport.foundation.errors import UsageError
from tpuport.measurement import worker
from tpuport.measurement.records import Measurements, Quantity, Result
from tpuport.measurement.runner import TimeLimits, watch

# A worker without jax: it does what its list of jobs says, and leaves out what is done.
WORKER = """
import json, os, subprocess, sys, time
at = sys.argv.index("--to")
out = os.fdopen(int(sys.argv[at + 1]), "w", buffering=1)
done = sys.argv[sys.argv.index("--done") + 1 :]
say = lambda **event: out.write(json.dumps(event) + "\\n")
JOBS = {jobs!r}
if "refuses" in JOBS:
    say(refused=JOBS["refuses"])
    sys.exit()
if "sleeps" in JOBS:
    time.sleep(60)
device = dict(platform="cpu", kind="cpu", count=1, chip="v5e", small=True)
say(device=device, jobs=list(JOBS))
for name, act in JOBS.items():
    if name in done:
        continue
    say(begins=name)
    say(result=dict(job=name, name=name, kind="seconds", value=1.0))
    if act == "hang":
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        open({pid!r}, "w").write(str(child.pid))
        time.sleep(60)
    if act == "die":
        print("a last line", file=sys.stderr)
        sys.stderr.flush()
        os.abort()
    if act == "fail":
        say(error="ValueError: no", job=name)
    if act == "slow":
        time.sleep(0.3)
    say(ends=name, seconds=0.5)
say(finished=True)
"""


def run(tmp_path: Path, jobs: dict[str, str], **limits: float) -> Measurements:
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER.format(jobs=jobs, pid=str(tmp_path / "pid"))))
    given = TimeLimits(**{"start": 20.0, "job": 20.0, "total": 60.0, **limits})
    return watch(given, command=(sys.executable, "-S", str(script)))


def names(outcome: Measurements) -> list[str]:
    return [one.name for one in outcome.results]


def troubles(outcome: Measurements) -> list[tuple[str, str]]:
    return [(one.job, one.text) for one in outcome.troubles]


def test_all_jobs_run_and_one_that_fails_keeps_none_from_running(tmp_path: Path):
    found = run(tmp_path, {"a": "", "b": "fail", "c": ""})
    assert names(found) == ["a", "b", "c"]
    assert troubles(found) == [("b", "ValueError: no")]
    assert found.seconds == {"a": 0.5, "b": 0.5, "c": 0.5}
    assert found.device is not None


def test_a_job_that_hangs_is_ended_with_all_it_started_and_the_others_run(tmp_path: Path):
    found = run(tmp_path, {"a": "", "b": "hang", "c": ""}, job=1.5)
    # What a job gave before it hung is not trusted.
    assert names(found) == ["a", "c"]
    assert troubles(found) == [("b", "it hung: ended after 2 s")]
    assert "--limit" in found.troubles[0].fix
    child = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 5
    while time.monotonic() < end and _lives(child):
        time.sleep(0.02)
    assert not _lives(child)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_job_that_takes_the_process_with_it(tmp_path: Path):
    found = run(tmp_path, {"a": "die", "b": ""})
    assert names(found) == ["b"]
    ((job, text),) = troubles(found)
    assert job == "a"
    assert "signal 6" in text
    assert text.endswith("a last line")


def test_devices_that_are_refused(tmp_path: Path):
    found = run(tmp_path, {"refuses": "RuntimeError: The TPU is already in use"})
    assert found.device is None
    assert troubles(found) == [("devices", "RuntimeError: The TPU is already in use")]


def test_devices_that_do_not_answer(tmp_path: Path):
    found = run(tmp_path, {"sleeps": ""}, start=0.5)
    ((job, text),) = troubles(found)
    assert job == "devices"
    assert "another process may hold them" in text
    assert found.troubles[0].fix.startswith("sudo lsof")


def test_what_no_time_is_left_for_is_named(tmp_path: Path):
    found = run(tmp_path, {"a": "", "b": "hang", "c": ""}, total=1.5)
    assert names(found) == ["a"]
    assert [job for job, _ in troubles(found)] == ["b", "c"]
    assert "time for everything was over" in found.troubles[0].text
    assert found.troubles[1].text.startswith("not begun")
    assert all("--minutes" in one.fix for one in found.troubles)


def test_progress_names_the_job_and_counts(tmp_path: Path):
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER.format(jobs={"a": "", "b": ""}, pid="")))
    seen: list[tuple[str, int, int]] = []
    watch(
        TimeLimits(),
        progress=lambda *event: seen.append(event),
        command=(sys.executable, "-S", str(script)),
    )
    assert seen == [("a", 0, 2), ("b", 1, 2)]


def test_no_descriptor_and_no_process_is_left(tmp_path: Path):
    before = len(os.listdir("/proc/self/fd"))
    run(tmp_path, {"a": "hang"}, job=0.5)
    assert len(os.listdir("/proc/self/fd")) == before


# The worker itself, in this process.


def test_a_job_that_raises_is_said_and_the_next_one_runs():
    from tpuport.measurement.bench import this_bench

    def broken():
        yield Result("a", "first", Quantity.RATE, 1.0)
        raise ValueError("wrong")

    said: list[dict] = []
    jobs = {"a": broken, "b": lambda: [Result("b", "second", Quantity.RATE, 2.0)], "c": list}
    worker.run(said.append, this_bench(), jobs, done=["c"])
    kinds = [next(iter(event)) for event in said]
    of_a, of_b = ("begins", "result", "error", "ends"), ("begins", "result", "ends")
    assert kinds == ["device", *of_a, *of_b, "finished"]
    assert said[3] == {"error": "ValueError: wrong", "job": "a"}
    assert said[0]["device"]["count"] == 8


def test_a_package_that_is_missing_is_named_with_its_extra():
    def broken():
        raise ModuleNotFoundError("No module named 'diffusers'", name="diffusers")

    (event,) = worker._events("program a", broken)
    assert 'pip install "tpuport[recipes]"' in event["error"]


def test_jobs_are_chosen_by_name():
    jobs: dict[str, worker.Job] = {"a": list, "b": list}
    assert worker.chosen(jobs, []) == jobs
    assert list(worker.chosen(jobs, ["b"])) == ["b"]
    with pytest.raises(UsageError, match="no such job here: expected one of a, b"):
        worker.chosen(jobs, ["c"])["c"]()


def test_devices_that_jax_refuses_are_what_the_worker_says(monkeypatch: pytest.MonkeyPatch):
    from tpuport.measurement import bench

    def held() -> bench.Bench:
        raise RuntimeError("The TPU is already in use")

    read, write = os.pipe()
    monkeypatch.setattr(bench, "this_bench", held)
    monkeypatch.setattr(sys, "argv", ["worker", "--to", str(write)])
    worker.main()
    with os.fdopen(read) as said:
        assert json.loads(said.read()) == {"refused": "RuntimeError: The TPU is already in use"}
