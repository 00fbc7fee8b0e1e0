"""From a robot's observations to a policy's batches, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recipes.openpi.config import CAMERAS, Config
from recipes.openpi.robots import Robot
from recipes.openpi.statistics import Stats
from recipes.openpi.tokens import Prompts, padded
from tpuport.foundation.errors import UsageError

Floats = NDArray[np.float32]


def resized(image: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Return a picture as a square, whole and in its proportions, with black beside it."""
    from PIL import Image

    height, width = image.shape[:2]
    if (height, width) == (side, side):
        return image
    ratio = max(height, width) / side
    size = max(1, int(width / ratio)), max(1, int(height / ratio))
    made = np.zeros((side, side, 3), np.uint8)
    top, left = (side - size[1]) // 2, (side - size[0]) // 2
    scaled = Image.fromarray(image).resize(size, Image.Resampling.BILINEAR)
    made[top : top + size[1], left : left + size[0]] = np.asarray(scaled)
    return made


@dataclass(frozen=True)
class Prepared:
    """One observation in a policy's form: see `model.Pi0`, without padding of its tokens.

    Attributes:
        images: (cameras, side, side, 3).
        image_masks: (cameras,).
        tokens: Tokens of the prompt.
        state: Normalised and padded (action dim,).
        raw_state: In the policy's conventions, not normalised: actions may be relative to it.
    """

    images: NDArray[np.uint8]
    image_masks: NDArray[np.bool_]
    tokens: list[int]
    state: Floats
    raw_state: Floats


@dataclass(frozen=True)
class Preparation:
    """What turns a robot's observations into a policy's, and its actions into the robot's."""

    config: Config
    robot: Robot
    stats: Stats
    prompts: Prompts

    def __post_init__(self) -> None:
        if max(self.robot.state_dim, self.robot.action_dim) > self.config.action_dim:
            raise UsageError(
                f"a {self.robot.name} has {self.robot.state_dim} numbers of state, and the policy"
                f" takes {self.config.action_dim}"
            )

    def observation(self, given: Mapping[str, Any], prompt: str | None = None) -> Prepared:
        """Prepare an observation.

        Args:
            given: The observation, with its `prompt`.
            prompt: Prompt of an observation that has none.

        Raises:
            UsageError: A part is missing, or is not what the policy takes.
        """
        observed = self.robot.observed(given)
        text = given.get("prompt", prompt)
        text = text.item() if isinstance(text, np.ndarray) and text.ndim == 0 else text
        if not isinstance(text, str):
            raise UsageError(f"prompt: expected a text, got {type(text).__name__}")
        side = self.config.vision.image_size
        black = np.zeros((side, side, 3), np.uint8)
        images = [observed.images[name] for name in CAMERAS]
        state = self.stats["state"].normalize(observed.state, quantiles=self.config.pi05)
        return Prepared(
            np.stack([black if one is None else resized(one, side) for one in images]),
            np.array([one is not None for one in images]),
            self.prompts.encode(text, state),
            self._wide(state),
            observed.state,
        )

    def actions_in(self, actions: NDArray[Any], state: Floats) -> Floats:
        """Normalise and pad recorded actions (horizon, action dim)."""
        made = self.robot.actions_in(actions, state)
        return self._wide(self.stats["actions"].normalize(made, quantiles=self.config.pi05))

    def actions_out(self, actions: Floats, state: Floats) -> Floats:
        """Return a policy's actions as the robot's."""
        made = self.stats["actions"].unnormalize(actions, quantiles=self.config.pi05)
        return self.robot.actions_out(made, state)

    def _wide(self, x: Floats) -> Floats:
        missing = self.config.action_dim - x.shape[-1]
        return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]).astype(np.float32)


def stacked(prepared: Sequence[Prepared], length: int) -> dict[str, torch.Tensor]:
    """Return observations as a batch whose prompts are padded to a length."""
    pairs = [padded(one.tokens, length) for one in prepared]
    return {
        "images": torch.from_numpy(np.stack([one.images for one in prepared])),
        "image_masks": torch.from_numpy(np.stack([one.image_masks for one in prepared])),
        "tokens": torch.from_numpy(np.stack([tokens for tokens, _ in pairs])),
        "token_mask": torch.from_numpy(np.stack([mask for _, mask in pairs])),
        "state": torch.from_numpy(np.stack([one.state for one in prepared])),
    }
