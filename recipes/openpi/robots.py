"""The robots that openpi knows: what their observations are called, and what their actions mean.

A robot's observation has the form in which openpi-client sends it. `DATASETS` says which features
of a LeRobot dataset hold the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.openpi.config import CAMERAS
from tpuport.foundation.errors import UsageError

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Observed:
    """An observation of any robot: pictures by camera, None for those that it lacks, and state."""

    images: dict[str, NDArray[np.uint8] | None]
    state: Floats


@dataclass(frozen=True)
class Robot:
    """A robot, as a policy sees it.

    Attributes:
        name: Its name here.
        state_dim: Numbers of a state.
        action_dim: Numbers of an action.
        cameras: Path of the picture in an observation, by camera of the policy.
        state: Path of the state in an observation.
        features: Features of a dataset, by path in an observation; "actions" too.
        delta: Which numbers of an action the policy gives relative to the state.
        flips: Signs of the joints of a robot with Aloha's grippers, whose conventions differ from
            the policy's; empty for others.
    """

    name: str
    state_dim: int
    action_dim: int
    cameras: Mapping[str, str]
    state: str
    features: Mapping[str, str]
    delta: tuple[bool, ...] = ()
    flips: tuple[int, ...] = ()

    def observed(self, observation: Mapping[str, Any]) -> Observed:
        """Read an observation, as a client sends it or `dataset.LeRobot` reads it.

        Raises:
            UsageError: A part is missing, or is no picture or state of this robot.
        """
        images: dict[str, NDArray[np.uint8] | None] = dict.fromkeys(CAMERAS)
        for camera, path in self.cameras.items():
            found = _at(observation, path)
            if found is None and camera == CAMERAS[0]:
                raise UsageError(f"observation[{path!r}] is missing: a {self.name} has it")
            images[camera] = None if found is None else _picture(found, path)
        state = _at(observation, self.state)
        if state is None or np.shape(state) != (self.state_dim,):
            raise UsageError(
                f"observation[{self.state!r}]: expected {self.state_dim} numbers, got"
                f" {'none' if state is None else np.shape(state)}"
            )
        return Observed(images, self.state_in(state))

    def state_in(self, state: Any) -> Floats:
        """Return a recorded state in the policy's conventions."""
        made = _numbers(state, self.state)
        if self.flips:
            made = made * np.array(self.flips, np.float32)
            made[list(_GRIPPERS)] = _gripper_state_in(made[list(_GRIPPERS)])
        return made

    def actions_in(self, actions: Any, state: Floats) -> Floats:
        """Return recorded actions (horizon, action dim) in the policy's conventions."""
        made = _numbers(actions, "actions")
        if self.flips:
            made = made * np.array(self.flips, np.float32)
            made[:, list(_GRIPPERS)] = _gripper_action_in(made[:, list(_GRIPPERS)])
        return made - self._offset(state)

    def actions_out(self, actions: Floats, state: Floats) -> Floats:
        """Return a policy's actions (horizon, any) in the robot's conventions."""
        made = actions[:, : self.action_dim] + self._offset(state)
        if self.flips:
            made = made * np.array(self.flips, np.float32)
            made[:, list(_GRIPPERS)] = _gripper_action_out(made[:, list(_GRIPPERS)])
        return made.astype(np.float32)

    def _offset(self, state: Floats) -> Floats:
        moved = np.zeros(self.action_dim, np.float32)
        mask = np.array(self.delta, bool)
        moved[: len(mask)] = np.where(mask, state[: len(mask)], 0)
        return moved


def _at(observation: Mapping[str, Any], path: str) -> Any:
    """Return what is at a path of nested dicts, whose keys may have slashes, or None."""
    if path in observation:
        return observation[path]
    first, _, rest = path.partition("/")
    inner = observation.get(first)
    return _at(inner, rest) if rest and isinstance(inner, Mapping) else None


def _numbers(value: Any, path: str) -> Floats:
    try:
        made = np.array(value, np.float32)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path}: expected numbers, got {type(value).__name__}") from error
    if not np.isfinite(made).all():
        raise UsageError(f"{path}: a number is not finite")
    return made


def _picture(value: Any, path: str) -> NDArray[np.uint8]:
    """Return a picture (height, width, 3) of bytes, from floats in [0, 1] or channels first, too.

    Raises:
        UsageError: It is no picture.
    """
    image = np.asarray(value)
    if image.ndim == 3 and image.shape[0] == 3 and image.shape[-1] != 3:
        image = image.transpose(1, 2, 0)
    if image.ndim != 3 or image.shape[-1] != 3 or 0 in image.shape:
        raise UsageError(f"{path}: expected a picture (height, width, 3), got {image.shape}")
    if image.dtype.kind == "f":
        image = (255 * np.nan_to_num(image).clip(0, 1)).astype(np.uint8)
    if image.dtype != np.uint8:
        raise UsageError(f"{path}: expected bytes or numbers in [0, 1], got {image.dtype}")
    return image


# -- the grippers of Aloha ---------------------------------------------------------------------

_GRIPPERS = (6, 13)
_JOINTS = (1, -1, -1, 1, 1, 1, 1)
# Limits of the puppet's gripper, in metres and in radians; the range of π0's own robot, in radians.
_OPEN = (0.01844, 0.05800)
_PUPPET = (-0.6213, 1.4910)
_OWN = (0.5476, 1.6296)
_ARM, _HORN = 0.036, 0.022  # lengths of the gripper's linkage, in metres


def _scaled(x: Any, low: float, high: float) -> Any:
    return (x - low) / (high - low)


def _unscaled(x: Any, low: float, high: float) -> Any:
    return x * (high - low) + low


def _gripper_state_in(x: Any) -> Any:
    """Turn an opening in [0, 1] of Aloha, which is linear, into π0's, which is an angle."""
    opening = _unscaled(x, *_OPEN)
    sine = (_HORN**2 + opening**2 - _ARM**2) / (2 * _HORN * opening)
    return _scaled(np.arcsin(np.clip(sine, -1, 1)), *_OWN)


def _gripper_action_out(x: Any) -> Any:
    return _scaled(x + _OWN[0], *_PUPPET)


def _gripper_action_in(x: Any) -> Any:
    return _unscaled(x, *_PUPPET) - _OWN[0]


_ALOHA_DELTA = (True,) * 6 + (False,)
ROBOTS = {
    "libero": Robot(
        name="libero",
        state_dim=8,
        action_dim=7,
        cameras={CAMERAS[0]: "observation/image", CAMERAS[1]: "observation/wrist_image"},
        state="observation/state",
        features={
            "observation/image": "image",
            "observation/wrist_image": "wrist_image",
            "observation/state": "state",
            "actions": "actions",
        },
    ),
    "aloha": Robot(
        name="aloha",
        state_dim=14,
        action_dim=14,
        cameras={
            CAMERAS[0]: "images/cam_high",
            CAMERAS[1]: "images/cam_left_wrist",
            CAMERAS[2]: "images/cam_right_wrist",
        },
        state="state",
        features={
            "images/cam_high": "observation.images.top",
            "state": "observation.state",
            "actions": "action",
        },
        delta=_ALOHA_DELTA * 2,
        flips=_JOINTS * 2,
    ),
}
# Aloha in simulation has the conventions of its files.
ROBOTS["aloha_sim"] = Robot(**{**vars(ROBOTS["aloha"]), "name": "aloha_sim", "flips": ()})


def robot_of(name: str) -> Robot:
    """Return a robot by name.

    Raises:
        UsageError: There is no such robot.
    """
    if name not in ROBOTS:
        raise UsageError(f"robot={name!r}: expected one of {', '.join(ROBOTS)}")
    return ROBOTS[name]
