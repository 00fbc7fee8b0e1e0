"""What torch_xla saved: shards of FSDP 1, put together, and tensors in files of their own.

A shard of `XlaFullyShardedDataParallel` holds a part of each parameter, flattened and padded, and
`shard_metadata`, which says how the parts of all ranks make the model's own parameters. A file of
`torch_xla.utils.serialization` holds numbers in the place of tensors.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tpuport.foundation.errors import CheckpointError
from tpuport.weights.read import Bounds, Extent

_SHARD = "_fsdp_shard"
_FLAT = "_fsdp_wrapped_module.flat_param_"
_WRAPPERS = ("_fsdp_wrapped_module.", "_fpw_module.", "_orig_module.")
METADATA = "shard_metadata"


@dataclass(frozen=True)
class Joined:
    """A tensor whose elements, row-major, are a run of those of several tensors after another.

    Attributes:
        parts: The tensors.
        start: The first of their elements.
        shape: The sizes.
        dtype: The dtype to cast to.
    """

    parts: tuple[Extent | torch.Tensor, ...]
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, bounds: Bounds | None = None) -> torch.Tensor:
        """Read the values into memory of their own; of each part only what is needed of it."""
        found, at = [], 0
        stop = self.start + math.prod(self.shape)
        for part in self.parts:
            size = math.prod(part.shape)
            first, last = max(self.start - at, 0), min(stop - at, size)
            if first < last:
                found.append(_elements(part, first, last))
            at += size
        whole = torch.cat(found) if found else torch.empty(0, dtype=self.dtype, device="cpu")
        whole = whole.to(self.dtype).view(self.shape)
        if bounds is None:
            return whole
        cut = whole[tuple(slice(*b) for b in bounds)]
        return cut.clone(memory_format=torch.contiguous_format)


def _elements(part: Extent | torch.Tensor, first: int, last: int) -> torch.Tensor:
    if isinstance(part, torch.Tensor):
        return part.detach().cpu().reshape(-1)[first:last]
    if part.strides is not None:
        return part.read().reshape(-1)[first:last]
    flat = Extent(part.file, part.offset, (math.prod(part.shape),), part.dtype)
    return flat.read(((first, last),))


@dataclass(frozen=True)
class Shard:
    """One file of an FSDP checkpoint.

    Attributes:
        path: The file.
        tensors: What it has, by name.
        metadata: Its `shard_metadata`.
    """

    path: Any
    tensors: Mapping[str, Extent | torch.Tensor]
    metadata: Mapping[str, Any]


def joined(shards: Sequence[Shard]) -> dict[str, Extent | torch.Tensor | Joined]:
    """Put the shards of all ranks together: the tensors of the module that was wrapped, by name.

    Raises:
        CheckpointError: a rank is missing or there twice, or the shards are not of one model.
    """
    try:
        ordered = sorted(shards, key=lambda shard: shard.metadata["rank"])
        _check_ranks(ordered)
        return _joined(ordered)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        msg = (
            f"{shards[0].path} has a {METADATA} that does not fit its tensors"
            f" ({type(error).__name__}: {error}); save model.state_dict() and"
            " model.get_shard_metadata() of one model"
        )
        raise CheckpointError(msg) from error


def _check_ranks(ordered: Sequence[Shard]) -> None:
    size = ordered[0].metadata["world_size"]
    ranks = [shard.metadata["rank"] for shard in ordered]
    if ranks == list(range(size)) and all(s.metadata["world_size"] == size for s in ordered):
        if all(s.tensors.keys() == ordered[0].tensors.keys() for s in ordered):
            return
        msg = f"{ordered[0].path} and the shards beside it have other names; they are not of a save"
        raise CheckpointError(msg)
    msg = (
        f"{ordered[0].path} is a shard of {size}, and the shards found are of the ranks {ranks};"
        " pass the directory that holds all of them and no others, or a pattern such as"
        ' "out/step-10-rank-*.pth"'
    )
    raise CheckpointError(msg)


def _joined(ordered: Sequence[Shard]) -> dict[str, Extent | torch.Tensor | Joined]:
    metadata = ordered[0].metadata
    made: dict[str, Extent | torch.Tensor | Joined] = {}
    for name, value in ordered[0].tensors.items():
        if name in metadata.get("buffer_info", {}):
            dtype = metadata["buffer_info"][name]["_orig_dtype"]
            made[name] = Joined((value,), 0, tuple(value.shape), dtype)
        elif (at := _shard_at(name)) is None:
            made[name] = value
        else:
            prefix, suffix = name[: max(at - 1, 0)], name[at:]
            info = metadata["shard_info"][prefix][suffix]
            parts = tuple(shard.tensors[name] for shard in ordered)
            whole = Joined(parts, 0, tuple(info["_orig_size"]), value.dtype)
            made[_below(prefix, info["_orig_name"])] = _checked(whole, name)
    for name in [name for name in made if _FLAT in name]:
        flat = made.pop(name)
        names, shapes, _ = metadata["flatten_info"][name]
        parts, start = flat.parts if isinstance(flat, Joined) else (flat,), 0
        for one, shape in zip(names, shapes, strict=True):
            full = _below(name.rpartition(".")[0], one)
            made[full] = _checked(Joined(parts, start, tuple(shape), flat.dtype), name)
            start += math.prod(shape)
    return {_unwrapped(name): value for name, value in made.items()}


def _shard_at(name: str) -> int | None:
    """Return where the part of a name begins that says that it is a shard."""
    if name.startswith(_SHARD):
        return 0
    at = name.find(f".{_SHARD}")
    return None if at < 0 else at + 1


def _below(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _checked(value: Joined, name: str) -> Joined:
    held = sum(math.prod(part.shape) for part in value.parts)
    if value.start + math.prod(value.shape) > held or any(n < 0 for n in value.shape):
        msg = f"{name} has {held} elements in all shards, too few for {value.shape}"
        raise ValueError(msg)
    if any(part.dtype != value.dtype for part in value.parts):
        msg = f"{name} is of {value.dtype} in one shard only"
        raise ValueError(msg)
    return value


# -- tensors in files of their own -----------------------------------------------------------------

REFERENCE = "torch_xla.utils.serialization.TensorReference"


class SavedNumber:
    """Stands for torch_xla's class of this name: the number of a tensor in a file of its own."""

    tid: Any = None


def resolved(found: Any, path: Path, load: Callable[[Path], Any]) -> Any:
    """Replace references to tensors in nested data by what their files hold.

    Args:
        found: The contents of the file `path`.
        path: The file, whose tensors are in the folder `path.tensors`.
        load: Loads a file, without running code.

    Raises:
        CheckpointError: a file is missing, or holds no tensor.
    """
    if isinstance(found, SavedNumber):
        if not isinstance(found.tid, int):
            raise CheckpointError(f"{path} refers to the tensor {found.tid!r}, expected a number")
        place = Path(f"{path}.tensors") / f"tensor_{found.tid}.pt"
        if not place.is_file():
            msg = (
                f"{path} has its tensors in {place.parent}, where {place.name} is not; copy it too"
            )
            raise CheckpointError(msg)
        value = load(place)
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{place} holds a {type(value).__name__}, expected a tensor")
        return value
    if isinstance(found, dict):
        return {name: resolved(value, path, load) for name, value in found.items()}
    if type(found) in (list, tuple):
        return type(found)(resolved(value, path, load) for value in found)
    return found
