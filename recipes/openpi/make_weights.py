"""A folder with a policy of random weights, and all that serving it reads."""

from pathlib import Path

from recipes.openpi.config import config_of
from recipes.openpi.dataset import Demonstrations, LeRobot
from recipes.openpi.make_data import PROMPTS
from recipes.openpi.robots import robot_of
from recipes.openpi.statistics import write_stats
from recipes.openpi.tokens import write_small_tokenizer
from recipes.openpi.weights import random_weights, write_weights


def make_folder(
    out: Path, size: str, *, data: Path | None = None, robot: str = "libero", seed: int = 0
) -> int:
    """Write weights, sizes, a small tokenizer and, with a dataset, its norm stats.

    Args:
        out: Folder to write to.
        size: One of `config.SIZES`.
        data: Dataset for the norm stats, without which the policy can be trained and not served.
        robot: Robot of the dataset.
        seed: Random seed of the weights.

    Returns:
        The number of parameters.
    """
    config = config_of(size)
    policy = random_weights(config, seed)
    write_weights(out, policy)
    write_small_tokenizer(out, PROMPTS, min(config.vocab_size, 512))
    if data is not None:
        found = Demonstrations(LeRobot(data), robot_of(robot), config.action_horizon)
        write_stats(out / "assets" / robot, found.stats())
    return sum(parameter.numel() for parameter in policy.parameters())
