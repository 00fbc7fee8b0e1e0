"""Each command, ended by SIGKILL in the middle, goes on to the same bits.

test_robustness.py ends them by an exception in this process, and test_stage2_commands.py kills the
training of stage 2.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import tpuport
from recipes.mae_dit import generation, measures, runs
from recipes.mae_dit.__main__ import app
from recipes.mae_dit.make_data import make_data
from recipes.mae_dit.weights import MODEL
from tests.recipes.killing import cached_in, kill_when
from tests.recipes.mae_dit import conftest
from tests.recipes.mae_dit.eager import Small, seeded_features
from tests.recipes.mae_dit.test_robustness import contents
from tests.recipes.mae_dit.tiny import Difference, Means, write

pytestmark = pytest.mark.slow

# Reads and writes slowly, so that it is not through before it is killed, and says that it reads.
SCRIPT = """
import pathlib, sys, time
from recipes.mae_dit import data, generation, make_data, measures, runs
from recipes.mae_dit.__main__ import app
from recipes.mae_dit.stage2.sampling import Sampler
from tests.recipes.mae_dit.eager import seeded_features
from tests.recipes.mae_dit.tiny import Difference, Means

mark = pathlib.Path(sys.argv.pop(1))

def slow(owner, name, seconds):
    function = getattr(owner, name)
    def call(*given, **more):
        mark.touch()
        time.sleep(seconds)
        return function(*given, **more)
    setattr(owner, name, call)

slow(data.Pictures, "__getitem__", 0.2)
slow(Sampler, "batch", 0.5)
slow(make_data, "replacing_file", 0.1)
generation._ROWS = 4
runs.load_lpips = lambda *_, **__: seeded_features()
measures.load_inception = lambda *_, **__: Means().eval()
measures.load_lpips = lambda *_, **__: Difference().eval()
app()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("killed")
    make_data(folder / "data", count=12, size=20)
    write(folder)
    sections = conftest.sections()
    sections["arch"]["stage_1"] = {"target": f"{Small.__module__}.Small"}
    (folder / "stage1.yaml").write_text(yaml.safe_dump(sections))
    with tpuport.compile_cache(folder / "programs", min_compile_seconds=0.0):
        yield folder


@pytest.fixture(autouse=True)
def _small_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_ROWS", 4)
    monkeypatch.setattr(runs, "load_lpips", lambda *_, **__: seeded_features())
    monkeypatch.setattr(measures, "load_inception", lambda *_, **__: Means().eval())
    monkeypatch.setattr(measures, "load_lpips", lambda *_, **__: Difference().eval())


def run(*given: str) -> None:
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output


def kill(folder: Path, mark: Path, ready: Callable[[], bool], *given: str) -> None:
    # A copy: what is killed may leave half a program, which jax warns of and compiles anew.
    programs = mark.with_suffix(".programs")
    if (folder / "programs").is_dir():
        shutil.copytree(folder / "programs", programs)
    kill_when(
        ready,
        *("-W", "ignore", "-c", SCRIPT, str(mark), *given),
        **cached_in(programs),
    )


def test_make_data(folder: Path, tmp_path: Path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    given = ["--count", "20", "--size", "16"]
    mark = tmp_path / "mark"
    kill(folder, mark, lambda: len([*out.rglob("*.JPEG")]) > 3, "make-data", str(out), *given)
    begun = {name: one for name, one in contents(out).items() if ".tmp-" not in name}
    assert len(begun) < 25
    run("make-data", str(whole), *given)
    assert all(contents(whole)[name] == content for name, content in begun.items())
    run("make-data", str(out), *given)
    found = {name: one for name, one in contents(out).items() if ".tmp-" not in name}
    assert found == contents(whole)


def test_stage1(folder: Path, tmp_path: Path):
    given = ["stage1", str(folder / "stage1.yaml"), "--data", str(folder / "data")]
    whole, out = tmp_path / "whole", tmp_path / "out"
    run(*given, "-o", str(whole))

    def has_state() -> bool:
        return any(one.name.isdigit() for one in out.glob("states/*"))

    kill(folder, tmp_path / "mark", has_state, *given, "-o", str(out))
    assert not (out / MODEL).exists()
    run(*given, "-o", str(out))
    assert (out / MODEL).read_bytes() == (whole / MODEL).read_bytes()


@pytest.mark.parametrize("command", ["stats", "reconstruct", "evaluate"])
def test_a_pass(folder: Path, tmp_path: Path, command: str):
    """Of one pass over the images nothing is left but whole files."""
    suffix = {"stats": "npz", "reconstruct": "png", "evaluate": "json"}[command]
    out, whole = tmp_path / f"out.{suffix}", tmp_path / f"whole.{suffix}"
    stage1 = ["--stage1" if command == "evaluate" else "--run", str(folder / "stage1")]
    given = [command, str(folder / "stage2.yaml"), "--data", str(folder / "data"), *stage1]
    run(*given, "-o", str(whole))
    mark = tmp_path / "mark"
    kill(folder, mark, mark.exists, *given, "-o", str(out))
    assert not out.exists()
    run(*given, "-o", str(out))
    if command == "stats":
        with np.load(out) as a, np.load(whole) as b:
            assert all(np.array_equal(a[name], b[name]) for name in b.files)
    else:
        assert out.read_bytes() == whole.read_bytes()
    if command == "evaluate":
        assert json.loads(out.read_text())["PSNR"] > 0


def test_cache(folder: Path, tmp_path: Path):
    given = ["cache", str(folder / "stage2.yaml"), "--data", str(folder / "data")]
    given += ["--stage1", str(folder / "stage1")]
    whole, out = tmp_path / "whole", tmp_path / "out"
    run(*given, "-o", str(whole))
    first = out / "000000.safetensors"
    kill(folder, tmp_path / "mark", first.is_file, *given, "-o", str(out))
    assert not (out / "index.json").exists()
    written = first.stat().st_mtime_ns
    run(*given, "-o", str(out))
    assert first.stat().st_mtime_ns == written
    found = {name: one for name, one in contents(out).items() if ".tmp-" not in name}
    assert found == contents(whole)


def test_sample(folder: Path, tmp_path: Path):
    given = ["sample", str(folder / "stage2.yaml"), "--stage1", str(folder / "stage1")]
    given += ["--untrained", "--count", "22"]
    whole, out = tmp_path / "whole", tmp_path / "out"
    run(*given, "-o", str(whole))
    first = out / "parts" / "000000.npz"
    kill(folder, tmp_path / "mark", first.is_file, *given, "-o", str(out))
    assert not (out / "samples.npz").exists()
    run(*given, "-o", str(out))
    with np.load(out / "samples.npz") as a, np.load(whole / "samples.npz") as b:
        assert all(np.array_equal(a[name], b[name]) for name in b.files)
    assert (out / "grid.png").read_bytes() == (whole / "grid.png").read_bytes()
