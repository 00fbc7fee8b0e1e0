"""Reading one tensor, or a part of one, from its bytes in a file.

Plain reads into a buffer of the tensor's own size: the pages of a memory map would count as host
memory in addition to the copy, and an array over them would change with the file.
"""

import itertools
import math
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tpuport.foundation.errors import CheckpointError

# The most that one read call is asked for; Linux returns at most 2 GiB.
_MOST_BYTES = 1 << 30
# Below this a file is read in pages anyway, so skipping bytes saves nothing.
_PAGE = 4096
_BLOCK = 16 << 20

Bounds = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape and dtype of one tensor in a checkpoint.

    Attributes:
        name: Its name in the checkpoint.
        shape: Its sizes.
        dtype: Its dtype in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class OpenFile:
    """A file of weights, open for reading until it is collected.

    It stays open so that a file replaced meanwhile is not read half old and half new.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            msg = f"{path} cannot be read: {error.strerror}"
            raise CheckpointError(msg) from error
        weakref.finalize(self, os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size

    def read(self, offset: int, count: int) -> bytes:
        """Read the bytes from `offset`.

        Raises:
            CheckpointError: the file is shorter.
        """
        found = bytearray(count)
        self.read_into(memoryview(found), offset)
        return bytes(found)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer of bytes from `offset`.

        Raises:
            CheckpointError: the file is shorter.
        """
        done = 0
        while done < len(buffer):
            piece = buffer[done : done + _MOST_BYTES]
            try:
                count = os.preadv(self._descriptor, [piece], offset + done)
            except OSError as error:
                msg = f"{self.path} cannot be read: {error.strerror}"
                raise CheckpointError(msg) from error
            if count == 0:
                msg = (
                    f"{self.path} is truncated: it ends at byte {offset + done}, and byte"
                    f" {offset + len(buffer)} is needed; download or write it again"
                )
                raise CheckpointError(msg)
            done += count


@dataclass(frozen=True)
class Extent:
    """The place of a tensor's values in a file. Equal extents are the same memory (tied weights).

    Attributes:
        file: The file.
        offset: The byte of the tensor's first element.
        shape: Its sizes.
        dtype: Its dtype.
        strides: Elements between neighbours in each dimension; None for row-major.
    """

    file: OpenFile
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = field(default=None)

    def read(self, bounds: Bounds | None = None) -> torch.Tensor:
        """Read the values into memory of their own, row-major.

        Args:
            bounds: First and last + 1 index in each dimension; None reads everything.

        Raises:
            CheckpointError: the file ends too early.
        """
        if math.prod(self.shape) == 0:
            shape = self.shape if bounds is None else [stop - start for start, stop in bounds]
            return torch.empty(shape, dtype=self.dtype, device="cpu")
        if self.strides is not None:
            return self._read_strided(self.strides, bounds)
        if bounds is None or all(b == (0, n) for b, n in zip(bounds, self.shape, strict=True)):
            whole = torch.empty(self.shape, dtype=self.dtype, device="cpu")
            self.file.read_into(_bytes_of(whole), self.offset)
            return whole
        return self._read_part(bounds)

    def _read_strided(self, strides: Sequence[int], bounds: Bounds | None) -> torch.Tensor:
        span = 1 + sum((n - 1) * s for n, s in zip(self.shape, strides, strict=True))
        flat = torch.empty(span, dtype=self.dtype, device="cpu")
        self.file.read_into(_bytes_of(flat), self.offset)
        whole = flat.as_strided(self.shape, tuple(strides))
        if bounds is not None:
            whole = whole[tuple(slice(*b) for b in bounds)]
        return whole.clone(memory_format=torch.contiguous_format)

    def _read_part(self, bounds: Bounds) -> torch.Tensor:
        out = torch.empty([b - a for a, b in bounds], dtype=self.dtype, device="cpu")
        if out.numel() == 0:
            return out
        partial = [
            i for i, (b, n) in enumerate(zip(bounds, self.shape, strict=True)) if b != (0, n)
        ]
        # The indices from this dimension on are one contiguous run of bytes in the file.
        last = partial[-1]
        inner = math.prod(self.shape[last + 1 :])
        run = (bounds[last][1] - bounds[last][0]) * inner * self.dtype.itemsize
        if last > 0 and run < _PAGE:
            return self._read_blocks(out, bounds)
        steps = [math.prod(self.shape[i + 1 :]) for i in range(last)]
        buffer = _bytes_of(out)
        outer = itertools.product(*(range(*b) for b in bounds[:last]))
        for i, index in enumerate(outer):
            first = sum(map(int.__mul__, index, steps)) + bounds[last][0] * inner
            place = self.offset + first * self.dtype.itemsize
            self.file.read_into(buffer[i * run : (i + 1) * run], place)
        return out

    def _read_blocks(self, out: torch.Tensor, bounds: Bounds) -> torch.Tensor:
        """Read full rows of the first dimension, a few at a time, and keep what is asked for."""
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        count = max(1, _BLOCK // row)
        inner = tuple(slice(*b) for b in bounds[1:])
        for start in range(*bounds[0], count):
            stop = min(start + count, bounds[0][1])
            rows = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype, device="cpu")
            self.file.read_into(_bytes_of(rows), self.offset + start * row)
            out[start - bounds[0][0] : stop - bounds[0][0]] = rows[(slice(None), *inner)]
        return out


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a CPU tensor as a file holds them: row-major, little-endian."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return _bytes_of(tensor) if tensor.numel() else memoryview(b"")


def bounds_of(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Convert an index of slices without a step to bounds in each dimension.

    Raises:
        CheckpointError: the index has something else, or more dimensions than the tensor.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if len(parts) > len(shape) or not all(
        isinstance(part, slice) and part.step in (None, 1) for part in parts
    ):
        msg = (
            f"a tensor of shape {shape} is read by slices without a step, one for each dimension,"
            f" got {index!r}; read(name)[...] takes any index"
        )
        raise CheckpointError(msg)
    parts = (*parts, *[slice(None)] * (len(shape) - len(parts)))
    found = [part.indices(n)[:2] for part, n in zip(parts, shape, strict=True)]
    return tuple((start, max(start, stop)) for start, stop in found)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal to the bit (NaN equals itself, -0.0 is not 0.0)."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*flat)
