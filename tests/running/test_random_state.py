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


def test_a_list_that_a_script_reverses_does_not_stand_for_its_old_places(tmp_path):
    assert check(1102, tmp_path) == "passes"
