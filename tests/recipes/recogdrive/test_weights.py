"""Planners from files say themselves what they are."""

import pytest
import torch

import tpuport
from recipes.recogdrive import plots, weights
from recipes.recogdrive.diffusion import SAMPLERS
from tests.recipes.recogdrive.small import CONFIG, small_planner
from tpuport.foundation.errors import CheckpointError, MissingExtraError


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_planner_comes_back_from_its_file(tmp_path, sampler):
    planner = small_planner(sampler)
    tpuport.save_checkpoint(tmp_path / "a.safetensors", planner.state_dict())
    found = weights.load_planner(tmp_path / "a.safetensors")
    assert found.config == CONFIG
    assert found.sampler == sampler
    for name, value in planner.state_dict().items():
        assert torch.equal(found.state_dict()[name], value)


def test_upstreams_checkpoints_of_stages_two_and_three_are_read(tmp_path):
    given = small_planner().state_dict()
    inside = {f"agent.action_head.{name}": value for name, value in given.items()}
    inside |= {f"agent.action_head.old_policy.{n}": v + 1 for n, v in given.items()}
    torch.save({"state_dict": {**inside, "agent.other": torch.zeros(1)}}, tmp_path / "a.ckpt")
    found = weights.read_weights(tmp_path / "a.ckpt")
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], value) for name, value in given.items())


def test_a_file_without_a_planner_is_named(tmp_path):
    path = tmp_path / "a.safetensors"
    tpuport.save_checkpoint(path, {"x": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"has no planner: expected 'his_traj_encoder"):
        weights.load_planner(path)
    half = {n: v for n, v in small_planner().state_dict().items() if "feature" not in n}
    tpuport.save_checkpoint(path, half)
    with pytest.raises(CheckpointError, match="does not hold all of a planner"):
        weights.load_planner(path)


def test_trajectories_are_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="waits for matplotlib")
    predicted, true = torch.randn(5, 8, 3), torch.randn(5, 8, 3)
    plots.plot_trajectories(tmp_path / "plots" / "a.png", predicted, true)
    plots.plot_trajectories(tmp_path / "plots" / "b.svg", predicted[:, None].repeat(1, 3, 1, 1))
    assert (tmp_path / "plots" / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "plots" / "b.svg").read_text()


def test_plots_need_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'needs matplotlib.*"tpuport\[docs\]"'):
        plots.plot_trajectories(tmp_path / "a.png", torch.zeros(1, 8, 3))
