"""The training set on disk: one safetensors file for each segment, and an index of them.

Single frames are kept, in the order of time; inputs of two frames and queues are made in training,
of frames of one `run`. Labels have `NAME_valid` beside them; those that no frame has are left out.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from recipes.openpilot.constants import DESIRE_LEN, FRAME_SHAPE, TRAFFIC_CONVENTION_LEN
from recipes.openpilot.labels import LABEL_SHAPES
from tpuport.checkpoints.atomic import replacing_file
from tpuport.errors import CheckpointError, UsageError

Arrays = dict[str, NDArray[Any]]
FORMAT = "openpilot-frames-1"
INDEX, SUFFIX = "index.json", ".safetensors"
# By name, the dtype and what each frame has.
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
# Only where it was asked for: latitude, longitude, altitude.
PRIVATE_ARRAYS: dict[str, tuple[str, tuple[int, ...]]] = {"gps": ("float64", (3,))}
_ALL = {**FRAME_ARRAYS, **LABEL_ARRAYS, **PRIVATE_ARRAYS}


def write_shard(path: Path, arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Write a segment, whole or not at all.

    Args:
        path: ends in .safetensors.
        arrays: by name, each (T, ...).
        metadata: what is said about them; the format is added.

    Raises:
        UsageError: arrays are missing, or have other shapes or dtypes.
        CheckpointError: the disk is full.
    """
    import tpuport

    check_arrays(path, arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    tpuport.save_checkpoint(path, dict(arrays), metadata={"format": FORMAT, **metadata})


def check_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Refuse what is not a segment of this format.

    Raises:
        UsageError: arrays are missing, or have other shapes or dtypes.
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
    """Arrays of a segment.

    Args:
        path: the file.
        names: which; all that are there if None. Those that the file does not have are left out.

    Raises:
        CheckpointError: the file is damaged, or of another format.
    """
    wanted = None if names is None else set(names)
    with open_shard(path) as file:
        found = {n: file.get_tensor(n) for n in file.keys() if wanted is None or n in wanted}
    return found


def shard_metadata(path: str | Path) -> dict[str, str]:
    """What is said about a segment: format, labels, camera, digest, record.

    Raises:
        CheckpointError: the file is damaged, or of another format.
    """
    with open_shard(path) as file:
        return dict(file.metadata())


def open_shard(path: str | Path) -> Any:
    """A segment of a training set, to read arrays or parts of them.

    Raises:
        CheckpointError: the file is damaged, or of another format.
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
    """A file of safetensors.

    Raises:
        CheckpointError: it is damaged, or not there.
    """
    import safetensors

    try:
        return safetensors.safe_open(str(path), framework="numpy")
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. What to do: delete it, and make it again"
        ) from error


def find_shards(folder: str | Path) -> list[Path]:
    """The segments of a training set, by name.

    Raises:
        UsageError: there are none.
    """
    found = sorted(path for path in Path(folder).glob(f"*{SUFFIX}") if path.name[0] != ".")
    if not found:
        raise UsageError(
            f"{folder} has no segment of a training set. What to do: run `prepare` first"
        )
    return found


def read_index(folder: str | Path) -> dict[str, dict[str, Any]]:
    """Records of all segments, also of those that gave no frames; empty if there are none.

    Raises:
        CheckpointError: the file is damaged.
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
    """Write records of all segments, whole or not at all.

    Raises:
        CheckpointError: the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ordered = {name: records[name] for name in sorted(records)}
    with replacing_file(folder / INDEX) as temporary:
        text = json.dumps({"format": FORMAT, "segments": ordered}, indent=2)
        temporary.write_text(text + "\n", encoding="utf-8")
