"""Images and tensors that two runs wrote, compared."""

import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tpuport.verify.pickled import PickledObject, load_pickled

_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"}
_TENSORS = {".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".npy", ".npz"}
# What tells the folders of runs apart: 2026-11-30, 19-45-35, 194535, and random numbers.
_OF_A_RUN = re.compile(r"(?<!\d)\d\d([-_.:])\d\d\1\d\d(?!\d)|\d{4,}([-_.:]\d\d[-_.:]\d\d)?(?!\d)")
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
    mine, other, pairs = _paired(eager, ported)
    for name, renamed in pairs.items():
        error = _difference(eager / name, ported / renamed)
        if isinstance(error, str):
            found.problems.append(f"{name}: {error}")
        else:
            found.errors.append((str(name), error))
    alone = dict.fromkeys(mine - pairs.keys(), "eager")
    alone |= dict.fromkeys(other - set(pairs.values()), "ported")
    for name, which in sorted(alone.items()):
        found.problems.append(f"{name}: written by the {which} run only")
    return found


def renamed_files(eager: Path, ported: Path) -> list[str]:
    """Return sentences that say which files were compared though their names differ."""
    return [
        f"The eager run's {name} was compared with the ported run's {renamed}: they are alike but"
        " for a time or number in the name."
        for name, renamed in _paired(eager, ported)[2].items()
        if name != renamed
    ]


def _paired(eager: Path, ported: Path) -> tuple[set[Path], set[Path], dict[Path, Path]]:
    """Return the files that each run wrote, and those of the ported run for the eager one's."""
    mine, other = _written(eager), _written(ported)
    both = {name for name in mine | other if all((s / name).is_file() for s in (eager, ported))}
    mine, other = mine | both, other | both
    pairs = {name: name for name in sorted(both)} | _renamed(mine - both, other - both)
    return mine, other, pairs


def _written(side: Path) -> set[Path]:
    """Return the names of the files of a run that are compared."""
    paths = (path for path in side.rglob("*") if path.is_file() and is_compared(path))
    return {path.relative_to(side) for path in paths}


def _renamed(mine: Iterable[Path], other: Iterable[Path]) -> dict[Path, Path]:
    """Pair names that differ by a time or a number that no seed sets, where only one fits."""
    sides = []
    for names in (mine, other):
        found: dict[str, list[Path]] = {}
        for name in names:
            found.setdefault(_OF_A_RUN.sub("#", str(name)), []).append(name)
        sides.append(found)
    return {
        names[0]: sides[1][form][0]
        for form, names in sides[0].items()
        if len(names) == len(sides[1].get(form, ())) == 1
    }


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
