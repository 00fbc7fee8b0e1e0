"""Files of weights that configurations and runs name."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

import tpuport
from recipes.mae_dit.config import Arch
from tpuport.foundation.errors import UsageError

MODEL = "model.safetensors"  # in the folder of a run


def load_run(module: nn.Module, run: Path, command: str) -> None:
    """Load the weights that a command wrote to its folder.

    Raises:
        UsageError: There are none, or they are of another configuration.
        CheckpointError: They are damaged.
    """
    path = run / MODEL
    if not path.is_file():
        raise UsageError(f"{path} is not there. What to do: give the --out of a finished {command}")
    _load(module, read(path), str(path))


def read(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a file."""
    opened = tpuport.open_checkpoint(path)
    return {name: opened.read(name) for name in opened}


def load_named(arch: Arch, parts: Mapping[str, nn.Module]) -> None:
    """Load the files that a configuration names as `ckpt_path`.

    Args:
        arch: The section of the models.
        parts: Modules by key: "stage_1", "connector" or "stage_2", and "" for one with all of
            these, whose names begin as in upstream's checkpoints of it.

    Raises:
        UsageError: A file is not there, or is of another module.
        CheckpointError: It is damaged, or loading it would run code.
    """
    sections = {"stage_1": arch.stage_1, "connector": arch.connector, "stage_2": arch.stage_2}
    for key, module in parts.items():
        section = sections[key] if key else arch
        if section is None or section.ckpt_path is None:
            continue
        name = ".".join(part for part in ("arch", key, "ckpt_path") if part)
        path = Path(section.ckpt_path)
        if not path.is_file():
            raise UsageError(
                f"{name}: {path} is not there. What to do: --set {name}=PATH, or {name}=null for"
                " random weights"
            )
        weights = read(path)
        if not key:  # a checkpoint of stage 2 has stage 1 as well
            first = {one.partition(".")[0] for one in module.state_dict()}
            weights = {n: v for n, v in weights.items() if n.partition(".")[0] in first}
        _load(module, weights, f"{name}: {path}")


def _load(module: nn.Module, weights: Mapping[str, torch.Tensor], what: str) -> None:
    """Load weights, all of them and no others."""
    own = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    given = {name: tuple(value.shape) for name, value in weights.items()}
    found = []
    for text, names in (("missing", own.keys() - given), ("not known", given.keys() - own)):
        if names:
            found.append(f"{len(names)} of {len(own)} are {text}, such as {min(names)}")
    other = sorted(name for name in own.keys() & given if own[name] != given[name])
    if other:
        found.append(f"{other[0]} is {given[other[0]]}, expected {own[other[0]]}")
    if found:
        raise UsageError(
            f"{what} is of another configuration: {'; '.join(found)}. What to do: give the"
            " configuration, and --set, that it was trained with"
        )
    module.load_state_dict(dict(weights))
