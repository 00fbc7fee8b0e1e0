"""The benchmark of MAE-DiT compares ways that come to the same numbers."""

from functools import partial

import pytest

from benchmarks import mae_dit as benchmark


@pytest.mark.slow
def test_a_sampler_is_measured(monkeypatch: pytest.MonkeyPatch):
    case = partial(benchmark.samples, steps=2), benchmark.SCAN, "samples"
    monkeypatch.setitem(benchmark.CASES, "samples", case)
    lines = benchmark.measure("samples", rows=2, rounds=2, seconds=0.0)
    assert lines[0] == "samples, 2 samples:"
    assert [line.split(":")[0].strip() for line in lines[1:4]] == [
        benchmark.EAGER,
        benchmark.PROGRAM_LOOP,
        benchmark.SCAN,
    ]
    assert "times as fast as eager PyTorch" in lines[4]
