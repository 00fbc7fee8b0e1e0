"""Ragged entries padded to one of a few lengths, so that only a few programs are compiled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tpuport.foundation.errors import UsageError


@dataclass(frozen=True)
class Buckets:
    """Lengths that ragged entries are padded to, each batch to the smallest one that fits.

        Buckets((512, 1024, 2048), fill={"input_ids": 0, "labels": -100, "attention_mask": 0})

    Args:
        lengths: one program is compiled for each.
        fill: the padding value by the name of an entry of the samples (which are mappings).
            Entries that are not named stay. If empty, every entry with dims is padded with zeros;
            then all entries of a sample need the same length.
        dim: the ragged dim of a sample (in a batch it is the next one).
        sizes: the length of each sample by its index; needed with several lengths on several
            processes, which have to choose the same one.

    Raises:
        UsageError: there is no length, or one is not positive.
    """

    lengths: Sequence[int]
    fill: Mapping[str, float] = field(default_factory=dict)
    dim: int = 0
    sizes: Any = None

    def __post_init__(self) -> None:
        lengths = tuple(sorted({int(length) for length in self.lengths}))
        if not lengths or lengths[0] < 1:
            raise UsageError(f"buckets: expected lengths from 1 up, got {list(self.lengths)}")
        object.__setattr__(self, "lengths", lengths)

    def length_for(self, longest: int) -> int:
        """Return the smallest length that something fits in.

        Raises:
            UsageError: there is none.
        """
        for length in self.lengths:
            if longest <= length:
                return length
        raise UsageError(
            f"a sample has length {longest}, and the longest bucket is {self.lengths[-1]}. What to"
            " do: add a longer bucket, or cut or leave out such samples in the dataset"
        )

    def length_of(self, indices: Sequence[int]) -> int | None:
        """Return the length for samples by their indices, if `sizes` tells."""
        if self.sizes is None:
            return self.lengths[0] if len(self.lengths) == 1 else None
        return self.length_for(int(max(self.sizes[index] for index in indices)))

    def pad_samples(self, samples: list[Any], length: int | None) -> list[Any]:
        """Pad the ragged entries of samples to one length."""
        found = [self._ragged(sample, self.dim, f"sample {i}") for i, sample in enumerate(samples)]
        longest = max((n for entries in found for n in entries.values()), default=0)
        target = self._target(longest, length)
        return [
            self._pad(sample, entries, self.dim, target)
            for sample, entries in zip(samples, found, strict=True)
        ]

    def pad_batch(self, batch: Any, length: int | None) -> Any:
        """Pad the ragged entries of a batch to one of the lengths."""
        dim = self.dim + 1
        entries = self._ragged(batch, dim, "the batch")
        target = self._target(max(entries.values(), default=0), length)
        return self._pad(batch, entries, dim, target)

    def _target(self, longest: int, length: int | None) -> int:
        fits = self.length_for(longest)
        if length is not None and fits > length:
            raise UsageError(
                f"buckets: a sample has length {longest}, and sizes= says at most {length}. What to"
                " do: give the lengths that the dataset gives"
            )
        return fits if length is None else length

    def _ragged(self, given: Any, dim: int, where: str) -> dict[Any, int]:
        """Return the lengths of the entries to pad, by name (None: the value itself)."""
        if not isinstance(given, Mapping | torch.Tensor | np.ndarray):
            raise UsageError(
                f"buckets: {where} is a {type(given).__name__}: expected a mapping with named"
                " entries, or one tensor. What to do: give dicts, or pad in collate"
            )
        value: dict[Any, Any] = dict(given) if isinstance(given, Mapping) else {None: given}
        if self.fill:
            missing = [name for name in self.fill if name not in value]
            if missing:
                raise UsageError(f"buckets: {where} has no entry {missing[0]!r}, which fill= names")
            return {name: np.shape(value[name])[dim] for name in self.fill}
        lengths = {name: np.shape(one)[dim] for name, one in value.items() if np.ndim(one) > dim}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise UsageError(
                f"buckets: the entries of {where} have different lengths along dim {dim} ({shown}),"
                " so which of them are ragged is not known. What to do: Buckets(lengths,"
                " fill={'input_ids': 0, ...}) names them"
            )
        return lengths

    def _pad(self, value: Any, entries: dict[Any, int], dim: int, length: int) -> Any:
        if None in entries:
            return _padded(value, dim, length, 0)
        if not entries:
            return value
        made = {name: _padded(value[name], dim, length, self.fill.get(name, 0)) for name in entries}
        return {**value, **made}


def as_buckets(given: Any) -> Buckets | None:
    """Return `Buckets`, made from lengths if need be."""
    return given if given is None or isinstance(given, Buckets) else Buckets(given)


def _padded(value: Any, dim: int, length: int, fill: float) -> torch.Tensor:
    tensor = torch.as_tensor(value)
    missing = length - tensor.shape[dim]
    if not missing:
        return tensor
    widths = [0, 0] * (tensor.ndim - dim - 1) + [0, missing]
    return torch.nn.functional.pad(tensor, widths, value=fill)
