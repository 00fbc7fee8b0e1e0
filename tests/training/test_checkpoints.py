"""A run that is interrupted goes on as if it had not been."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

import tpuport
from tests.full_disk import full_after
from tests.training.small import Small, batches, loss
from tpuport.foundation.errors import CheckpointError, MissingExtraError, UsageError
from tpuport.sharding import fsdp
from tpuport.training import Checkpoints, TrainState, TrainStep, make_train_step

ROOT = Path(__file__).parent.parent.parent


def new_step(**options: Any) -> TrainStep:
    torch.manual_seed(0)
    return make_train_step(tpuport.convert(Small(**options)), loss, ema_decay=0.9)


def run(step: TrainStep, state: TrainState, given: Any) -> tuple[TrainState, list[float]]:
    losses = []
    for batch in given:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def held(state: TrainState) -> Any:
    """The values of a state, its key as numbers."""
    return jax.device_get(jax.tree.map(_plain, state))


def _plain(leaf: Any) -> Any:
    is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def test_a_resumed_run_is_bit_equal_to_one_that_was_not_interrupted(tmp_path):
    given = batches(6)
    whole, losses = run(*(lambda s: (s, s.init(7)))(new_step()), given)

    step = new_step()
    state, first = run(step, step.init(7), given[:3])
    with Checkpoints(tmp_path / "run") as saved:
        saved.save(state, {"batch": 3})
        # The arrays are overwritten while it is being written.
        run(step, state, given[3:])

    later = new_step()
    with Checkpoints(tmp_path / "run") as saved:
        state, position = saved.restore(later.init(0)) or pytest.fail("nothing there")
    assert position == {"batch": 3}
    end, second = run(later, state, given[position["batch"] :])
    assert first + second == losses
    jax.tree.map(np.testing.assert_array_equal, held(end), held(whole))


def test_the_newest_are_kept(tmp_path):
    step = new_step()
    state = step.init()
    with Checkpoints(tmp_path, keep=2) as saved:
        assert saved.restore(state) is None
        for batch in batches(4):
            state, _ = step(state, batch)
            saved.save(state)
        saved.wait()
        assert saved.steps == [3, 4]
        found = saved.restore(state, 3)
        assert found is not None
        assert (int(found.state.step), found.position) == (3, None)
        with pytest.raises(CheckpointError, match=r"no state of step 1; there are \[3, 4\]"):
            saved.restore(state, 1)


def test_a_state_moves_to_another_mesh(tmp_path):
    step = new_step(width=64)
    state, _ = run(step, step.init(), batches(1))
    expected = held(state)
    with Checkpoints(tmp_path) as saved:
        saved.save(state)
    ported = tpuport.convert(Small(width=64))
    tpuport.shard(ported, {"fsdp": 8}, fsdp(ported, {"fsdp": 8}, min_size=64))
    spread = make_train_step(ported, loss, ema_decay=0.9)
    like = spread.init()
    assert len(like.params["first.weight"].addressable_shards) == 8
    with Checkpoints(tmp_path) as saved:
        found = saved.restore(like)
    assert found is not None
    assert found.state.params["first.weight"].sharding == like.params["first.weight"].sharding
    jax.tree.map(np.testing.assert_array_equal, held(found.state), expected)
    after, metrics = spread(found.state, batches(2)[1])
    assert float(metrics["loss"]) > 0
    assert len(after.optimizer[0].mu["first.weight"].addressable_shards) == 8


def test_a_state_of_another_model_is_refused(tmp_path):
    step = new_step()
    with Checkpoints(tmp_path) as saved:
        saved.save(step.init())
    wider = new_step(width=32).init()
    with (
        Checkpoints(tmp_path) as saved,
        pytest.raises(
            CheckpointError,
            match=r"params\['first.bias'\] is float32\[16\] there and float32\[32\] in the state",
        ),
    ):
        saved.restore(wider)
    without = make_train_step(tpuport.convert(Small()), loss).init()
    with (
        Checkpoints(tmp_path) as saved,
        pytest.raises(CheckpointError, match=r"ema\['first.bias'\] is float32\[16\] .* missing"),
    ):
        saved.restore(without)


def test_a_damaged_state_is_an_error_that_names_the_others(tmp_path):
    step = new_step()
    state, _ = run(step, step.init(), batches(1))
    with Checkpoints(tmp_path) as saved:
        saved.save(step.init())
        saved.save(state)
    for file in (tmp_path / "1" / "state").rglob("*"):
        if file.is_file() and "METADATA" in file.name.upper():
            file.write_bytes(b"not what was there")
    with (
        Checkpoints(tmp_path) as saved,
        pytest.raises(CheckpointError, match=r"step 1 in .* was not read.* steps \[0, 1\]"),
    ):
        saved.restore(state)


# Saves state after state of 64 MiB, and says so, until it is killed.
_ENDLESS = """
import sys, time
import jax, jax.numpy as jnp
from tpuport.sharding import fsdp
from tpuport.training import Checkpoints, TrainState

zero = jnp.zeros((), jnp.int32)
state = TrainState({"w": jnp.zeros((4096, 4096))}, {}, {}, {}, {}, zero, zero, jax.random.key(0))
more = jax.jit(lambda s: jax.tree.map(lambda x: x + 1 if x.dtype != s.key.dtype else x, s))
with Checkpoints(sys.argv[1], keep=3) as saved:
    while True:
        state = more(state)
        saved.save(state)
        print(int(state.step), flush=True)
"""


# At other moments of the writing.
@pytest.mark.parametrize(
    "seconds",
    [pytest.param(0.0, marks=pytest.mark.slow), 0.05, pytest.param(0.2, marks=pytest.mark.slow)],
)
def test_a_killed_run_resumes_from_the_last_whole_state(tmp_path, seconds: float):
    with subprocess.Popen(
        [sys.executable, "-c", _ENDLESS, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 3:
            pass
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
    zero = jax.numpy.zeros((), jax.numpy.int32)
    weights = {"w": jax.numpy.zeros((4096, 4096))}
    like = TrainState(weights, {}, {}, {}, {}, zero, zero, jax.random.key(0))
    with Checkpoints(tmp_path) as saved:
        found = saved.restore(like)
        assert found is not None
        number = int(found.state.step)
        assert number >= 1
        np.testing.assert_array_equal(np.unique(found.state.params["w"]), [number])
        # What was left half-written is no obstacle.
        saved.save(replace(found.state, step=zero + number + 1))
        saved.wait()
        assert saved.steps[-1] == number + 1


# Writes of orbax that end after its own loop has closed, as the first of them failed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_said_and_the_states_before_are_kept(tmp_path):
    step = new_step(width=256)
    first, _ = run(step, step.init(), batches(1))
    kept = held(first)
    full = r"disk is full.*states of the steps \[1\] are there.*make room there, and start again"
    with Checkpoints(tmp_path) as saved:
        saved.save(first)
    later, _ = run(step, first, batches(1))

    def save() -> None:
        with full_after(50_000), Checkpoints(tmp_path) as saved:
            saved.save(later)

    with pytest.raises(CheckpointError, match=full):
        save()
    assert [name for name in os.listdir(tmp_path) if name.isdigit()] == ["1"]
    with Checkpoints(tmp_path) as saved:
        found = saved.restore(step.init())
        assert found is not None
        jax.tree.map(np.testing.assert_array_equal, held(found.state), kept)
        again, _ = run(step, found.state, batches(1))
        saved.save(again)
        saved.wait()
        assert saved.steps == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_an_error_is_not_drowned_by_those_of_other_arrays(tmp_path, caplog):
    """What asyncio logs of errors that nobody took, such as those of orbax's tasks."""

    async def async_serialize_from_host() -> None:
        raise ValueError("full")

    async def other() -> None:
        raise ValueError("of something else")

    async def lose(work: Any) -> None:
        task = asyncio.ensure_future(work)
        await asyncio.wait([task])

    Checkpoints(tmp_path).close()
    for work in (async_serialize_from_host(), other()):
        asyncio.run(lose(work))
        gc.collect()
    # Tasks that other tests lost may be collected here, too.
    logged = [record for record in caplog.records if record.name == "asyncio" and record.exc_info]
    (told,) = [one for one in logged if str(one.exc_info[1]) in ("full", "of something else")]
    assert "never retrieved" in told.message
    assert "other()" in told.message


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="keep=0: expected how many"):
        Checkpoints(tmp_path, keep=0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install \"tpuport\[train\]\""):
        Checkpoints(tmp_path)


def test_what_would_not_be_saved_is_said(tmp_path):
    step = new_step()
    first = step.init()
    with Checkpoints(tmp_path) as saved:
        for position in ((1, 2), {1: 2}, np.int64(3), float("nan")):
            with pytest.raises(UsageError, match="position: expected numbers, strings, lists"):
                saved.save(first, position)
        assert saved.steps == []
        state, _ = run(step, first, batches(2))
        saved.save(state, [1, {"epoch": 2}])
        saved.save(state)  # it is there already
        with pytest.raises(CheckpointError, match=r"has states up to step 2.*another directory"):
            saved.save(step.init())
        saved.wait()
        assert saved.steps == [2]


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
    target = tmp_path / "file"
    target.write_text("not a directory")
    with pytest.raises((CheckpointError, OSError)):
        Checkpoints(target / "run")
