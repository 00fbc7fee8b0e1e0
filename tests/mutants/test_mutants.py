"""Faults put into the package, each found by tests that `make test` runs."""

import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MUTANTS = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text())["mutant"]
_COPIED = ("tpuport", "tests", "recipes", "benchmarks", "pyproject.toml", "README.md", "docs")
_FAILED = 1  # pytest's exit code: tests ran, and some failed


def test_each_mutant_changes_one_place() -> None:
    for mutant in MUTANTS:
        text = (ROOT / mutant["file"]).read_text()
        assert text.count(mutant["old"]) == 1, mutant["fault"]
        assert mutant["new"] not in text, mutant["fault"]
        for path in _paths(mutant):
            assert (ROOT / path).exists(), mutant["fault"]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a copy of the package and of what its tests read."""
    made = tmp_path_factory.mktemp("mutants")
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, made / name, ignore=ignored)
        else:
            shutil.copy(source, made / name)
    yield made
    shutil.rmtree(made)


@pytest.mark.slow  # a process for each; the list itself is checked above
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m["fault"].replace(" ", "_"))
def test_mutant_is_found(mutant: dict[str, str], copy: Path) -> None:
    path = copy / mutant["file"]
    original = path.read_text()
    path.write_text(original.replace(mutant["old"], mutant["new"]))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header"]
    command += ["-m", "not slow and not covered"]  # as make test does
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ran = subprocess.run(
            [*command, *shlex.split(mutant["tests"])],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
    finally:
        path.write_text(original)
    assert ran.returncode == _FAILED, ran.stdout[-3000:]


def _paths(mutant: dict[str, str]) -> list[str]:
    return [word for word in shlex.split(mutant["tests"]) if word.startswith("tests/")]
