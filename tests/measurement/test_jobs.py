"""The jobs on one CPU and on eight virtual devices: numbers come out, and the errors are real."""

import dataclasses
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tpuport.foundation.errors import UsageError
from tpuport.measurement import kernels, links, programs, rates, worker
from tpuport.measurement.bench import Bench, this_bench
from tpuport.measurement.records import Device, Measurements, Quantity
from tpuport.measurement.report import MeasureReport

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def bench() -> Bench:
    return this_bench()


def one_device(bench: Bench) -> Bench:
    device = dataclasses.replace(bench.device, count=1)
    return dataclasses.replace(bench, devices=bench.devices[:1], device=device)


def test_a_cpu_is_small_and_compared_with_a_stand_in(bench: Bench):
    assert bench.device == Device("cpu", "cpu", 8, "v5e", small=True)


def test_a_time_is_that_of_one_step(bench: Bench):
    def slow(x: Any) -> Any:
        def wait(x: Any) -> Any:
            time.sleep(5e-3)
            return x

        return jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), x)

    assert 5e-3 <= bench.seconds(slow, jnp.float32(0)) < 1e-2


@pytest.mark.parametrize("job", [rates.products, rates.memory, rates.host])
def test_rates_are_positive(bench: Bench, job: Any):
    found = list(job(bench))
    assert len(found) >= 2
    for one in found:
        assert 0 < one.value < math.inf
        assert one.job == job.__name__
    assert [one.expected is None for one in found] == [job is rates.host] * len(found)


def test_narrow_products_are_expected_to_fill_less(bench: Bench):
    assert bench.chip is not None
    full, narrow, rounded, exact, int8 = rates.products(bench)
    share = bench.chip.fill(32, 128)
    assert narrow.expected == pytest.approx(share * (full.expected or 0))
    assert int8.expected == pytest.approx(2 * (full.expected or 0))
    # A product of float32 takes six of bf16, unless its operands may be rounded to bf16.
    assert rounded.expected == pytest.approx(full.expected)
    assert exact.expected == pytest.approx((full.expected or 0) / 6)
    assert (rounded.name, exact.name) == (
        "product, float32, operands rounded",
        "product, float32, as tpuport computes",
    )
    assert [one.feeds for one in (full, narrow, int8)] == ["dense_efficiency", "", "int8_ops"]


def test_links_and_collectives_need_several_devices(bench: Bench):
    alone = one_device(bench)
    assert list(links.links(alone)) == list(links.collectives(alone)) == []
    assert {"links", "collectives", "kernel ring"} <= worker.jobs_of(bench, ()).keys()
    assert not {"links", "collectives", "kernel ring"} & worker.jobs_of(alone, ()).keys()


def test_a_gpu_gives_no_times_of_kernels_that_a_port_does_not_call_there(bench: Bench):
    gpu = dataclasses.replace(
        bench, device=dataclasses.replace(bench.device, platform="gpu", small=False)
    )
    assert "kernel times" in worker.jobs_of(bench, ())
    assert "kernel times" not in worker.jobs_of(gpu, ())
    assert "kernel splash" in worker.jobs_of(gpu, ())


def test_each_link_is_measured(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    # Eight programs; two are enough for their lines.
    monkeypatch.setattr(links, "_MOST_LINKS", 2)
    found = list(links.links(bench))
    assert [one.name for one in found] == ["link 0 - 1", "link 1 - 2"]
    assert all(one.value > 0 for one in found)


@pytest.mark.parametrize("kind", links._COLLECTIVES)
def test_collectives_move_what_they_should(bench: Bench, kind: str):
    x = np.arange(64, dtype=np.float32)
    mesh = Mesh(np.array(bench.devices), (links.AXIS,))
    step = jax.shard_map(
        lambda x: links._step_of(kind, 8, x),
        mesh=mesh, in_specs=P(links.AXIS), out_specs=P(links.AXIS), check_vma=False,
    )  # fmt: skip
    compiled = jax.jit(step).lower(x).compile()
    assert f" {kind}(" in (compiled.as_text() or "")
    own = x.reshape(8, 8)
    expected = {
        "all-reduce": np.broadcast_to(own.mean(0), own.shape),
        # Piece i of device j is piece j of device i.
        "all-to-all": own.T + 1,
        "all-gather": np.broadcast_to(own[0] + 1, own.shape),
        # Every device sums the same piece of all others.
        "reduce-scatter": np.broadcast_to(own.mean(0), own.shape),
    }[kind]
    np.testing.assert_allclose(np.asarray(compiled(x)).reshape(8, 8), expected, rtol=1e-6)


def test_collectives_are_timed_against_the_model(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(links, "_COLLECTIVES", ("all-gather",))
    large, tiny = links.collectives(bench)
    # 1024 elements of 4 bytes on each of 8, of which 7/8 come over two links.
    assert bench.chip is not None
    size = 4 * 1024 * 8
    assert large.expected == pytest.approx(size * 7 / 8 / (2 * bench.chip.ici_link_bandwidth))
    assert (large.feeds, tiny.expected) == ("ici_link_bandwidth", None)
    assert tiny.value > 0


class At:
    """A device with coordinates."""

    def __init__(self, *coords: int) -> None:
        self.coords = coords


def test_neighbours_are_one_step_apart():
    slice_of_8 = tuple(At(x, y, 0) for y in range(4) for x in range(2))
    assert len(links.neighbours(slice_of_8)) == 10
    assert links.neighbours((At(0, 0), At(2, 0))) == []
    ring = links.neighbours(tuple(object() for _ in range(4)))
    assert ring == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert links.neighbours((object(), object())) == [(0, 1)]


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_reference_is_what_eager_pytorch_computes(softcap: float | None):
    shape = kernels.AttentionShape(2, (4, 2), (7, 9), 8)
    arrays = [np.asarray(x, np.float64) for x in shape.arrays()]
    _, seen = kernels.MASKS["causal"](shape)
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in arrays[:3])
    scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~torch.from_numpy(seen), -torch.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    out.backward(torch.from_numpy(arrays[3]))
    found = kernels.reference(arrays, seen, softcap)
    for one, other in zip(found, (out, q.grad, k.grad, v.grad), strict=True):
        assert other is not None
        np.testing.assert_allclose(one, other.detach().numpy(), rtol=1e-9, atol=1e-12)


def check_of(name: str) -> kernels.KernelCheck:
    return next(c for c in (*kernels.CHECKS, *kernels.SHARDED) if c.name == name)


def error_of(name: str, bench: Bench) -> tuple[float, float]:
    (found,) = kernels.compare(check_of(name), bench)
    assert (found.job, found.kind) == (f"kernel {name}", Quantity.ERROR)
    return found.value, found.expected or 0.0


# The others are in the slow run of everything, below.
@pytest.mark.parametrize("name", ["blockwise, bias", "splash, padding", "dropout"])
def test_a_kernel_is_equal(name: str, bench: Bench):
    value, limit = error_of(name, bench)
    assert 0 < value < limit


def test_a_kernel_that_differs_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    real = kernels.attend

    def wrong(q: Any, k: Any, v: Any, mask: Any, **given: Any) -> Any:
        return real(q, k, v, mask, **given).at[:, :, -1].multiply(1.1)

    monkeypatch.setattr(kernels, "attend", wrong)
    value, limit = error_of("blockwise, bias", bench)
    assert value > limit
    monkeypatch.setattr(kernels, "attend", lambda *args, **given: real(*args, **given) + math.nan)
    assert error_of("blockwise, bias", bench)[0] == math.inf


def test_kernels_have_times_and_a_cpu_no_schedule(bench: Bench):
    found = list(kernels.times(bench))
    assert [one.name for one in found] == ["splash, full, 128 tokens", "splash, causal, 128 tokens"]
    assert all(one.value > 0 and one.expected is None for one in found)


def small_program() -> dict[str, Any]:
    return {"model": torch.nn.Linear(3, 2), "inputs": (torch.ones(4, 3),)}


def test_a_program_is_compared_and_timed(bench: Bench):
    equal, call = programs.measure(f"{__name__}:small_program", bench)
    assert (equal.kind, equal.expected) == (Quantity.ERROR, 1e-4)
    assert equal.value < 1e-6
    assert (call.kind, call.expected) == (Quantity.SECONDS, None)
    assert call.value > 0


def test_a_program_of_another_form_is_refused(bench: Bench):
    with pytest.raises(UsageError, match='expected a dict with "model" and "inputs"'):
        list(programs.measure(f"{__name__}:one_device_name", bench))


def one_device_name() -> str:
    return "cpu"


def test_recipes_have_a_smallest_program():
    targets = programs.recipes_here(ROOT)
    assert [programs.name_of(target) for target in targets] == [
        *("hunyuan_video", "mae_dit", "openpi", "openpilot", "recogdrive"),
    ]
    assert programs.name_of("mine.py:step") == "mine.py:step"


def measured(tmp_path: Path, devices: int, *options: str) -> MeasureReport:
    """The command in a process of its own, as a user starts it."""
    flag = f" --xla_force_host_platform_device_count={devices}"
    code = f"import os; os.environ['XLA_FLAGS'] += {flag!r}\nfrom tpuport.cli.app import app; app()"
    command = [sys.executable, "-c", code, "doctor", "--measure", "--out", str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "meaningless" in " ".join(done.stdout.split())
    assert (tmp_path / "measurement.html").read_text().startswith("<!doctype html>")
    return MeasureReport.from_json((tmp_path / "measurement.json").read_text())


def names(outcome: Measurements) -> set[str]:
    return {one.job for one in outcome.results}


def test_the_command_measures_on_one_cpu(tmp_path: Path):
    report = measured(tmp_path, 1, "--only", "memory")
    assert report.outcome.device == Device("cpu", "cpu", 1, "v5e", small=True)
    assert names(report.outcome) == {"memory"}
    assert report.problems == ()


# test_the_command_measures_on_one_cpu and the tests of each job run the same lines.
@pytest.mark.slow
def test_everything_runs_on_eight_virtual_devices(tmp_path: Path, bench: Bench):
    report = measured(tmp_path, 8, "--minutes", "20", "--limit", "400")
    jobs = worker.jobs_of(bench, programs.recipes_here(ROOT))
    assert names(report.outcome) == jobs.keys()
    assert report.outcome.seconds.keys() == jobs.keys()
    assert report.problems == ()
