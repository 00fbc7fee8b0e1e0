"""LeRobot datasets as the recipe writes and reads them, statistics, and robots."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.openpi.config import CAMERAS
from recipes.openpi.dataset import Demonstrations, LeRobot, Samples
from recipes.openpi.inputs import Preparation, resized
from recipes.openpi.robots import ROBOTS, robot_of
from recipes.openpi.statistics import NormStats, read_stats
from recipes.openpi.tokens import read_prompts
from tests.recipes.openpi.small import SERVED
from tpuport.foundation.errors import UsageError


def preparation(made: Path, kind: str = "pi0") -> Preparation:
    config = SERVED[kind]
    folder = made / kind
    return Preparation(config, robot_of("libero"), read_stats(folder), read_prompts(folder, config))


def test_a_dataset_has_lerobots_files(made: Path):
    info = json.loads((made / "data/meta/info.json").read_text())
    assert (info["codebase_version"], info["total_frames"]) == ("v2.1", 36)
    table = pytest.importorskip("pyarrow.parquet").read_table(
        made / "data" / info["data_path"].format(episode_chunk=0, episode_index=1)
    )
    assert table["index"].to_pylist() == list(range(12, 24))
    kept = {name for name, one in info["features"].items() if one["dtype"] != "video"}
    assert set(table.column_names) == kept
    video = info["video_path"].format(episode_chunk=0, episode_index=2, video_key="image")
    assert (made / "data" / video).is_file()
    lines = (made / "data/meta/episodes_stats.jsonl").read_text().splitlines()
    assert np.shape(json.loads(lines[0])["stats"]["image"]["mean"]) == (3, 1, 1)


def test_demonstrations_are_what_was_drawn(made: Path):
    from recipes.openpi.make_data import make_scenes

    found = Demonstrations(LeRobot(made / "data"), robot_of("libero"), 4)
    scene = make_scenes(3)[1]
    arms = [arm for arm, _ in scene.demonstrate(12)]
    item = found[12 + 11]
    drawn = scene.draw(arms[11], wrist=False)
    assert np.abs(item["observation/image"].astype(int) - drawn).mean() < 4  # the video is lossy
    np.testing.assert_allclose(item["observation/state"][:2], arms[11], atol=1e-6)
    assert item["prompt"] == "move to the blue disk"
    # Behind an episode's end its last action is repeated.
    assert (item["actions"] == item["actions"][0]).all()
    first = found[12]
    moves = np.stack([move for _, move in scene.demonstrate(12)][:4])
    np.testing.assert_allclose(first["actions"][:, :2], moves, atol=1e-6)


def test_samples_survive_a_worker_process(made: Path):
    found = Demonstrations(LeRobot(made / "data"), robot_of("libero"), 4)
    samples = Samples(found, preparation(made))
    again = pickle.loads(pickle.dumps(found))
    np.testing.assert_array_equal(again[3]["observation/image"], found[3]["observation/image"])
    one = samples[0]
    assert one["images"].shape == (3, 28, 28, 3)
    assert one["image_masks"].tolist() == [True, True, False]
    assert one["tokens"].shape == (48,)
    assert one["actions"].shape == (4, 8)
    assert one["actions"][:, 7].abs().max() == 0
    assert one["actions"].dtype == torch.float32


@pytest.mark.parametrize("quantiles", [False, True])
def test_normalised_vectors_come_back(quantiles: bool):
    x = np.random.default_rng(0).normal(3, 2, (500, 4))
    stats = NormStats.of(x)
    normal = stats.normalize(x, quantiles=quantiles)
    wide = np.pad(normal, ((0, 0), (0, 2)))
    back = stats.unnormalize(wide, quantiles=quantiles)
    np.testing.assert_allclose(back[:, :4], x, atol=1e-5)
    assert (back[:, 4:] == 0).all()
    if quantiles:
        inside = (np.abs(normal) <= 1).mean()
        assert inside == pytest.approx(0.98, abs=0.005)
    else:
        np.testing.assert_allclose(normal.std(0), 1, atol=1e-4)


def test_states_of_pi05_are_words_of_the_prompt(made: Path):
    prompts = preparation(made, "pi05").prompts
    tokens = prompts.encode("lift_it\n", np.array([-1.0, 0.0, 0.999, 7.0]))
    text = prompts.tokenizer.decode(tokens, skip_special_tokens=True)
    assert text == "Task: lift it, State: 0 128 255 255;\nAction: "
    assert tokens[0] == prompts.begin
    plain = preparation(made).prompts
    assert plain.tokenizer.decode(plain.encode("lift it")[1:]) == "lift it\n"
    with pytest.raises(UsageError, match=r"a prompt of .* tokens, and the policy takes 48"):
        plain.encode("x y z " * 40)
    with pytest.raises(UsageError, match="a prompt of 10000000 characters"):
        plain.encode("x" * 10**7)


def test_pictures_keep_their_proportions():
    wide = np.full((10, 20, 3), 255, np.uint8)
    made = resized(wide, 8)
    assert made.shape == (8, 8, 3)
    assert (made[2:6] == 255).all()
    assert (made[:2] == 0).all()
    assert (made[6:] == 0).all()


@pytest.mark.parametrize("name", ROBOTS)
def test_actions_come_back(name: str):
    robot = robot_of(name)
    generator = np.random.default_rng(0)
    state = generator.normal(size=robot.state_dim).astype(np.float32)
    actions = generator.normal(size=(5, robot.action_dim)).astype(np.float32)
    inside = robot.actions_in(actions, state)
    np.testing.assert_allclose(robot.actions_out(inside, state), actions, atol=1e-5)
    if name == "aloha_sim":
        np.testing.assert_allclose(inside[:, 0], actions[:, 0] - state[0], atol=1e-6)
        np.testing.assert_allclose(inside[:, 6], actions[:, 6], atol=1e-6)


def test_alohas_gripper_is_an_angle():
    """By the linkage's law of sines, openings of 0 and 1 are these numbers."""
    state = np.zeros(14, np.float32)
    state[13] = 1.0
    image = np.zeros((3, 9, 9), np.uint8)
    found = robot_of("aloha").observed({"state": state, "images": {"cam_high": image}})
    for opening, number in ((0.01844, found.state[6]), (0.058, found.state[13])):
        sine = (0.022**2 + opening**2 - 0.036**2) / (2 * 0.022 * opening)
        angle = np.arcsin(np.clip(sine, -1, 1))
        assert number == pytest.approx((angle - 0.5476) / (1.6296 - 0.5476), abs=1e-5)
    assert [one is None for one in (found.images[name] for name in CAMERAS)] == [False, True, True]
    assert found.images[CAMERAS[0]].shape == (9, 9, 3)


BAD = {
    "a picture is missing": ({"observation/image": None}, "image.*is missing"),
    "a flat picture": ({"observation/image": np.zeros((4, 4))}, "expected a picture"),
    "whole numbers": ({"observation/image": np.zeros((4, 4, 3), int)}, "expected bytes"),
    "a short state": ({"observation/state": np.zeros(3)}, "expected 8 numbers, got"),
    "a state of words": ({"observation/state": np.array(["a"] * 8)}, "expected numbers"),
    "no number": ({"observation/state": np.full(8, np.nan)}, "not finite"),
    "no prompt": ({"prompt": None}, "prompt: expected a text"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_with_an_observation_is_named(case: str, made: Path):
    change, message = BAD[case]
    given = {
        "observation/image": np.zeros((4, 4, 3), np.uint8),
        "observation/wrist_image": np.zeros((4, 4, 3), np.uint8),
        "observation/state": np.zeros(8),
        "prompt": "go",
    }
    preparation(made).observation(given)
    with pytest.raises(UsageError, match=message):
        preparation(made).observation({**given, **change})


def test_folders_that_are_no_dataset_are_named(made: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="no LeRobot dataset"):
        LeRobot(tmp_path)
    with pytest.raises(UsageError, match=r"lacks the features observation\.images\.top"):
        Demonstrations(LeRobot(made / "data"), robot_of("aloha"), 4)
    with pytest.raises(UsageError, match=r"0 norm_stats\.json"):
        read_stats(tmp_path)
