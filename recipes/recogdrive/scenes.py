"""Moments of drives to cache: an image, the car's past motion, and its future path.

    {"log": "2021.05.12...", "token": "0a1b...", "image": "front.jpg", "history": [[x, y, heading]
     x 4], "command": [0, 1, 0, 0], "velocity": [x, y], "acceleration": [x, y],
     "trajectory": [[x, y, heading] x 8]}

one a line of a JSONL file. Poses are in metres and radians, seen from the car's present one, every
half second. The words of the prompt are those that ReCogDrive's weights (Apache licence 2.0) were
trained with: other words give other hidden states.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from tpuport.foundation.errors import UsageError

COMMANDS = ("turn left", "go straight", "turn right")  # the fourth is "unknown"
SYSTEM_MESSAGE = """
You are a vehicle trajectory prediction model for autonomous driving. Your task is to predict the ego vehicle's 4-second trajectory based on the following inputs: multi-view images from 8 cameras, ego vehicle states (position), and discrete navigation commands. The input provides a 2-second history, and your output should ensure a safe trajectory for the next 4 seconds. Your predictions must adhere to the following metrics:
1. **No at-fault Collisions (NC)**: Avoid collisions with other objects/vehicles.
2. **Drivable Area Compliance (DAC)**: Stay within the drivable area.
3. **Time to Collision (TTC)**: Maintain a safe distance from other vehicles.
4. **Ego Progress (EP)**: Ensure the ego vehicle moves forward without being stuck.
5. **Comfort (C)**: Avoid sharp turns and sudden decelerations.
6. **Driving Direction Compliance (DDC)**: Align with the intended driving direction.
For evaluation, use the **PDM Score**, which combines these metrics: **PDM Score** = NC * DAC * (5*TTC + 5*EP + 2*C + 0*DDC) / 12.
Your predictions will be evaluated through a non-reactive 4-second simulation with an LQR controller and background actors following their recorded trajectories. The better your predictions, the higher your score.
"""  # noqa: E501
ASKED = (
    "<image>\nAs an autonomous driving system, predict the vehicle's trajectory based on:\n"
    "1. Visual perception from front camera view\n"
    "2. Historical motion context (last 4 timesteps):{history}\n"
    "3. Active navigation command: [{command}]\n"
    "Output requirements:\n"
    "- Predict 8 future trajectory points\n"
    "- Each point format: (x:float, y:float, heading:float)\n"
    "- Use [PT, ...] to encapsulate the trajectory\n"
    "- Maintain numerical precision to 2 decimal places"
)
_SIZES = {
    "history": (4, 3),
    "command": (4,),
    "velocity": (2,),
    "acceleration": (2,),
    "trajectory": (8, 3),
}


@dataclass(frozen=True)
class Frame:
    """One moment of a drive, as the front camera saw it.

    Attributes:
        log: Name of the drive.
        token: Name of the moment.
        image: Path of the front camera's image.
        values: history (4, 3), command (4,), velocity (2,), acceleration (2,), trajectory (8, 3).
    """

    log: str
    token: str
    image: Path
    values: dict[str, torch.Tensor]

    def features(self) -> dict[str, torch.Tensor]:
        """Return what upstream caches besides the hidden states, in float32."""
        given = {name: value.float() for name, value in self.values.items()}
        command = given["command"]
        return {
            "history_trajectory": given["history"],
            "high_command_one_hot": command,
            "status_feature": torch.cat([command, given["velocity"], given["acceleration"]]),
        }

    def targets(self) -> dict[str, torch.Tensor]:
        """Return the targets that upstream caches: poses in float64."""
        return {"trajectory": self.values["trajectory"]}

    def question(self) -> str:
        """Return the question to the model."""
        steps = self.values["history"].float().tolist()
        history = " ".join(
            f"   - t-{3 - i}: ({', '.join(map(_number, step))})" for i, step in enumerate(steps)
        )
        chosen = [i for i, one in enumerate(self.values["command"].tolist()) if one == 1]
        known = bool(chosen) and chosen[0] < len(COMMANDS)
        command = COMMANDS[chosen[0]] if known else "unknown"
        return ASKED.format(history=history, command=command.upper())


def _number(value: float) -> str:
    """Format a number with a sign and two decimals, and values near zero as 0.0."""
    return f"{value:+.2f}" if abs(round(value, 2)) > 1e-2 else "0.0"


def read_scenes(path: str | Path, root: str | Path | None = None) -> list[Frame]:
    """Read the scenes of a JSONL file, in order.

    Args:
        path: The file.
        root: Folder that image paths are relative to; by default that of the file.

    Raises:
        UsageError: It is missing, a line has another format, or two lines have the same name.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file")
    root = path.parent if root is None else Path(root)
    scenes: dict[tuple[str, str], Frame] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        scene = _read(line, f"{path}:{number}", root)
        if (scene.log, scene.token) in scenes:
            raise UsageError(f"{path}:{number}: a second {scene.log}/{scene.token}")
        scenes[scene.log, scene.token] = scene
    return list(scenes.values())


def _read(line: str, where: str, root: Path) -> Frame:
    try:
        found = json.loads(line)
        names = [found[key] for key in ("log", "token", "image")]
        values = {key: torch.tensor(found[key], dtype=torch.float64) for key in _SIZES}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{where}: {type(error).__name__}: {error}. Expected an object with log, token, image,"
            f" {', '.join(_SIZES)}"
        ) from error
    for key, size in _SIZES.items():
        if values[key].shape != size:
            raise UsageError(f"{where}: {key} is {tuple(values[key].shape)}; expected {size}")
    return Frame(names[0], names[1], root / names[2], values)
