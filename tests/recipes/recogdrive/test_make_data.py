"""The small data has the real formats, and stays in the planner's range."""

import numpy as np
import pytest
import torch

from recipes.recogdrive import make_data
from recipes.recogdrive.diffusion import normalise
from recipes.recogdrive.layouts import CacheDataset


def test_every_pose_is_in_the_range_that_the_planner_knows():
    scenes = make_data.make_scenes(500)
    poses = normalise(torch.stack([scene.trajectory() for scene in scenes]))
    assert poses.abs().max() <= 1
    assert poses.abs().max() > 0.8
    assert {scene.command for scene in scenes} == {0, 1, 2}
    assert len({scene.token for scene in scenes}) == 500


def test_the_poses_are_those_of_small_steps_along_the_arc():
    scene = make_data.Scene("log", "0" * 16, 8.0, -0.5, 0.015)
    time, x, y = np.linspace(0, 4, 40_001), 0.0, 0.0
    way = 8.0 * time - 0.25 * time**2
    heading = 0.015 * way
    x, y = (np.sum(f(heading[:-1]) * np.diff(way)) for f in (np.cos, np.sin))
    np.testing.assert_allclose(scene.trajectory()[-1], [x, y, heading[-1]], atol=1e-3)
    np.testing.assert_allclose(scene.features()["history_trajectory"][-1], 0)
    straight = make_data.Scene("log", "0" * 16, 8.0, 0.0, 0.0)
    np.testing.assert_allclose(straight.trajectory()[:, 0], np.arange(1, 9) * 4.0)


@pytest.mark.parametrize("layout", ["upstream", "safetensors"])
def test_a_cache_is_the_same_for_the_same_seed(tmp_path, layout):
    for root in ("a", "b"):
        make_data.make_cache(tmp_path / root, count=4, layout=layout)
    make_data.make_cache(tmp_path / "c", count=4, layout=layout, seed=1)
    one, same, other = (CacheDataset(tmp_path / root) for root in "abc")
    assert one.tokens == same.tokens != other.tokens
    for a, b in zip(one, same, strict=True):  # pyright: ignore[reportArgumentType]
        assert all(torch.equal(a[n], b[n]) for n in a if n != "token")
    shapes = {name: tuple(t.shape) for name, t in one[0].items() if name != "token"}
    assert shapes == {
        "history_trajectory": (4, 3),
        "high_command_one_hot": (4,),
        "status_feature": (8,),
        "last_hidden_state": (16, 64),
        "trajectory": (8, 3),
    }
