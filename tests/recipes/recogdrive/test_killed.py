"""Runs of the planner that are killed go on to the same weights, to the bit."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

import tpuport
from recipes.recogdrive import planner as planners
from recipes.recogdrive.make_data import make_cache
from recipes.recogdrive.weights import read_weights
from tests.recipes.killing import cached_in, kill_when
from tests.recipes.recogdrive.runs import command, has_state, logged
from tests.recipes.recogdrive.small import CONFIG, small_planner

# The least of a planner: what a run keeps does not depend on its size.
# The command with that size, reading slowly, so that it is not through before it is killed.
SCRIPT = f"""
import time
from recipes.recogdrive import layouts, planner
from recipes.recogdrive.__main__ import app
from recipes.recogdrive.planner import PlannerConfig

read = layouts.CacheDataset.__getitem__
layouts.CacheDataset.__getitem__ = lambda self, index: time.sleep(0.1) or read(self, index)
planner.SIZES["tiny"] = {CONFIG!r}
app()
"""
STEPS = 12
TRAIN = f"--size tiny --batch-size 4 --epochs {STEPS // 2} --lr 3e-3 --ema 0.9"
GRPO = f"--samples 2 --batch-size 4 --epochs {STEPS // 2} --reward-workers 0"
OFTEN = "--save-every 4 --log-every 1 --evaluate-every 100"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Six samples, a planner, and what runs compile, which is the same for all of them."""
    folder = tmp_path_factory.mktemp("killed")
    make_cache(folder / "cache", count=6, tokens=4, width=12)
    tpuport.save_checkpoint(folder / "begun.safetensors", small_planner().state_dict())
    with (
        mock.patch.dict(planners.SIZES, tiny=CONFIG),
        tpuport.compile_cache(folder / "programs", min_compile_seconds=0.0),
    ):
        yield folder


def kill_in_the_middle(arguments: list[str], out: Path, folder: Path) -> None:
    """Start a command, and end it by SIGKILL once a state is there."""
    # A copy: what is killed may leave half a program, which jax warns of and compiles anew.
    programs = shutil.copytree(folder / "programs", out.with_suffix(".programs"))
    kill_when(
        lambda: has_state(out),
        *("-c", SCRIPT, *arguments),
        **cached_in(programs),
    )


# test_chain.py runs both commands to their end, test_cache.py kills one, and
# tests/training/test_checkpoints.py goes on with the state of a killed run.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "grpo"])
def test_a_killed_run_goes_on_to_the_same_weights(folder: Path, name: str):
    flags = {"train": TRAIN, "grpo": f"{GRPO} --checkpoint {folder / 'begun.safetensors'}"}
    given = [name, str(folder / "cache"), *flags[name].split(), *OFTEN.split()]
    whole, killed = folder / f"{name}-whole", folder / f"{name}-killed"
    command(*given, "--out", whole)
    kill_in_the_middle([*given, "--out", str(killed)], killed, folder)
    assert not (killed / "planner.safetensors").exists()
    before = logged(killed)
    assert 0 < len(before) < STEPS
    command(*given, "--out", killed)
    assert len(logged(whole)) == STEPS
    assert logged(killed) == logged(whole)
    begun = read_weights(folder / "begun.safetensors")
    one, other = (read_weights(out / "planner.safetensors") for out in (whole, killed))
    assert one.keys() == other.keys() == begun.keys()
    for fqn, value in one.items():
        assert torch.equal(value, other[fqn]), fqn
    moved = [fqn for fqn, value in one.items() if not torch.equal(value, begun[fqn])]
    assert len(moved) > 20
