"""The same script on one process and on two, joined by `jax.distributed`."""

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.training.processes import SECONDS, finish, start_two
from tests.training.two_processes import Samples, train
from tpuport.foundation.errors import UsageError
from tpuport.training import initialize
from tpuport.training.distributed import _find
from tpuport.training.preemption import EXIT_STATUS


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def until_preempted(folder: Path, step: int) -> list[subprocess.Popen]:
    """Two processes of four devices; one of them is asked to end some steps later."""
    started = start_two("-m", "tests.training.two_processes", str(folder))
    end = time.monotonic() + SECONDS
    while lines(folder)[-1]["step"] < step and time.monotonic() < end:
        if any(process.poll() is not None for process in started):
            break
        time.sleep(0.1)
    started[1].send_signal(signal.SIGTERM)
    return started


def test_two_processes_go_on_with_what_one_began_and_one_with_what_they_left(tmp_path):
    train(tmp_path, 3, None, Samples())
    processes = until_preempted(tmp_path, 6)
    finish(processes, EXIT_STATUS)
    last = lines(tmp_path)[-1]["step"]
    assert last >= 6

    # Each process read its rows of each batch, and together they read it once.
    about = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [(one["count"], one["found"]) for one in about] == [(2, "torchrun")] * 2
    # They began with the last batch of an epoch; the next one is whole.
    order = np.random.default_rng((1, 1)).permutation(70)[:64]
    rows = [np.reshape(one["read"][8:40], (4, 8)) for one in about]
    batches = np.concatenate(rows, axis=1).reshape(-1)
    np.testing.assert_array_equal(batches, order)

    state = train(tmp_path, last + 2, {"fsdp": 8}, Samples())
    whole = tmp_path / "whole"
    alone = train(whole, last + 2, None, Samples())
    found, expected = lines(tmp_path), lines(whole)
    assert [line["step"] for line in found] == list(range(1, last + 3))
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(
            [line[key] for line in found], [line[key] for line in expected], rtol=1e-4
        )
    for name, value in alone.params.items():
        scale = float(np.abs(value).max())
        np.testing.assert_allclose(
            jax.device_get(state.params[name]), value, rtol=0, atol=1e-5 * scale, err_msg=name
        )


# Who joins.


def test_a_process_without_others_is_alone():
    assert _find({}, (None, None, None)) is None
    assert (
        _find(
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            (None, None, None),
        )
        is None
    )
    hosts = initialize()
    assert (hosts.process, hosts.count, hosts.found, hosts.is_first) == (0, 1, "one process", True)


TORCHRUN = {"MASTER_ADDR": "h", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "3"}
JAX = {"JAX_COORDINATOR_ADDRESS": "c:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (TORCHRUN, ("torchrun", "h:29500", 4, 3)),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}, ("torchrun", "h:29501", 4, 3)),
        ({**TORCHRUN, **JAX}, ("JAX_NUM_PROCESSES", "c:1", 2, 1)),
        ({"SLURM_NTASKS": "2"}, ("Slurm", None, None, None)),
        ({"SLURM_NTASKS": "1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ("Open MPI", None, None, None)),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, ("the TPU slice", None, None, None)),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"}, None),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
    ],
)
def test_the_others_are_found(env: dict[str, str], expected: Any):
    found = _find(env, (None, None, None))
    got = found and (found.by, found.coordinator, found.count, found.process)
    assert got == expected


@pytest.mark.parametrize(
    ("env", "given", "message"),
    [
        ({"WORLD_SIZE": "2"}, (), "WORLD_SIZE set, and MASTER_ADDR, MASTER_PORT, RANK not"),
        ({"JAX_PROCESS_ID": "1"}, (), "JAX_PROCESS_ID set, and JAX_COORDINATOR_ADDRESS, JAX_NUM"),
        ({}, ("h:1", 2, None), "coordinator, num_processes set, and process not"),
        ({}, ("h:1", 2, 2), "process 2 of 2 .*: expected a number from 0 up to 1"),
        ({}, ("h", 2, 1), "the coordinator is 'h' .*: expected 'host:port'"),
        ({**TORCHRUN, "RANK": "one"}, (), "is 'one': expected a whole number"),
    ],
)
def test_what_is_half_set_is_refused(env: dict[str, str], given: Any, message: str):
    with pytest.raises(UsageError, match=f"initialize: .*{message}") as caught:
        _find(env, given or (None, None, None))
    assert "\n" not in str(caught.value)


def test_devices_that_were_asked_for_already_are_an_error(monkeypatch):
    jax.devices()
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"torchrun says .* call initialize\(\) before"):
        initialize()
