"""Latents of images on disk, in shards that a killed run does not write again."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import torch

from recipes.records import check_record
from tpuport.foundation.errors import CheckpointError, UsageError
from tpuport.foundation.files import replacing_file

RECORD, INDEX = "record.json", "index.json"
_SUFFIX = ".safetensors"


def write_cache(
    out: Path,
    count: int,
    rows: int,
    encode: Callable[[range], Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]],
    record: Mapping[str, Any],
) -> tuple[int, int]:
    """Write the latents of images, or those that are missing.

    Args:
        out: Folder.
        count: Number of images.
        rows: Images of a shard.
        encode: Yields latents, labels and which of them are valid, for a range of images.
        record: What the latents are of, as JSON values. A folder of others is refused.

    Returns:
        The number of latents, and that of images that could not be read.

    Raises:
        UsageError: The folder has other latents.
        CheckpointError: A shard cannot be written.
    """
    begun = out.is_dir() and any(out.glob(f"*{_SUFFIX}"))
    what = "give the command that it was begun with, or another --out"
    check_record(out / RECORD, record, begun=begun, what_to_do=what, replace_unused=True)
    sizes = {}
    for start in range(0, count, rows):
        path = out / f"{start // rows:06d}{_SUFFIX}"
        if not path.is_file():
            parts = list(encode(range(start, min(start + rows, count))))
            zs, labels = (np.concatenate([p[i][p[2]] for p in parts]) for i in (0, 1))
            with replacing_file(path) as temporary:
                safetensors.numpy.save_file({"latents": zs, "labels": labels}, temporary)
        sizes[path.name] = len(_labels(path))
    found = sum(sizes.values())
    with replacing_file(out / INDEX) as temporary:
        temporary.write_text(json.dumps(sizes), encoding="utf-8")
    return found, count - found


def _labels(path: Path) -> np.ndarray:
    try:
        with safetensors.safe_open(path, framework="np") as file:
            return file.get_tensor("labels")
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. What to do: delete it, and run cache again"
        ) from error


class Cached(torch.utils.data.Dataset[dict[str, Any]]):
    """The latents of a finished cache as samples.

    Attributes:
        labels: The label of each.
        record: What they are of.

    Raises:
        UsageError: There is no finished cache.
        CheckpointError: A file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        try:
            sizes: dict[str, int] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            self.record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{folder} is no finished cache: {error}. What to do: run cache, with it as --out"
            ) from error
        self._paths = [folder / name for name in sizes]
        found = [_labels(path) for path in self._paths]
        for path, part in zip(self._paths, found, strict=True):
            if len(part) != sizes[path.name]:
                raise CheckpointError(
                    f"{path} has {len(part)} latents, expected {sizes[path.name]}. What to do:"
                    " delete it, and run cache again"
                )
        self.labels = np.concatenate([*found, np.zeros(0, np.int32)])
        self._ends = np.cumsum(list(sizes.values()))
        self._opened: dict[Path, Any] = {}

    def __len__(self) -> int:
        """Return the number of latents."""
        return len(self.labels)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a worker process, which opens files itself."""
        return {**self.__dict__, "_opened": {}}

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample.

        Raises:
            IndexError: There is no such latent.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._ends, index, side="right"))
        path, first = self._paths[number], int(self._ends[number - 1]) if number else 0
        if path not in self._opened:
            file = safetensors.safe_open(path, framework="pt")
            self._opened[path] = file.get_slice("latents")
        return {
            "latent": self._opened[path][index - first],
            "label": torch.tensor(self.labels[index], dtype=torch.int32),
        }
