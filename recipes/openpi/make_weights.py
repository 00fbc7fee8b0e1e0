"""A folder with a policy of random weights, and all that serving it reads."""

from pathlib import Path

from recipes.openpi.config import config_of
from recipes.openpi.dataset import Demonstrations, LeRobot
from recipes.openpi.make_data import PROMPTS
from recipes.openpi.robots import robot_of
from recipes.openpi.statistics import NormStats, write_stats
from recipes.openpi.tokens import write_small_tokenizer
from recipes.openpi.weights import random_weights, write_weights


def make_folder(
    out: Path, size: str, *, data: Path | None = None, robot: str = "libero", seed: int = 0
) -> int:
    """Write weights, sizes, a small tokenizer and norm stats.

    Args:
        out: Folder to write to.
        size: One of `config.SIZES`.
        data: Dataset for the norm stats; without one they change nothing.
        robot: Robot of the norm stats.
        seed: Random seed of the weights.

    Returns:
        The number of parameters.
    """
    config = config_of(size)
    policy = random_weights(config, seed)
    write_weights(out, policy)
    write_small_tokenizer(out, PROMPTS, min(config.vocab_size, 512))
    known = robot_of(robot)
    if data is None:
        stats = {"state": _unit(known.state_dim), "actions": _unit(known.action_dim)}
    else:
        stats = Demonstrations(LeRobot(data), known, config.action_horizon).stats()
    write_stats(out / "assets" / robot, stats)
    return sum(parameter.numel() for parameter in policy.parameters())


def _unit(dim: int) -> NormStats:
    return NormStats([0.0] * dim, [1.0] * dim, [-1.0] * dim, [1.0] * dim)
