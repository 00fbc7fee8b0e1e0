"""Random training scripts, steps and modules of Python's idioms, from `benchmarks`.

A few of each, beside the tests of what they have found; `make fuzz` runs many more.
"""

import pytest

from benchmarks import (
    aliased_containers,
    edited_modules,
    left_loops,
    python_idioms,
    task_scripts,
    train_steps,
    training_scripts,
)


@pytest.mark.parametrize("seed", [9, 17, 22, 61, 262])
def test_a_training_script_sees_what_it_sees_in_eager_pytorch(seed, tmp_path):
    source, steps = training_scripts.Maker(seed).program()
    assert training_scripts.verdict(source, steps, tmp_path) == ("passes", "")


@pytest.mark.parametrize("how", ["convert", "porting"])
@pytest.mark.parametrize("seed", [7, 12, 49, 52, 166])
def test_an_idiom_of_python_means_what_it_means_in_eager_pytorch(seed, how, tmp_path):
    source, changes = python_idioms.Maker(seed).program()
    kind, what = python_idioms.verdict(source, changes, tmp_path, how)
    known = {"convert": ("passes", "refused"), "porting": ("passes",)}
    assert kind in known[how], what


@pytest.mark.parametrize("seed", [1, 7, 23])
def test_a_research_script_shows_what_it_shows_in_eager_pytorch(seed, tmp_path):
    assert task_scripts.verdict(task_scripts.made(seed), tmp_path) == ("passes", "")


@pytest.mark.parametrize("seed", [1, 2, 12])
def test_a_training_step_gives_what_a_loop_in_eager_pytorch_gives(seed, tmp_path):
    assert train_steps.verdict(train_steps.Setting.of(seed), tmp_path) == ("passes", "")


@pytest.mark.parametrize("seed", [14, 17])
def test_a_write_to_a_container_reaches_all_its_names(seed, tmp_path):
    source = aliased_containers.Maker(seed).program()
    assert aliased_containers.verdict(source, tmp_path / "script.py", "porting") == ("passes", "")


@pytest.mark.parametrize("seed", [2, 11, 30])
def test_a_loop_that_a_traced_value_ends_leaves_what_it_leaves_in_eager_pytorch(seed, tmp_path):
    assert left_loops.verdict(left_loops.Maker(seed).program(), tmp_path / "s.py") == ("passes", "")


# A module with a backward hook runs by its parts, and says so.
@pytest.mark.filterwarnings("ignore::tpuport.compat.emulated.programs.PortWarning")
@pytest.mark.parametrize("seed", [120, 332, 537])
def test_a_module_that_is_changed_between_steps_trains_as_in_eager_pytorch(seed, tmp_path):
    source = edited_modules.script(seed)
    assert edited_modules.verdict(source, tmp_path / "script.py") == ("passes", "")
