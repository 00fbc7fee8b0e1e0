"""Whether the hub is asked for, and what the runs of a script get if it does not answer."""

import socket
from pathlib import Path

import pytest

from tpuport.repository.hub import why_unreachable
from tpuport.repository.runs import Workspace


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
