"""The training set on disk: one safetensors file per segment, and an index of them.

Single frames are stored in the order of time. Inputs of two frames and queues are made during
training, from frames of one `run`. Each label has a `NAME_valid`. Labels that no frame has are left
out.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from recipes.openpilot.constants import DESIRE_LEN, FRAME_SHAPE, TRAFFIC_CONVENTION_LEN
from recipes.openpilot.labels import LABEL_SHAPES
from tpuport.foundation.errors import CheckpointError, UsageError
from tpuport.foundation.files import replacing_file

Arrays = dict[str, NDArray[Any]]
FORMAT = "openpilot-frames-1"
INDEX, SUFFIX = "index.json", ".safetensors"
# The dtype and the shape of one frame, by name.
FRAME_ARRAYS: dict[str, tuple[str, tuple[int, ...]]] = {
    "img": ("uint8", FRAME_SHAPE),
    "big_img": ("uint8", FRAME_SHAPE),
    "desire": ("float32", (DESIRE_LEN,)),
    "traffic_convention": ("float32", (TRAFFIC_CONVENTION_LEN,)),
    "v_ego": ("float32", ()),
    "action_t": ("float32", (2,)),
    "frame_id": ("int64", ()),
    "mono_time": ("int64", ()),
    "run": ("int32", ()),
    "rpy_calib": ("float32", (3,)),
}
LABEL_ARRAYS: dict[str, tuple[str, tuple[int, ...]]] = {
    **{name: ("float32", shape) for name, shape in LABEL_SHAPES.items()},
    **{f"{name}_valid": ("bool", ()) for name in LABEL_SHAPES},
}
# Stored only if asked for: latitude, longitude, altitude.
PRIVATE_ARRAYS: dict[str, tuple[str, tuple[int, ...]]] = {"gps": ("float64", (3,))}
_ALL = {**FRAME_ARRAYS, **LABEL_ARRAYS, **PRIVATE_ARRAYS}


def write_shard(path: Path, arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Write a segment atomically.

    Args:
        path: File name that ends in .safetensors.
        arrays: Arrays by name, each (T, ...).
        metadata: Metadata of the file. The format is added.

    Raises:
        UsageError: Arrays are missing, or have other shapes or dtypes.
        CheckpointError: The disk is full.
    """
    import tpuport

    check_arrays(path, arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    tpuport.save_checkpoint(path, dict(arrays), metadata={"format": FORMAT, **metadata})


def check_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Raise an error for arrays that are no segment of this format.

    Raises:
        UsageError: Arrays are missing, or have other shapes or dtypes.
    """
    missing = [name for name in FRAME_ARRAYS if name not in arrays]
    unknown = [name for name in arrays if name not in _ALL]
    alone = [n for n in LABEL_SHAPES if (n in arrays) != (f"{n}_valid" in arrays)]
    if missing or unknown or alone:
        raise UsageError(
            f"{path}: "
            + "; ".join(
                f"{what} {', '.join(names)}"
                for what, names in (
                    ("without", missing),
                    ("not known:", unknown),
                    ("without its values or its _valid:", alone),
                )
                if names
            )
        )
    count = len(arrays["img"])
    for name, array in arrays.items():
        dtype, each = _ALL[name]
        if str(array.dtype) != dtype or array.shape != (count, *each):
            raise UsageError(
                f"{path}: {name}: expected {dtype} {(count, *each)}, got {array.dtype}"
                f" {array.shape}"
            )


def read_shard(path: str | Path, names: Iterable[str] | None = None) -> Arrays:
    """Read arrays of a segment.

    Args:
        path: The file.
        names: Names of the arrays, or None for all. Names that the file does not have are left out.

    Raises:
        CheckpointError: The file is damaged, or of another format.
    """
    wanted = None if names is None else set(names)
    with open_shard(path) as file:
        found = {n: file.get_tensor(n) for n in file.keys() if wanted is None or n in wanted}
    return found


def shard_metadata(path: str | Path) -> dict[str, str]:
    """Return the metadata of a segment: format, labels, camera, digest, record.

    Raises:
        CheckpointError: The file is damaged, or of another format.
    """
    with open_shard(path) as file:
        return dict(file.metadata())


def open_shard(path: str | Path) -> Any:
    """Open a segment of a training set, to read arrays or parts of them.

    Raises:
        CheckpointError: The file is damaged, or of another format.
    """
    with open_arrays(path) as file:
        said = dict(file.metadata() or {})
    if said.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is of format {said.get('format')!r}, expected {FORMAT!r}. What to do: prepare"
            " it again"
        )
    return open_arrays(path)


def open_arrays(path: str | Path) -> Any:
    """Open a safetensors file.

    Raises:
        CheckpointError: It is damaged, or missing.
    """
    import safetensors

    try:
        return safetensors.safe_open(str(path), framework="numpy")
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. What to do: delete it, and make it again"
        ) from error


def find_shards(folder: str | Path) -> list[Path]:
    """Return the segments of a training set, sorted by name.

    Raises:
        UsageError: There are none.
    """
    found = sorted(path for path in Path(folder).glob(f"*{SUFFIX}") if path.name[0] != ".")
    if not found:
        raise UsageError(
            f"{folder} has no segment of a training set. What to do: run `prepare` first"
        )
    return found


def read_index(folder: str | Path) -> dict[str, dict[str, Any]]:
    """Return the records of all segments, also of those without frames; empty if there are none.

    Raises:
        CheckpointError: The file is damaged.
    """
    path = Path(folder) / INDEX
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["segments"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is no index of segments: {error!r}. What to do: delete it and prepare again;"
            " finished segments are kept"
        ) from error


def write_index(folder: Path, records: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the records of all segments atomically.

    Raises:
        CheckpointError: The disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ordered = {name: records[name] for name in sorted(records)}
    with replacing_file(folder / INDEX) as temporary:
        text = json.dumps({"format": FORMAT, "segments": ordered}, indent=2)
        temporary.write_text(text + "\n", encoding="utf-8")
