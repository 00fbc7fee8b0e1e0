"""Images and tensors that two runs wrote, compared."""

import pickle
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tpuport.verify.pickled import PickledObject, load_pickled

_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"}
_TENSORS = {".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".npy", ".npz"}
# One level of 8 bits is rounding: an image differs if its pixels are further apart.
_LEVELS = 2


@dataclass
class WrittenFiles:
    """How many files were compared, how far apart each is, and what could not be compared."""

    count: int = 0
    errors: list[tuple[str, float]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def compare_files(eager: Path, ported: Path) -> WrittenFiles:
    """Compare the images and the files of tensors in two folders, by their names."""
    found = WrittenFiles()
    names = {path.relative_to(side) for side in (eager, ported) for path in side.rglob("*")}
    for name in sorted(names):
        sides = [side for side in (eager, ported) if (side / name).is_file()]
        if not any(is_compared(side / name) for side in sides):
            continue
        if len(sides) == 1:
            which = "eager" if sides[0] is eager else "ported"
            found.problems.append(f"{name}: written by the {which} run only")
        elif sides:
            error = _difference(eager / name, ported / name)
            if isinstance(error, str):
                found.problems.append(f"{name}: {error}")
            else:
                found.errors.append((str(name), error))
    return found


def is_compared(path: Path) -> bool:
    """Return whether a file is an image or of tensors: by its name, or if `torch.save` made it."""
    if path.suffix.lower() in _IMAGES | _TENSORS:
        return True
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(entry.endswith("/data.pkl") for entry in archive.namelist())


def _difference(eager: Path, ported: Path) -> float | str:
    """Return how far the contents of two files are apart, or why they cannot be compared."""
    if eager.read_bytes() == ported.read_bytes():
        return 0.0
    try:
        mine, other = dict(_arrays(eager)), dict(_arrays(ported))
    except ModuleNotFoundError as missing:
        return f"differs, and reading it needs {missing.name}"
    except Exception as error:  # of whatever library reads the file
        return f"differs, and cannot be read ({str(error).splitlines()[0]})"
    if mine.keys() != other.keys():
        return f"has other entries ({', '.join(sorted(mine.keys() ^ other.keys())[:3])})"
    largest = 0.0
    for key, value in mine.items():
        if value.shape != other[key].shape:
            return f"{key} has the shape {value.shape} in eager, {other[key].shape} ported"
        size = np.abs(value).max(initial=0.0, where=np.isfinite(value)) or 1.0
        apart = ~((value == other[key]) | (np.isnan(value) & np.isnan(other[key])))
        difference = np.abs(value[apart] - other[key][apart]).max(initial=0.0)
        if np.isnan(difference):
            difference = np.inf  # NaN in one of them only; no comparison with NaN holds
        is_image = eager.suffix.lower() in _IMAGES
        largest = max(largest, 0.0 if is_image and difference <= _LEVELS else difference / size)
    return float(largest)


def _arrays(path: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the arrays in a file by their names, in float64."""
    suffix = path.suffix.lower()
    if suffix in _IMAGES:
        from PIL import Image

        yield "image", np.asarray(Image.open(path)).astype(np.float64)
    elif suffix == ".npy":
        yield "array", np.load(path).astype(np.float64)
    elif suffix == ".npz":
        yield from ((name, array.astype(np.float64)) for name, array in np.load(path).items())
    elif suffix == ".safetensors":
        yield from ((name, t.double().numpy()) for name, t in load_file(path).items())
    else:
        try:
            held = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:  # a whole module, or another object of the script
            held = load_pickled(path)
        yield from _leaves("", held)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    if isinstance(value, torch.Tensor):
        yield name, value.detach().double().numpy()
    elif isinstance(value, (int, float)):
        yield name, np.asarray(float(value))
    elif isinstance(value, PickledObject):
        yield from _leaves(name, value.content)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(f"{name}.{key}", part)
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _leaves(f"{name}.{index}", part)
