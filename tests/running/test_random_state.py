"""Random scripts over modules that keep tensors, from `benchmarks.stateful_scripts`."""

import pytest

from benchmarks.stateful_scripts import Maker, judged


def check(seed, folder):
    source, calls = Maker(seed).program()
    verdict = judged(source, calls, folder)
    assert verdict.kind != "differs", f"{verdict.what}\n{source}"
    return verdict.kind


@pytest.mark.parametrize("start", [0, 8])
def test_a_script_sees_what_it_sees_in_eager_pytorch(start, tmp_path):
    kinds = [check(seed, tmp_path) for seed in range(start, start + 8)]
    assert kinds.count("passes") >= 4


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 1200, 20))
def test_more_scripts(start, tmp_path):
    kinds = [check(seed, tmp_path) for seed in range(start, start + 20)]
    assert kinds.count("passes") >= 8
