"""A project folder to lint in, and the command run in it."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tpuport.cli.app import app

BRANCH = """import torch


def forward(x: torch.Tensor):
    if x.sum() > 0:
        x = x + 1
    return x
"""


@pytest.fixture
def branch() -> str:
    """A file with one finding, a TPU101 in line 5 that can be fixed."""
    return BRANCH


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes files in an empty current folder: `project({"a.py": "text"})`."""
    # Configuration and .gitignore files above the folder of the tests are not the tests' business.
    root = tmp_path / "project"
    (root / ".git").mkdir(parents=True)
    monkeypatch.chdir(root)
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def make(files: Mapping[str, str | bytes] | None = None) -> Path:
        for name, content in (files or {}).items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return root

    return make


@pytest.fixture
def invoke() -> Callable[..., Any]:
    """Runs the command, in this process and with no second one."""

    def run(*arguments: str | os.PathLike[str], input: str | bytes | None = None) -> Any:
        given = [str(argument) for argument in arguments]
        if given[0] in ("lint", "rewrite"):
            given += ["--jobs", "1"]
        return CliRunner().invoke(app, given, input=input)

    return run
