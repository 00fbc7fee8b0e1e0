"""The safetensors format: where each tensor is in a file, and how a file is written.

The library checks every file that is read or written. It does not tell where a tensor is in a file,
and writes from a second copy of all weights, so those two are here.
Format: https://github.com/huggingface/safetensors#format.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import torch

from tpuport.foundation.errors import CheckpointError
from tpuport.weights.read import Extent, OpenFile, TensorInfo

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Header:
    """The start of a safetensors file.

    Attributes:
        raw: Its bytes, with the length before them.
        extents: The place of each tensor, in the order of the data.
        metadata: The strings of `__metadata__`.
    """

    raw: bytes
    extents: dict[str, Extent]
    metadata: dict[str, str]


def read_header(file: OpenFile) -> Header:
    """Read the header of a safetensors file.

    Raises:
        CheckpointError: the file is damaged, names a tensor twice or has an unknown dtype.
    """
    try:
        with safetensors.safe_open(str(file.path), framework="numpy") as checked:
            checked.keys()
    except (safetensors.SafetensorError, OSError) as error:
        msg = f"{file.path} is not an intact safetensors file ({error}); download or write it again"
        raise CheckpointError(msg) from error
    length = 8 + int.from_bytes(file.read(0, 8), "little")
    raw = file.read(0, length)
    found = unique_json(raw[8:], file.path)
    metadata = found.pop("__metadata__", None) or {}
    extents = {}
    for name, entry in sorted(found.items(), key=lambda item: item[1]["data_offsets"]):
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            msg = (
                f"{name!r} in {file.path} has the dtype {entry['dtype']}, which torch has no"
                " type for; leave it out of the file, or convert it first"
            )
            raise CheckpointError(msg)
        start = length + entry["data_offsets"][0]
        extents[name] = Extent(file, start, tuple(entry["shape"]), dtype)
    return Header(raw, extents, metadata)


def unique_json(text: bytes | str, path: Path) -> dict[str, Any]:
    """Parse a JSON object in which no name occurs twice.

    Raises:
        CheckpointError: it is not one.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            msg = f"{path} names {twice!r} twice, so it is not known which one is meant"
            raise CheckpointError(msg)
        return made

    try:
        found = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        msg = f"{path} is not valid JSON ({error}); download or write it again"
        raise CheckpointError(msg) from error
    if not isinstance(found, dict):
        msg = f"{path} holds a JSON {type(found).__name__}, expected an object"
        raise CheckpointError(msg)
    return found


def make_header(infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """Return the start of a file with these tensors in this order.

    Raises:
        CheckpointError: safetensors has no type for a dtype.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, info in infos.items():
        if info.dtype not in _NAME_OF:
            msg = (
                f"{name!r} is {info.dtype}, which safetensors has no type for; save a .pt file, or"
                " convert it first"
            )
            raise CheckpointError(msg)
        start, end = end, end + info.nbytes
        entries[name] = {
            "dtype": _NAME_OF[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def in_library_order(infos: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Sort by widest dtype, then by name, as the library does, so that each tensor is aligned."""
    wide = sorted(infos.values(), key=lambda info: (-info.dtype.itemsize, info.name))
    return {info.name: info for info in wide}


def write_file(
    out: BinaryIO, header: bytes, names: list[str], value: Callable[[str], memoryview]
) -> None:
    """Write one file, a tensor at a time.

    Args:
        out: The file, open for writing.
        header: The start of the file.
        names: The tensors in the order of the header.
        value: Returns the bytes of a tensor.
    """
    out.write(header)
    for name in names:
        out.write(value(name))
