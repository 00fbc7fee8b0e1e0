"""Files of arrays (npz), read with one error for whatever is wrong with them."""

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tpuport.foundation.errors import CheckpointError, TpuportError, UsageError

# What numpy and zipfile raise for damaged files, by the place of the damage.
_DAMAGED = (
    *(OSError, ValueError, EOFError, KeyError, AttributeError, NotImplementedError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)


@contextmanager
def opened(path: Path, *, absent: str, damaged: str) -> Iterator[Any]:
    """Yield a file of arrays by name, none of which runs code.

    Args:
        path: The file.
        absent: What to do if it is not there.
        damaged: What to do if it cannot be read.

    Raises:
        UsageError: There is no such file.
        CheckpointError: It is damaged, or an array that the block asks for is missing.
    """
    if not path.is_file():
        raise UsageError(f"{path} is not there. What to do: {absent}")
    try:
        # numpy leaves a file open that it opened itself, if it is no zip.
        with path.open("rb") as given, np.load(given, allow_pickle=False) as file:
            yield file
    except TpuportError:
        raise
    except _DAMAGED as error:
        raise CheckpointError(f"{path} cannot be read: {error}. What to do: {damaged}") from error
