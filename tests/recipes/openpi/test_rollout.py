"""A policy in closed loop: with a small environment of the test, and with MuJoCo if it is there."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.openpi.rollout import client_of, rollout, simulator
from recipes.openpi.wire import pack, unpack
from tpuport.foundation.errors import UsageError


class Steady:
    """Answers with a chunk whose rows count up, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def infer(self, obs: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(unpack(pack(obs)))
        return {"actions": np.arange(5)[:, None] * 0.01 + np.zeros((5, 14))}


class Counting:
    """An environment that ends after seven steps and rewards the third with 2."""

    def __init__(self) -> None:
        self.actions: list[float] = []

    def _seen(self) -> dict[str, Any]:
        picture = np.full((48, 64, 3), 30 * len(self.actions), np.uint8)
        return {"pixels": {"top": picture}, "agent_pos": np.full(14, float(len(self.actions)))}

    def reset(self, *, seed: int) -> Any:
        del seed
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.actions.append(float(action[0]))
        count = len(self.actions)
        return self._seen(), 2.0 if count == 3 else 0.0, count == 7, False, {}


def test_a_policy_is_asked_again_after_some_actions(tmp_path: Path):
    pytest.importorskip("msgpack", reason="waits for msgpack, of extra [openpi]")
    av = pytest.importorskip("av")
    client, environment = Steady(), Counting()
    video = tmp_path / "episode.mp4"
    found = rollout(client, environment, prompt="go", replan=3, video=video)
    assert (found.steps, found.rewards, found.best, found.calls) == (7, 2.0, 2.0, 3)
    np.testing.assert_allclose(environment.actions, [0, 0.01, 0.02] * 2 + [0])
    assert [one["state"][0] for one in client.asked] == [0, 3, 6]
    assert client.asked[0]["images"]["cam_high"].shape == (3, 224, 224)
    with av.open(str(video)) as file:
        assert sum(1 for _ in file.decode(video=0)) == 7
    with pytest.raises(UsageError, match="replan=0"):
        rollout(client, environment, prompt="go", replan=0)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.setitem(sys.modules, "gym_aloha", None)
    with pytest.raises(UsageError, match="pip install gym-aloha"):
        simulator("AlohaTransferCube-v0")
    monkeypatch.setitem(sys.modules, "openpi_client.websocket_client_policy", None)
    with pytest.raises(UsageError, match="pip install --no-deps openpi-client"):
        client_of("127.0.0.1", 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ten_steps_in_mujoco():
    pytest.importorskip("gym_aloha", reason="waits for gym-aloha")
    client = Steady()
    found = rollout(client, simulator("AlohaTransferCube-v0"), prompt="go", steps=10, replan=5)
    assert (found.steps, found.calls) == (10, 2)
    first, second = (one["state"] for one in client.asked)
    assert np.abs(second - first).max() > 1e-3  # the arms have moved
    assert client.asked[0]["images"]["cam_high"].std() > 5
