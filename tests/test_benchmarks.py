"""The benchmarks run, measure what they say, and the page shows what the last full run found."""

import gc
import json
import platform
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from benchmarks import machine, measure, page, timing
from benchmarks.contestants import (
    FORWARD,
    HAND,
    OURS,
    PLAIN,
    TRAINING,
    NoCompilerError,
    make_compiled,
    make_eager,
    make_pure,
)
from benchmarks.models import dit_stack, make_cases
from benchmarks.plot import plot

ROOT = Path(__file__).parent.parent
RESULTS = json.loads((ROOT / "docs/benchmarks/results.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    return dit_stack(2, width=32, tokens=16)


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> tuple[dict[str, Any], Path]:
    """`python -m benchmarks --quick` in a process of its own, as torch.compile needs it."""
    out = tmp_path_factory.mktemp("benchmarks")
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks", "--quick", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "results.json").read_text(encoding="utf-8")), out


@pytest.mark.slow
def test_a_quick_run_measures_everything(quick):
    results, _ = quick
    against = {row["against"] for row in results["step"]}
    assert {PLAIN, HAND, "eager PyTorch"} <= against
    compiled = "torch.compile" in against
    assert compiled or any("no C++ compiler" in one["reason"] for one in results["skipped"])
    assert {row["stage"] for row in results["staging"]} >= {"trace", "lower", "first result"}
    assert {row["layers"] for row in results["depth"]} == {1, 2}
    assert len(results["calls"]) == 2
    for kind in ("step", "staging", "calls"):
        for row in results[kind]:
            assert 0 < row["low"] <= row["median"] <= row["high"] < 1e6


@pytest.mark.slow
def test_a_quick_run_draws_and_leaves_the_page_alone(quick):
    _, out = quick
    assert ET.parse(out / "results.svg").getroot().tag.endswith("svg")
    assert sorted(path.name for path in out.iterdir()) == ["results.json", "results.svg"]


@pytest.mark.slow
def test_the_results_name_the_sort_of_machine_and_not_the_machine(quick):
    text = json.dumps([quick[0], RESULTS])
    assert platform.node() not in text
    assert not re.search(r"/(home|root|tmp|work|Users)/", text)
    assert {"python", "torch", "jax", "torchax", "tpuport"} <= set(quick[0]["versions"])


# What is measured is the same function.


@pytest.mark.parametrize("what", [FORWARD, TRAINING])
def test_every_contestant_computes_the_same(tiny, what: str):
    expected = make_eager(tiny, what)()
    for name, one in make_pure(tiny).items():
        result = jax.jit(one.make(what))(*one.inputs)
        value = result[0] if what == TRAINING else result
        np.testing.assert_allclose(value, expected.detach(), rtol=1e-4, atol=1e-5, err_msg=name)


def test_the_gradients_of_the_hand_written_stack_are_the_same(tiny):
    make_eager(tiny, TRAINING)()
    hand = make_pure(tiny)[HAND]
    _, grads = jax.jit(hand.make(TRAINING))(*hand.inputs)
    expected = tiny.module.blocks[1].qkv
    np.testing.assert_allclose(grads[1]["qkv"]["kernel"].T, expected.weight.grad, atol=1e-6)
    np.testing.assert_allclose(grads[1]["qkv"]["bias"], expected.bias.grad, atol=1e-6)


@pytest.mark.parametrize("case", make_cases(), ids=lambda case: case.name)
def test_every_model_gives_one_tensor(case):
    with torch.no_grad():
        assert case.module(*case.args).isfinite().all()
    assert not case.module.training


def test_without_a_compiler_torch_compile_is_skipped_with_a_reason(tiny, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NoCompilerError, match=r"no C\+\+ compiler \(g\+\+ or clang\+\+\)"):
        make_compiled(tiny, FORWARD)


# How it is measured.


@pytest.fixture
def _little_to_collect() -> Iterator[None]:
    """Hide the suite's objects: garbage is collected before a measurement, two seconds of it."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_little_to_collect")
def test_everyone_runs_in_every_round_in_rotating_order():
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    times = timing.interleaved(calls, rounds=4, seconds=0)
    first = order[6:]  # each ran twice beforehand: once to warm up, once to see how long it takes
    assert first == [*"abc", *"bca", *"cab", *"abc"]
    assert all(len(series.wall) == len(series.cpu) == 4 for series in times.values())


def test_a_ratio_is_taken_round_by_round():
    found = timing.ratio([2.0, 20.0, 6.0], [1.0, 10.0, 2.0])
    assert (found.median, found.low, found.high) == (2.0, 2.0, 3.0)
    assert timing.ratio([3.0], [2.0]).median == 1.5


@pytest.mark.usefixtures("_little_to_collect")
def test_twice_the_work_takes_twice_the_time():
    def work(amount: int) -> int:
        return sum(range(amount))

    calls = {"once": lambda: work(200_000), "twice": lambda: work(400_000)}
    times = timing.interleaved(calls, rounds=9, seconds=0.01)
    assert 1.5 < timing.ratio(times["twice"].cpu, times["once"].cpu).median < 2.7


def test_stages_are_measured_on_functions_that_jax_has_not_seen(tiny):
    pure = {OURS: make_pure(tiny)[OURS]}
    times = measure._stage_times(pure, FORWARD, rounds=3)[OURS]
    assert len(times["trace"]) == len(times["lower"]) == 3
    assert len(times["compile"]) == measure.COMPILE_ROUNDS
    # One that jax knew would take microseconds.
    assert min(times["trace"]) > 1e-3


def test_cores_are_described():
    assert machine.describe()["cores"] == machine.num_cores() >= 1


# The page.


def test_the_page_shows_the_results():
    text = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    for name, table in page.tables(RESULTS).items():
        assert page.replaced(text, name, table) == text, f"docs/benchmarks.md is stale: {name}"


def test_the_results_are_of_a_full_run():
    assert {row["model"] for row in RESULTS["step"]} == {case.name for case in make_cases()}
    assert {row["layers"] for row in RESULTS["depth"]} == {2, 8, 32}


def test_the_plot_is_the_same_for_the_same_results(tmp_path):
    for name in ("a.svg", "b.svg"):
        plot(RESULTS, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_tables_go_between_their_markers():
    text = "a\n<!-- t -->\nold\n<!-- end of t -->\nb"
    assert page.replaced(text, "t", "new") == "a\n<!-- t -->\nnew\n<!-- end of t -->\nb"
    with pytest.raises(ValueError, match="markers <!-- x --> and <!-- end of x -->"):
        page.replaced(text, "x", "new")


def test_linters_are_timed_against_parsing(tmp_path):
    (tmp_path / "a.py").write_text(
        "import torch\n\n\ndef forward(x: torch.Tensor):\n    return x\n"
    )
    out = tmp_path / "page.md"
    command = [sys.executable, "-m", "benchmarks.lint", str(tmp_path), "--out", str(out)]
    result = subprocess.run(
        [*command, "--ruff", shutil.which("ruff") or "", "--flake8", ""],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    rows = re.findall(
        r"^\| (.*?) \| ([\d.]+)x \| ([\d.]+)x \| (\d+) MiB \|$", out.read_text(), re.M
    )
    assert [row[0] for row in rows][:3] == [
        "tpuport lint, one process",
        "tpuport lint, cold",
        "tpuport lint, warm",
    ]
    assert all(int(row[3]) > 10 for row in rows)
