"""Whether the hub is asked for, and what the runs of a script get if it does not answer."""

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tpuport.cli.app import app
from tpuport.repository.runs import Workspace
from tpuport.verify.hub import why_unreachable
from tpuport.verify.imports import packages_of


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    listening = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
    return listening


def test_a_hub_that_answers_changes_nothing(server: socket.socket) -> None:
    with server:
        assert why_unreachable(["torch", "diffusers"]) == ""


def test_a_hub_that_does_not_answer(server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    server.close()
    assert "127.0.0.1: Connection refused" in why_unreachable(["diffusers"])
    assert why_unreachable(["torch"]) == ""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert why_unreachable(["diffusers"]) == ""


def test_all_runs_get_the_same_and_the_report_says_so(tmp_path: Path) -> None:
    known = Workspace(tmp_path, tmp_path, tmp_path / "before.py", "no hub")
    assert known.environment()["HF_HUB_OFFLINE"] == "1"
    assert known.seen(tmp_path)["hub offline"] == [
        {"what": "no hub", "instead": "HF_HUB_OFFLINE=1"}
    ]
    other = Workspace(tmp_path, tmp_path, tmp_path / "before.py")
    assert "HF_HUB_OFFLINE" not in other.environment()
    assert other.seen(tmp_path)["hub offline"] == []


def test_verify_asks_once_and_says_so(
    server: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    server.close()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loading.py").write_text("import huggingface_hub.constants as hub\n")
    (tmp_path / "train.py").write_text("import loading\nprint(loading.hub.HF_HUB_OFFLINE)\n")
    done = CliRunner().invoke(app, ["verify", "train.py", "--json"])
    found = json.loads(done.stdout)
    why = "HF_HUB_OFFLINE=1, as the hub does not answer: 127.0.0.1"
    assert any(why in note for note in found["notes"])
    for side in ("eager", "ported"):
        lines = (tmp_path / "verify-train" / side / "output.txt").read_text().splitlines()
        assert lines[-1] == "True"


def test_packages_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "__init__.py").write_text("from . import two\n")
    (tmp_path / "one" / "two.py").write_text("import datasets.arrow, json\n")
    (tmp_path / "train.py").write_text("import one, torch.nn\nif x:\n    import timm\n")
    assert packages_of(tmp_path / "train.py") == {"datasets", "json", "torch"}
    (tmp_path / "one" / "two.py").write_text("import (\n")
    assert packages_of(tmp_path / "train.py") == {"torch"}
