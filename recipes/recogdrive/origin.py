"""Which model and settings a cache's hidden states are of."""

import hashlib
import json
from pathlib import Path
from typing import Any

from recipes.recogdrive.layouts import find_entries
from recipes.records import check_record
from tpuport.errors import UsageError

RECORD = "cache.json"
# Files of a tokenizer, as transformers writes them.
_TOKENIZER = ("tokenizer*", "vocab*", "merges*", "added_tokens*", "special_tokens*")
_END = 4096  # bytes that are read at either end of a tensor


def check_origin(
    root: str | Path,
    model: str | Path,
    *,
    max_length: int,
    max_dynamic_patch: int,
    dtype: str,
    upstream: bool,
) -> None:
    """Raise `UsageError` where a cache holds tokens of another model or other settings.

    A new cache is given its record, `cache.json` at its root.

    Args:
        root: the folder of the cache.
        model: the folder of the model and its tokenizer.
        max_length: what prompts are padded to.
        max_dynamic_patch: most tiles of an image.
        dtype: what is computed in.
        upstream: whether upstream's own model computes.
    """
    root, model = Path(root), Path(model)
    values = {
        "config": _digest([model / "config.json"]),
        "weights": _digest([*model.glob("*.safetensors"), *model.glob("*.bin")]),
        "tokenizer": _digest([path for name in _TOKENIZER for path in model.glob(name)]),
        "max_length": max_length,
        "max_dynamic_patch": max_dynamic_patch,
        "dtype": dtype,
        "computed_by": "upstream" if upstream else "transformers",
    }
    check_record(
        root / RECORD,
        values,
        begun=root.is_dir() and bool(find_entries(root)),
        what_to_do="give the flags that the cache was begun with, or another --cache_path",
    )


def _digest(paths: list[Path]) -> str:
    """Of names and contents of files, those of tensors by their ends."""
    digest = hashlib.sha256()
    for path in sorted({*paths}):
        if not path.is_file():
            raise UsageError(f"{path} is not there. What to do: give the folder of a VLM")
        own = _ends_of_tensors(path) if path.suffix == ".safetensors" else _content(path)
        digest.update(json.dumps([path.name, path.stat().st_size, own]).encode())
    return digest.hexdigest()[:16]


def _content(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _ends_of_tensors(path: Path) -> str:
    """Of the head and both ends of every tensor of a safetensors file.

    Training changes a tensor everywhere, so its ends tell; all of 16 GB would take a minute. The
    ends of the file alone would not: what a run leaves frozen may lie there.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise UsageError(f"{path} is no safetensors file")
        head = file.read(size)
        digest, start = hashlib.sha256(head), 8 + size
        for first, last in sorted(_places(head, path)):
            for place in (first, max(first, last - _END)):
                file.seek(start + place)
                digest.update(file.read(min(_END, last - place)))
    return digest.hexdigest()


def _places(head: bytes, path: Path) -> list[tuple[int, int]]:
    try:
        tensors: dict[str, Any] = json.loads(head)
        return [(*t["data_offsets"],) for n, t in tensors.items() if n != "__metadata__"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is no safetensors file: {error}") from error
