"""What a folder was begun with, beside what is in it, so that it is not gone on with otherwise."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpuport.checkpoints.atomic import replacing_file
from tpuport.errors import UsageError


def check_record(
    path: Path,
    values: Mapping[str, Any],
    *,
    begun: bool,
    what_to_do: str,
    replace_unused: bool = False,
) -> None:
    """Compare a folder's record with what goes on in it, or write the record of a new one.

    Args:
        path: the record, a JSON file.
        values: by name, as JSON has them.
        begun: whether the folder already holds what the record is about.
        what_to_do: the advice of the error.
        replace_unused: write the record anew where the folder was not begun; not where processes
            that know nothing of each other share it.

    Raises:
        UsageError: the record differs, cannot be read, or is missing in a folder that was begun.
        CheckpointError: it cannot be written.
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
    # Read in any case: of processes that begin together, one has written last.
    found = _read(path)
    names = [n for n in {**found, **values} if found.get(n) != values.get(n)]
    if names:
        differences = "; ".join(f"{n} was {found.get(n)!r}, is {values.get(n)!r}" for n in names)
        raise UsageError(
            f"{path.parent} was begun otherwise ({path.name}): {differences}. What to do:"
            f" {what_to_do}"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}. What to do: give another folder") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} is no object of names. What to do: give another folder")
    return found
