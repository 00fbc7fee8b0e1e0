"""The recipe's command line."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from recipes.openpi.__main__ import COMMANDS, app


def ran(*given: Any) -> Any:
    return CliRunner().invoke(app, list(map(str, given)))


def test_every_command_has_help():
    listed = ran("--help").output
    for name in COMMANDS:
        assert name in listed
        assert ran(name, "--help").exit_code == 0


def test_weights_are_made_and_wrong_arguments_are_named(tmp_path: Path):
    made = ran("make-weights", tmp_path / "arm", "--robot", "aloha_sim", "--size", "tiny-pi05")
    assert made.exit_code == 0, made.output
    names = {path.name for path in (tmp_path / "arm").iterdir()}
    assert names == {"assets", "config.json", "model.safetensors", "tokenizer.json"}
    found = ran("finetune", tmp_path, "--policy", tmp_path / "arm", "--out", tmp_path / "run")
    assert found.exit_code == 2
    assert "no LeRobot dataset" in " ".join(found.output.split())


def test_a_dataset_is_made(tmp_path: Path):
    pytest.importorskip("pyarrow")
    made = ran("make-data", tmp_path / "data", "--episodes", 1, "--frames", 2)
    assert (made.exit_code, "2 frames of 1 episodes" in made.output) == (0, True), made.output
