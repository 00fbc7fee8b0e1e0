"""`tpuport.open_checkpoint`: the contents of a checkpoint, read one tensor at a time."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from tpuport.foundation.errors import CheckpointError
from tpuport.foundation.interop import backend
from tpuport.weights import torch_file
from tpuport.weights.locate import SAFETENSORS, Located, locate
from tpuport.weights.read import Bounds, Extent, OpenFile, TensorInfo, bounds_of
from tpuport.weights.safetensors_file import Header, read_header
from tpuport.weights.torch_xla_files import Joined, Shard, joined

_ATTEMPTS = 20

Value = Extent | Joined | torch.Tensor | jax.Array | np.ndarray


class Checkpoint(Mapping[str, TensorInfo]):
    """The tensors of a checkpoint by name: their shapes and dtypes at once, values when asked.

    Made by `tpuport.open_checkpoint`. The files stay open until it is collected, so it always
    reads the files that existed when it was opened.

    Attributes:
        path: The path that was opened.
        format: `"safetensors"`, `"torch"` or `"memory"`.
        metadata: The strings that safetensors files carry.
        located: Its files.
        headers: The start of each safetensors file, by file name.
        names_in: The names in each file, in the file's order.
        key: The key of the weights in a torch file.
    """

    def __init__(
        self, path: Path, values: Mapping[str, Value], located: Located, key: str | None = None
    ) -> None:
        self.path = path
        self.located = located
        self.key = key
        self.format = "torch" if located.files else "memory"
        self.metadata: dict[str, str] = {}
        self.headers: dict[str, Header] = {}
        self.names_in: dict[str, list[str]] = {}
        self._values = dict(values)
        self._infos = {name: _info(name, value) for name, value in values.items()}

    def __getitem__(self, name: str) -> TensorInfo:
        return self._infos[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}: {len(self)} tensors, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Return the bytes of all values."""
        return sum(info.nbytes for info in self._infos.values())

    @property
    def extra(self) -> dict[str, Any]:
        """Return the other contents of a torch file (epoch, optimizer, settings), read now.

        Empty for other formats and for sharded checkpoints.
        """
        if self.format != "torch" or len(self.located.files) != 1:
            return {}
        (path,) = self.located.files
        file = OpenFile(path)
        return torch_file.extra_of(torch_file.load_whole(file), self.key)

    def read(self, name: str, index: Any = None) -> torch.Tensor:
        """Read one tensor to the CPU, in the file's dtype and in memory of its own.

        Args:
            name: The name of the tensor.
            index: Slices without a step, one for each dimension: only these bytes are read.

        Raises:
            CheckpointError: there is no such tensor, or its file ends too early.
        """
        if name not in self._values:
            msg = f"{self.path} has no tensor {name!r}; list(checkpoint) gives the names"
            raise CheckpointError(msg)
        bounds = None if index is None else bounds_of(index, self[name].shape)
        return self.read_bounds(name, bounds)

    def read_bounds(self, name: str, bounds: Bounds | None) -> torch.Tensor:
        """Read like `read`, with the first and last + 1 index in each dimension."""
        value = self._values[name]
        if isinstance(value, (Extent, Joined)):
            return value.read(bounds)
        if isinstance(value, torch.Tensor):
            part = value.detach()
            if bounds is not None:
                part = part[tuple(slice(*b) for b in bounds)]
            part = part.to("cpu").resolve_conj().resolve_neg()
            return part.clone(memory_format=torch.contiguous_format)
        part = value if bounds is None else value[tuple(slice(*b) for b in bounds)]
        if isinstance(part, jax.Array):
            # A new array over the same memory: jax would cache the host copy on the user's own.
            shards = [shard.data for shard in part.addressable_shards]
            part = jax.make_array_from_single_device_arrays(part.shape, part.sharding, shards)
        return backend.to_torch(part)  # pyright: ignore[reportArgumentType]  (numpy serves as well)

    def replaced(self, values: Mapping[str, Value], without: Iterable[str]) -> "Checkpoint":
        """Return a checkpoint with other values in addition, and without some names."""
        gone = frozenset(without)
        kept = {name: value for name, value in self._values.items() if name not in gone}
        return Checkpoint(self.path, {**kept, **values}, self.located)

    def memory_of(self, name: str) -> Any:
        """Return a key that two names share exactly if they are one tensor (tied weights)."""
        value = self._values[name]
        return value if isinstance(value, Extent) else id(value)


def _info(name: str, value: Value) -> TensorInfo:
    dtype = value.dtype
    if not isinstance(dtype, torch.dtype):
        try:
            dtype = backend.torch_dtype(dtype)
        except (RuntimeError, TypeError) as error:
            msg = f"{name!r} is of {value.dtype}, which torch has no type for"
            raise CheckpointError(msg) from error
    return TensorInfo(name, tuple(value.shape), dtype)


def open_checkpoint(
    path: str | Path, *, variant: str | None = None, subfolder: str = "", key: str | None = None
) -> Checkpoint:
    """Look into a checkpoint without reading any values.

    Args:
        path: A `.safetensors` file, a torch file (`.pt`, `.pth`, `.bin`, `.ckpt`), an index of
            shards (`model.safetensors.index.json`), or a directory as `save_pretrained` writes it;
            safetensors are preferred. The shards of torch_xla's FSDP are a directory of nothing
            else, or a pattern of names (`out/rank-*.pth`).
        variant: The variant of a directory's weights, such as `"fp16"`.
        subfolder: The part of a directory, such as `"transformer"` of a diffusers pipeline.
        key: The key of the weights in a torch file, with dots between nested keys. Not needed if
            they are at the top or under `state_dict`, `model_state_dict`, `model` or `module`.

    Returns:
        A mapping from name to `TensorInfo` that reads values by `read(name)`.

    Raises:
        CheckpointError: no weights are there, they are damaged, or loading them would run code.
    """
    asked = Path(path) / subfolder if subfolder else Path(path)
    for _ in range(_ATTEMPTS):
        before = _identity(asked)
        try:
            made = _open(Path(path), variant, subfolder, key)
        except CheckpointError:
            if _identity(asked) == before:
                raise
        else:
            if _identity(asked) == before:
                return made
    msg = f"{path} was replaced again and again while its files were opened; try again"
    raise CheckpointError(msg)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return a key that changes when a save replaces the files, so that no mix of two is read."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _open(path: Path, variant: str | None, subfolder: str, key: str | None) -> Checkpoint:
    located = locate(path, variant=variant, subfolder=subfolder)
    if located.files[0].suffix in SAFETENSORS:
        return _open_safetensors(path, located)
    return _open_torch(path, located, key)


def of_mapping(tensors: Mapping[str, Any]) -> Checkpoint:
    """Return a checkpoint of tensors and arrays in memory.

    Raises:
        CheckpointError: a value is neither a tensor nor an array.
    """
    for name, value in tensors.items():
        if not isinstance(value, (torch.Tensor, jax.Array, np.ndarray)):
            msg = (
                f"{name!r} is a {type(value).__name__}, expected a torch.Tensor, jax.Array or numpy"
                " array"
            )
            raise CheckpointError(msg)
    return Checkpoint(Path("the mapping"), tensors, Located(()))


def _open_safetensors(path: Path, located: Located) -> Checkpoint:
    headers = {file.name: read_header(OpenFile(file)) for file in located.files}
    names_in = {file: list(header.extents) for file, header in headers.items()}
    _check_index(located, names_in)
    values = {name: e for header in headers.values() for name, e in header.extents.items()}
    made = Checkpoint(path, values, located)
    made.format, made.headers, made.names_in = "safetensors", headers, names_in
    for header in headers.values():
        made.metadata.update(header.metadata)
    return made


def _open_torch(path: Path, located: Located, key: str | None) -> Checkpoint:
    scans = {file.name: torch_file.scan(OpenFile(file), key) for file in located.files}
    names_in = {file: list(scan.tensors) for file, scan in scans.items()}
    if any(scan.shard is not None for scan in scans.values()):
        return _open_shards(path, located, scans)
    if located.weight_map is None and len(scans) > 1:
        msg = (
            f"{path} is {len(scans)} files without an index, and they are not the shards of"
            " torch_xla's FSDP; pass the file that you mean"
        )
        raise CheckpointError(msg)
    _check_index(located, names_in)
    values = {name: value for scan in scans.values() for name, value in scan.tensors.items()}
    made = Checkpoint(path, values, located, next(iter(scans.values())).key)
    made.names_in = names_in
    return made


def _open_shards(
    path: Path, located: Located, scans: Mapping[str, torch_file.TorchFile]
) -> Checkpoint:
    """Open the shards of torch_xla's FSDP as the module that was wrapped."""
    plain = [name for name, scan in scans.items() if scan.shard is None]
    if plain:
        msg = f"{path} has shards of torch_xla's FSDP and {plain[0]}, which is none; take it away"
        raise CheckpointError(msg)
    found = [
        Shard(file, scan.tensors, scan.shard or {})
        for file, scan in zip(located.files, scans.values(), strict=True)
    ]
    values = joined(found)
    made = Checkpoint(path, values, located, next(iter(scans.values())).key)
    made.names_in = {located.files[0].name: list(values)}
    return made


def _check_index(located: Located, names_in: Mapping[str, list[str]]) -> None:
    """Refuse shards that do not hold exactly what their index says."""
    if located.weight_map is None:
        return
    there = {(file, name) for file, names in names_in.items() for name in names}
    absent = [name for name, file in located.weight_map.items() if (file, name) not in there]
    if absent:
        msg = (
            f"{located.index} says that {absent[0]!r} is in {located.weight_map[absent[0]]!r},"
            f" which does not have it ({len(absent)} such names); the index and the shards are not"
            " of one save"
        )
        raise CheckpointError(msg)
    for file, names in names_in.items():
        for name in names:
            said = located.weight_map.get(name)
            if said != file:
                where = "in no file" if said is None else f"in {said!r}"
                msg = (
                    f"{name!r} is in {file!r}, and {located.index} says {where}; the index and the"
                    " shards are not of one save"
                )
                raise CheckpointError(msg)
