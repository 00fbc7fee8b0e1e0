"""What a release has: bounds of versions, recipes in the wheel, the files around the code."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.newer_versions import FREED, Tried, compared, failures, freed
from tpuport import loading
from tpuport.cli import recipe
from tpuport.cli.app import app
from tpuport.foundation import supported
from tpuport.foundation.supported import BOUNDS, UntestedVersionWarning, order, outside

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_bounds_are_the_same_everywhere() -> None:
    extra = {re.split(r"[<>=]", one)[0]: one for one in
             PROJECT["project"]["optional-dependencies"]["jax"]}  # fmt: skip
    page = (ROOT / "docs/compatibility.md").read_text()
    pins = (ROOT / "constraints.txt").read_text()
    for name, (lowest, limit) in BOUNDS.items():
        assert extra[name] == f"{name}>={lowest},<{limit}"
        assert re.search(
            rf"\| [^|]*{name}[^|]* \| {re.escape(lowest)} \| {re.escape(limit)} \|", page
        )
        pinned = re.search(rf"^{name}==(\S+)$", pins, re.MULTILINE)
        assert pinned
        assert outside(name, pinned[1]) == ""


@pytest.mark.parametrize(
    ("name", "version", "inside"),
    [
        ("torch", "2.13.0+cpu", True),
        ("torch", "2.13.9", True),
        ("torch", "2.14.0", False),
        ("torch", "2.14.0.dev20261101+cpu", False),
        ("torch", "2.12.1", False),
        ("torchax", "0.0.14", True),
        ("torchax", "0.0.14.dev20261025", False),
        ("torchax", "0.0.15", False),
        ("jax", "0.11", False),
        ("numpy", "9", True),
    ],
)
def test_versions_within_the_bounds(name: str, version: str, inside: bool) -> None:
    assert (outside(name, version) == "") is inside
    assert order("2.13") == order("2.13.0")


def test_the_first_use_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "9.0" if name == "jax" else real(name)
    )
    supported.warn_once.cache_clear()
    with pytest.warns(UntestedVersionWarning, match=r"jax 9\.0 is not tested.*below 0\.11") as seen:
        loading.load("to_torch")
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loading.load("to_numpy")
    monkeypatch.undo()
    supported.warn_once.cache_clear()


def test_recipes_from_a_clone_and_from_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = CliRunner().invoke(app, ["recipe"])
    assert listed.stdout.split() == [
        *("hunyuan_video", "mae_dit", "openpi", "openpilot", "recogdrive")
    ]
    assert CliRunner().invoke(app, ["recipe", "none"]).exit_code == 2
    bundled = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert bundled == {"recipes": "tpuport/bundled/recipes"}
    package = tmp_path / "tpuport"
    (package / "bundled" / "recipes").mkdir(parents=True)
    (package / "bundled" / "recipes" / "command_line.py").touch()
    monkeypatch.setattr(recipe, "__file__", str(package / "cli" / "recipe.py"))
    assert recipe.recipes_folder() == package / "bundled"


def test_a_recipe_runs_by_its_name() -> None:
    code = "from tpuport.cli.app import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", code, "recipe", "recogdrive", "--help"],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "make-data" in done.stdout


def test_the_version_is_that_of_the_tag() -> None:
    assert PROJECT["tool"]["hatch"]["version"]["source"] == "vcs"
    assert "version" not in PROJECT["project"]


def test_files_around_the_code() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    templates = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    forms = [yaml.safe_load(path.read_text()) for path in templates if path.stem != "config"]
    assert len(forms) == 2
    for form in forms:
        assert {"name", "description", "body"} <= form.keys()
        assert all({"type", "attributes"} <= one.keys() for one in form["body"])


def test_what_newer_versions_broke() -> None:
    pins = "# torch\ntorch==2.13.0\ntorchvision==1\njax==0.10.2\nnumpy==2\n"
    assert freed(pins) == "# torch\ntorchvision==1\nnumpy==2\n"
    output = "..F\nFAILED tests/a.py::test_x[1] - AssertionError: no\nERROR tests/b.py\n1 failed"
    assert failures(output) == {"tests/a.py::test_x[1]", "tests/b.py"}
    before = Tried({"jax": "0.10.2", "torch": "2.13.0"}, frozenset({"a", "b"}))
    after = Tried({"jax": "0.11.0", "torch": "2.13.0"}, frozenset({"b", "c"}))
    assert compared(before, after).splitlines() == [
        *("jax: 0.10.2 -> 0.11.0", "torch: 2.13.0", "broken: c", "mended: a")
    ]
    assert set(FREED) >= set(BOUNDS)


@pytest.mark.slow
def test_the_wheel_and_the_sdist(tmp_path: Path) -> None:
    """The tests above read what the build reads."""
    pytest.importorskip("build", reason="needs build: make dist installs it")
    pytest.importorskip("hatch_vcs", reason="needs hatch-vcs to build without a network")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    wheel, sdist = sorted(tmp_path.iterdir(), key=lambda path: path.suffix == ".gz")
    assert wheel.suffix == ".whl"
    import zipfile

    names = zipfile.ZipFile(wheel).namelist()
    assert "tpuport/bundled/recipes/recogdrive/__main__.py" in names
    assert "tpuport/bundled/recipes/openpilot/pretrained.safetensors" in names
    assert "tpuport/repository/templates/port.html.j2" in names
    assert sdist.name.removesuffix(".tar.gz") == "-".join(wheel.name.split("-")[:2])
