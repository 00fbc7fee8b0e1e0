"""torch's own format (`torch.save`): where each tensor is in a file.

The pickle in it is only ever read with `weights_only=True`. Under a fake tensor mode `torch.load`
makes tensors without values that know the offset of their storage in the file; the values are then
read one tensor at a time.
"""

import pickle
import re
import struct
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tpuport.foundation.errors import CheckpointError
from tpuport.foundation.pytree import walk
from tpuport.weights.read import Extent, OpenFile
from tpuport.weights.torch_xla_files import METADATA, REFERENCE, SavedNumber, resolved

# Keys under which training scripts and frameworks put the weights, most telling first.
_KEYS = ("state_dict", "model_state_dict", "model", "module")


@dataclass(frozen=True)
class TorchFile:
    """The weights in a torch file.

    Attributes:
        tensors: The place of each tensor, or its value if the file can only be read all at once.
        key: The key of the weights; None if they are the top level.
        shard: The `shard_metadata` of a shard that torch_xla's FSDP saved.
    """

    tensors: dict[str, Extent | torch.Tensor]
    key: str | None
    shard: Mapping[str, Any] | None = None


def scan(file: OpenFile, key: str | None) -> TorchFile:
    """Find the tensors of a file.

    Args:
        file: The file.
        key: The key of the weights, with dots between nested keys; None looks for it.

    Raises:
        CheckpointError: the file is damaged, would run code, or holds no weights there.
    """
    records = _stored_records(file)
    if records is None:
        # The format before torch 1.6, compressed or big-endian: torch reads all of it at once.
        found = load_whole(file)
    else:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            found = _load(file)
        if _refers(found):
            # Tensors in files of their own, as torch_xla.utils.serialization saves them.
            records, found = None, load_whole(file)
    shard = found.get(METADATA) if isinstance(found, Mapping) else None
    shard = shard if isinstance(shard, Mapping) else None
    key, weights = find_weights(found, key, file)
    if records is not None and any(t.is_conj() or t.is_neg() for t in weights.values()):
        # With lazy conj and neg bits the bytes in the file are not the values.
        records, weights = None, find_weights(load_whole(file), key, file)[1]
    if records is None:
        return TorchFile({**weights}, key, shard)
    extents = {name: _extent(file, name, tensor, records) for name, tensor in weights.items()}
    return TorchFile({**extents}, key, shard)


def load_whole(file: OpenFile, *, mmap: bool = False) -> Any:
    """Load everything that a file holds, with values.

    Raises:
        CheckpointError: the file is damaged or would run code.
    """
    found = _load(file, mmap=mmap, map_location="cpu")
    if not _refers(found):
        return found
    return resolved(found, file.path, lambda path: _load(OpenFile(path), map_location="cpu"))


def _refers(found: Any) -> bool:
    nodes = walk([found], _parts)
    return any(isinstance(node, SavedNumber) for node in nodes)


def _parts(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return list(node) if isinstance(node, (list, tuple)) else []


def _load(file: OpenFile, **options: Any) -> Any:
    try:
        with torch.serialization.safe_globals([(SavedNumber, REFERENCE)]):
            return torch.load(file.path, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        raise _refused(file, str(error)) from error
    except (
        *(RuntimeError, OSError, EOFError, ValueError, KeyError, TypeError, AttributeError),
        *(IndexError, UnicodeError, struct.error, AssertionError, NotImplementedError),
    ) as error:
        msg = (
            f"{file.path} is not an intact torch checkpoint"
            f" ({type(error).__name__}: {_first_line(error)}); download or write it again"
        )
        raise CheckpointError(msg) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def _refused(file: OpenFile, text: str) -> CheckpointError:
    named = re.search(r"GLOBAL (\S+)", text)
    if named is None:
        # Its first lines are torch's advice to load without the check.
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        reason = next((line for line in lines if "weights_only" not in line), lines[0])
        return CheckpointError(
            f"{file.path} is not a checkpoint that torch reads safely ({reason}); save its"
            " state_dict() with torch.save again"
        )
    return CheckpointError(
        f"{file.path} would run {named[1]} when it is loaded, so it is refused: a file of weights"
        " needs tensors and plain Python values only. Save model.state_dict() instead of the"
        " model; if you trust the file and know the class, name it in"
        " torch.serialization.add_safe_globals first"
    )


def _stored_records(file: OpenFile) -> dict[int, int] | None:
    """Map offsets of a zip archive's records to sizes; None if torch has to read the file."""
    if file.size < 4 or file.read(0, 4) != b"PK\x03\x04":
        return None
    records: dict[int, int] = {}
    try:
        with zipfile.ZipFile(file.path) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED:
                    return None
                if entry.filename.endswith("/byteorder") and (
                    archive.read(entry) != sys.byteorder.encode()
                ):
                    return None
                # The local header: 30 bytes, the name, and padding up to the aligned data.
                name, extra = struct.unpack("<HH", file.read(entry.header_offset + 26, 4))
                records[entry.header_offset + 30 + name + extra] = entry.file_size
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError) as error:
        msg = f"{file.path} is not an intact torch checkpoint ({error}); download or write it again"
        raise CheckpointError(msg) from error
    return records


def _extent(file: OpenFile, name: str, tensor: torch.Tensor, records: Mapping[int, int]) -> Extent:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        what = "quantized" if tensor.is_quantized else str(tensor.layout)
        msg = (
            f"{name!r} in {file.path} is {what}, and only plain tensors are loaded; save it as"
            " tensor.to_dense() or tensor.dequantize()"
        )
        raise CheckpointError(msg)
    storage = tensor.untyped_storage()
    start: int | None = getattr(storage, "_checkpoint_offset", None)
    strides, shape = tensor.stride(), tuple(tensor.shape)
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    end = (tensor.storage_offset() + span) * tensor.dtype.itemsize
    held = 0 if start is None else min(records.get(start, 0), storage.nbytes())
    if tensor.numel() and (start is None or end > held):
        msg = (
            f"{file.path} is damaged: {name!r} needs {end} bytes of its storage, which has {held};"
            " download or write it again"
        )
        raise CheckpointError(msg)
    place = (start or 0) + int(tensor.storage_offset()) * tensor.dtype.itemsize
    return Extent(
        file, place, shape, tensor.dtype, None if tensor.is_contiguous() else tuple(strides)
    )


# -- which part of the file is the weights ---------------------------------------------------------


def find_weights(
    found: Any, key: str | None, file: OpenFile
) -> tuple[str | None, dict[str, torch.Tensor]]:
    """Find the state dict in the contents of a file, and its key.

    Raises:
        CheckpointError: there is none.
    """
    if key is None:
        if tensors_of(found):
            return None, tensors_of(found)
        keys = [k for k in _KEYS if isinstance(found, Mapping) and tensors_of(found.get(k))]
        if not keys:
            msg = (
                f"{file.path} holds {_described(found)}, and no tensors by name there or under"
                f" {', '.join(map(repr, _KEYS))}; pass key= with the key of the weights"
            )
            raise CheckpointError(msg)
        if len(keys) > 1:
            msg = (
                f"{file.path} holds weights under {' and '.join(map(repr, keys))}; pass key= to"
                " say which"
            )
            raise CheckpointError(msg)
        return keys[0], tensors_of(found[keys[0]])
    weights = tensors_of(at_key(found, key))
    if not weights:
        msg = f"{file.path} has no tensors under key={key!r}; it holds {_described(found)}"
        raise CheckpointError(msg)
    return key, weights


def at_key(found: Any, key: str | None) -> Any:
    """Return the value under a key, with dots between nested keys; None if there is none."""
    if key is None or (isinstance(found, Mapping) and key in found):
        return found if key is None else found[key]
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def tensors_of(found: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a mapping by name, without its other values."""
    if not isinstance(found, Mapping):
        return {}
    return {
        name: value
        for name, value in found.items()
        if isinstance(name, str) and isinstance(value, torch.Tensor)
    }


def extra_of(found: Any, key: str | None) -> dict[str, Any]:
    """Return the contents of a file besides the weights: epochs, optimizers, settings."""
    if key is None:
        return {k: v for k, v in found.items() if not isinstance(v, torch.Tensor)}
    if key in found:
        return {k: v for k, v in found.items() if k != key}
    first, _, rest = key.partition(".")
    inner = extra_of(found[first], rest) if rest else {}
    others = {k: v for k, v in found.items() if k != first}
    return {**others, first: inner} if inner else others


def _described(found: Any) -> str:
    if not isinstance(found, Mapping):
        return f"a {type(found).__name__}"
    names = [repr(k) for k in found][:8]
    return f"a {type(found).__name__} with {', '.join(names) or 'nothing in it'}"
