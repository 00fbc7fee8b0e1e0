"""`tpuport.load_checkpoint`: files to arrays, a few tensors at a time.

Readers run ahead of the device by a bounded number of bytes, so the host holds the arrays (on a
CPU backend) and that bound, and never a second copy.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop import backend
from tpuport.foundation.interop.dtypes import Policy, cast, compiled, held, make_table, put
from tpuport.weights.checkpoint import Checkpoint, open_checkpoint
from tpuport.weights.read import bounds_of

Place = Callable[[str, jax.ShapeDtypeStruct], Any]
Progress = Callable[[int, int], None]

# Enough to keep a disk busy, and little compared to a model.
_BYTES_AHEAD = 128 << 20
_READERS = 4


@dataclass(frozen=True)
class Wanted:
    """One tensor to load.

    Attributes:
        name: Its name in the result.
        source: Its name in the checkpoint.
        dtype: The torch dtype to cast it to.
    """

    name: str
    source: str
    dtype: torch.dtype


def load_checkpoint(
    path: str | Path,
    *,
    dtype: Policy = None,
    only: str | Sequence[str] | None = None,
    prefix: str = "",
    rename: Callable[[str], str | None] | None = None,
    place: Place | None = None,
    variant: str | None = None,
    subfolder: str = "",
    key: str | None = None,
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """Load weights straight into arrays of jax, without a second copy in host memory.

    Args:
        path: A file, an index of shards or a directory, as for `tpuport.open_checkpoint`.
        dtype: The dtype of floating tensors (`"bfloat16"`), or dtypes by regular expressions
            searched for in the file's names, of which the first found decides:
            `{"norm|bias": "float32", "": "bfloat16"}`. None keeps the file's.
        only: Regular expressions: names in which none is found are not read.
        prefix: Load the names that start with it, without it (`"model."` for Lightning).
        rename: Returns the name in the result (after `prefix` is taken off); None drops the tensor.
        place: Returns for each name and `jax.ShapeDtypeStruct` a `jax.sharding.Sharding`, a device,
            or None for the default device. Each process reads only the slices of its devices.
        variant: The variant of a directory's weights, such as `"fp16"`.
        subfolder: The part of a directory, such as `"transformer"`.
        key: The key of the weights in a torch file.
        progress: Called with the bytes done and the bytes in all.

    Returns:
        Arrays by name, in the file's order; tied weights are one array. As everywhere in tpuport
        64-bit types are held in 32 bits unless `jax_enable_x64` is on.

    Raises:
        CheckpointError: the checkpoint is damaged or not there, or a value does not fit in the
            dtype that it gets.
        UsageError: an argument fits nothing in the checkpoint, or two names become one.
    """
    opened = open_checkpoint(path, variant=variant, subfolder=subfolder, key=key)
    wanted = choose(opened, make_table(dtype), only=only, prefix=prefix, rename=rename)
    return load_arrays(opened, wanted, place=place, progress=progress)


def choose(
    opened: Checkpoint,
    table: Callable[[str, torch.dtype], torch.dtype],
    *,
    only: str | Sequence[str] | None,
    prefix: str,
    rename: Callable[[str], str | None] | None,
) -> list[Wanted]:
    """Return the tensors to load, each with its new name and dtype.

    Raises:
        UsageError: an argument fits no name, or two names become one.
    """
    patterns = [compiled(p) for p in ([only] if isinstance(only, str) else only or [])]
    for pattern in patterns:
        if not any(pattern.search(name) for name in opened):
            msg = f"only={pattern.pattern!r} is found in no name of {opened.path}{_some(opened)}"
            raise UsageError(msg)
    if prefix and not any(name.startswith(prefix) for name in opened):
        msg = f"no name of {opened.path} starts with prefix={prefix!r}{_some(opened)}"
        raise UsageError(msg)
    found: dict[str, Wanted] = {}
    for source, info in opened.items():
        if not source.startswith(prefix) or (
            patterns and not any(p.search(source) for p in patterns)
        ):
            continue
        name = source.removeprefix(prefix)
        new = name if rename is None else rename(name)
        if new is None:
            continue
        if new in found:
            msg = f"rename gives {new!r} for both {found[new].source!r} and {source!r}"
            raise UsageError(msg)
        found[new] = Wanted(new, source, table(source, info.dtype))
    return list(found.values())


def _some(names: Iterable[str]) -> str:
    shown = [repr(name) for _, name in zip(range(3), names, strict=False)]
    return f"; it has {', '.join(shown)}, ..." if shown else "; it has none"


# -- the pipeline ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """One array to load: its source, its parts and its sharding."""

    wanted: Wanted
    struct: jax.ShapeDtypeStruct
    where: Any
    # The distinct parts that this process needs, by their bounds; None is the entire array.
    parts: tuple[tuple[tuple[int, int], ...] | None, ...]
    nbytes: int


Parts = dict[Any, np.ndarray]


def load_arrays(
    opened: Checkpoint,
    wanted: Iterable[Wanted],
    *,
    place: Place | None = None,
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """Load arrays by name: several threads read them, and this one puts them on their devices.

    Raises:
        CheckpointError: a file is damaged, or a value does not fit.
    """
    jobs, first_of = _jobs(opened, wanted, place)
    total, done = sum(job.nbytes for job in jobs), 0
    arrays: dict[str, jax.Array] = {}
    for job, parts in _read_ahead(opened, jobs):
        arrays[job.wanted.name] = _assemble(job, parts)
        done += job.nbytes
        if progress is not None:
            progress(done, total)
    return {name: arrays[first] for name, first in first_of.items()}


def _jobs(
    opened: Checkpoint, wanted: Iterable[Wanted], place: Place | None
) -> tuple[list[_Job], dict[str, str]]:
    jobs: list[_Job] = []
    known: dict[Any, str] = {}
    first_of: dict[str, str] = {}
    for one in wanted:
        shape = opened[one.source].shape
        struct = jax.ShapeDtypeStruct(shape, _jax_dtype(one))
        where = None if place is None else place(one.name, struct)
        same = (opened.memory_of(one.source), one.dtype, where)
        first_of[one.name] = known.setdefault(same, one.name)
        if first_of[one.name] == one.name:
            parts = _parts(one.name, shape, where)
            jobs.append(_Job(one, struct, where, parts, opened[one.source].nbytes))
    return jobs, first_of


def _jax_dtype(one: Wanted) -> np.dtype:
    # A dtype that jax lacks is refused later, by name, when the values are read.
    known = one.dtype is not torch.float8_e8m0fnu
    return backend.jax_dtype(one.dtype if known else torch.uint8)


def _parts(name: str, shape: tuple[int, ...], where: Any) -> tuple[Any, ...]:
    if where is None or isinstance(where, jax.Device):
        return (None,)
    if not isinstance(where, jax.sharding.Sharding):
        msg = (
            f"place({name!r}, ...) gave a {type(where).__name__}, expected a jax.sharding.Sharding,"
            " a jax.Device or None"
        )
        raise UsageError(msg)
    try:
        indices = where.addressable_devices_indices_map(shape)
    except ValueError as error:
        msg = f"place({name!r}, ...) gave a sharding that does not fit {shape}: {error}"
        raise UsageError(msg) from error
    return tuple({bounds_of(index, shape): None for index in indices.values()})


def _read_ahead(opened: Checkpoint, jobs: list[_Job]) -> Iterator[tuple[_Job, Parts]]:
    """Yield each job with its values, in order; readers are ahead by a bounded number of bytes."""
    pending: deque[tuple[_Job, Future[Parts]]] = deque()
    ahead = 0
    pool = ThreadPoolExecutor(min(_READERS, 2 * (os.cpu_count() or 1)), "tpuport-checkpoint")
    try:
        for job in jobs:
            while pending and ahead + job.nbytes > _BYTES_AHEAD:
                first, future = pending.popleft()
                yield first, future.result()
                ahead -= first.nbytes
            pending.append((job, pool.submit(_read, opened, job)))
            ahead += job.nbytes
        while pending:
            first, future = pending.popleft()
            yield first, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _read(opened: Checkpoint, job: _Job) -> Parts:
    found: Parts = {}
    for bounds in job.parts:
        values = opened.read_bounds(job.wanted.source, bounds)
        values = cast(values, job.wanted.dtype, job.wanted.source)
        found[bounds] = held(values, job.wanted.source, job.struct.dtype)
    return found


def _assemble(job: _Job, parts: Parts) -> jax.Array:
    if None in parts:
        return put(parts[None], job.where)
    shape = job.struct.shape
    made = jax.make_array_from_callback(
        shape, job.where, lambda index: parts[bounds_of(index, shape)], dtype=job.struct.dtype
    )
    return made.block_until_ready()
