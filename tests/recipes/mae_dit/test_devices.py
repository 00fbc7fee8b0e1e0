"""Training over eight devices, of one process or of two, equals that on one device."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

import tpuport
from recipes.mae_dit import generation, runs
from recipes.mae_dit.__main__ import app
from recipes.mae_dit.devices import Devices
from recipes.mae_dit.make_data import make_data
from recipes.mae_dit.weights import MODEL
from tests.recipes.mae_dit import conftest
from tests.recipes.mae_dit.eager import Small, seeded_features
from tests.recipes.mae_dit.tiny import Means, write
from tests.training.processes import finish, start_two
from tpuport.foundation.errors import UsageError
from tpuport.sharding import fsdp

SPREAD_FROM = 8  # elements of a weight that is spread over the devices
SCRIPT = f"""
import jax
from recipes.mae_dit import runs
from recipes.mae_dit.__main__ import app
from tests.recipes.mae_dit.eager import seeded_features
from tpuport.sharding import fsdp

runs.load_lpips = lambda *_, **__: seeded_features()
fsdp.__kwdefaults__["min_size"] = {SPREAD_FROM}
app(standalone_mode=False)
print(jax.process_count(), "processes,", jax.device_count(), "devices")
"""
# Of float32, whose sums over devices are of another order; relative to a tensor's norm.
LOSSES, WEIGHTS = 1e-5, 5e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Twenty images and configurations of both stages, with updates of sixteen images."""
    folder = tmp_path_factory.mktemp("devices")
    make_data(folder / "data", count=20, size=20)
    of_stage2 = yaml.safe_load(write(folder).read_text())
    of_stage1 = conftest.sections()
    of_stage1["arch"]["stage_1"] = {"target": f"{Small.__module__}.Small"}
    of_stage1["gan"]["disc"]["arch"]["use_actnorm"] = True
    for name, sections in (("stage1", of_stage1), ("stage2", of_stage2)):
        # Adam makes steps of full size of gradients that are zero but for rounding.
        sections["optimizer"]["type"] = "sgd"
        sections["experiment"] |= {"batch_size": 8, "accu_step": 2}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(sections))
    of_stage1["gan"]["disc"]["optimizer"]["type"] = "sgd"
    (folder / "stage1.yaml").write_text(yaml.safe_dump(of_stage1))
    with tpuport.compile_cache(folder / "programs", min_compile_seconds=0.0):
        yield folder


@pytest.fixture(autouse=True)
def _small_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "load_lpips", lambda *_, **__: seeded_features())
    monkeypatch.setattr(generation, "load_inception", lambda *_, **__: Means().eval())
    defaults = fsdp.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "min_size", SPREAD_FROM)


@pytest.fixture
def spread(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each model that was placed, the number of weights of which a device holds a part."""
    found, place = [], Devices.place

    def placed(self: Devices, ported: tpuport.PortedModel) -> None:
        place(self, ported)
        weights = ported.params.values()
        found.append(sum(not value.sharding.is_fully_replicated for value in weights))

    monkeypatch.setattr(Devices, "place", placed)
    return found


def command(folder: Path, stage: str, out: Path) -> list[str]:
    given = [stage, str(folder / f"{stage}.yaml"), "--data", str(folder / "data"), "-o", str(out)]
    given += ["--log-every", "1"]
    return given if stage == "stage1" else [*given, "--stage1", str(folder / "stage1")]


def run(folder: Path, stage: str, out: Path, *options: str) -> None:
    done = CliRunner().invoke(app, [*command(folder, stage, out), *options])
    assert done.exit_code == 0, done.output


def check(one: Path, other: Path) -> None:
    """The same numbers in the logs of both runs, and the same weights."""
    logs = [
        [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        for out in (one, other)
    ]
    assert len(logs[0]) == len(logs[1]) > 2
    for wanted, found in zip(*logs, strict=True):
        names = [n for n in wanted if n in ("loss", "error", "grad_norm") or "/" in n]
        assert len(names) > 2
        for name in names:
            # Measures of samples, which are rounded to 8 bits.
            rtol = 1e-2 if name.startswith("evaluate/") else LOSSES
            assert found[name] == pytest.approx(wanted[name], rel=rtol, abs=1e-6), name
    expected, found = (tpuport.open_checkpoint(out / MODEL) for out in (one, other))
    assert set(found) == set(expected)
    for name in expected:
        value, got = expected.read(name).double(), found.read(name).double()
        assert (got - value).norm() <= WEIGHTS * value.norm(), name


@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_a_mesh_trains_as_one_device_does(
    folder: Path, tmp_path: Path, stage: str, spread: list[int]
):
    """With norms that take their scales from the first part of a batch, and looks at samples."""
    looks = ["--grid-every", "3", "--evaluate-every", "3", "--evaluate-count", "7"]
    options = looks if stage == "stage2" else []
    run(folder, stage, tmp_path / "one", *options)
    run(folder, stage, tmp_path / "mesh", *options, "--mesh", "fsdp=8")
    assert spread[0] == 0
    assert spread[1] > 5
    check(tmp_path / "one", tmp_path / "mesh")
    if stage == "stage2":
        pictures = [tmp_path / out / "grids" / "step-000003.png" for out in ("one", "mesh")]
        one, mesh = (np.asarray(Image.open(path), np.int16) for path in pictures)
        assert np.abs(one - mesh).max() <= 1


# test_a_mesh_trains_as_one_device_does spreads the weights, too.
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_copies_train_as_one_device_does(
    folder: Path, tmp_path: Path, stage: str, spread: list[int]
):
    run(folder, stage, tmp_path / "one")
    run(folder, stage, tmp_path / "copies", "--mesh", "data=8", "--rules", "ddp")
    assert spread == [0, 0]
    check(tmp_path / "one", tmp_path / "copies")


# test_a_mesh_trains_as_one_device_does has the devices in one process, training/test_hosts.py two.
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_processes_train_as_one_device_does(folder: Path, tmp_path: Path, stage: str):
    given = [*command(folder, stage, tmp_path / "two"), "--mesh", "fsdp=-1"]
    started = start_two("-W", "ignore", "-c", SCRIPT, *given)
    try:
        run(folder, stage, tmp_path / "one")
    finally:
        outputs = finish(started)
    assert all("2 processes, 8 devices" in output for output in outputs)
    check(tmp_path / "one", tmp_path / "two")


def test_what_does_not_span_all_processes_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UsageError, match=r"rules='tp': expected fsdp or ddp"):
        Devices({"fsdp": 8}, "tp").join({})
    monkeypatch.setattr("jax.process_count", lambda: 2)
    with pytest.raises(UsageError, match=r"no mesh: there are 2 .* What to do: --mesh fsdp=-1"):
        Devices().join({})
    with pytest.raises(UsageError, match=r"^sample is for one process, .*: there are 2. What"):
        generation.sample(
            runs.Given(Path("absent")), generation.Sources(), None, Path("absent"), count=1
        )
