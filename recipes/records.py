"""Records of the arguments that a folder was begun with, so that it is not resumed with others."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpuport.foundation.errors import UsageError
from tpuport.foundation.files import replacing_file

_END = 4096  # bytes to read at either end of a tensor


def check_record(
    path: Path,
    values: Mapping[str, Any],
    *,
    begun: bool,
    what_to_do: str,
    replace_unused: bool = False,
) -> None:
    """Compare a folder's record with the current arguments, or write the record of a new folder.

    Args:
        path: The record, a JSON file.
        values: The arguments by name, as JSON values.
        begun: Whether the folder already has results that the record is about.
        what_to_do: Advice in the error.
        replace_unused: Whether to replace the record of a folder that was not begun. Must be False
            if independent processes share the folder.

    Raises:
        UsageError: The record differs, cannot be read, or is missing in a folder that was begun.
        CheckpointError: It cannot be written.
    """
    if not path.is_file() or (replace_unused and not begun):
        if begun:
            raise UsageError(
                f"{path} is missing, so what {path.parent} was begun with is not known. What to"
                f" do: {what_to_do}"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing_file(path) as temporary:
            temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    # Read in any case: if processes begin together, the last one's record is kept.
    found = _read(path)
    names = [n for n in {**found, **values} if found.get(n) != values.get(n)]
    if names:
        differences = "; ".join(f"{n} was {found.get(n)!r}, is {values.get(n)!r}" for n in names)
        raise UsageError(
            f"{path.parent} was begun otherwise ({path.name}): {differences}. What to do:"
            f" {what_to_do}"
        )


def check_run(record: Path, values: Mapping[str, Any], what_to_do: str) -> None:
    """Compare the record of a training run, which has its states beside it, as `check_record` does.

    Args:
        record: The record, a JSON file in the folder of the run.
        values: What a resumed run must have been begun with.
        what_to_do: Advice in the error.

    Raises:
        UsageError: The run was begun otherwise.
        CheckpointError: The record cannot be written.
    """
    states = record.parent / "states"
    begun = states.is_dir() and any(states.iterdir())
    check_record(record, values, begun=begun, what_to_do=what_to_do, replace_unused=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}. What to do: give another folder") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} is no object of names. What to do: give another folder")
    return found


def digest_of(paths: list[Path]) -> str:
    """Return a digest of files' names and contents, of safetensors files by tensors' ends."""
    digest = hashlib.sha256()
    for path in sorted({*paths}):
        if not path.is_file():
            raise UsageError(
                f"{path} is not there. What to do: give the folder of a complete model"
            )
        own = _ends_of_tensors(path) if path.suffix == ".safetensors" else _content(path)
        digest.update(json.dumps([path.name, path.stat().st_size, own]).encode())
    return digest.hexdigest()[:16]


def _content(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _ends_of_tensors(path: Path) -> str:
    """Return a digest of the head and both ends of every tensor of a safetensors file.

    Training changes a tensor everywhere, so its ends suffice, while all of 16 GB would take a
    minute. The ends of the file alone would not suffice, since they may be of frozen tensors.
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
