"""Packing of samples into rows of a few static lengths, so that few programs are compiled.

A row is one sample or several, one after another. `segments` numbers them from 1, and is 0 for
padding. A token attends to earlier ones of its own segment only, and positions restart in each. So
a sample counts as it would alone, and no token is predicted from another sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from recipes.recogdrive.chats import IGNORED
from recipes.recogdrive.tiles import pad_tiles
from tpuport.foundation.errors import UsageError

LossReduction = Literal["token", "sample", "square"]


@dataclass(frozen=True, order=True)
class Bucket:
    """The static size of rows.

    Attributes:
        length: Number of tokens.
        tiles: Number of image tiles.
    """

    length: int
    tiles: int


@dataclass(frozen=True)
class PlannedBatch:
    """The samples of a batch.

    Attributes:
        bucket: Size of its rows.
        rows: Indices of the samples of each row. A row may be empty.
    """

    bucket: Bucket
    rows: tuple[tuple[int, ...], ...]


def make_buckets(lengths: Sequence[int], tokens_per_tile: int, bound: int) -> list[Bucket]:
    """Return buckets of some lengths, shortest first.

    The tokens of a tile take room in a row, so a length bounds the tiles, too.

    Args:
        lengths: Lengths of rows, in tokens.
        tokens_per_tile: Number of tokens per tile.
        bound: Maximum number of tiles of a row in any case (`--num_images_expected`).

    Raises:
        UsageError: There are no lengths, or one is below 1.
    """
    if not lengths or min(lengths) < 1:
        raise UsageError(f"lengths of rows: expected one or more, each 1 or more; got {lengths}")
    return [Bucket(n, max(1, min(bound, n // tokens_per_tile))) for n in sorted({*lengths})]


def plan_epoch(
    sizes: Sequence[tuple[int, int]],
    buckets: Sequence[Bucket],
    *,
    num_rows: int,
    pack: bool,
    seed: int,
    window: int = 1024,
) -> list[PlannedBatch]:
    """Plan the batches of one epoch: each sample once, in an order drawn by a seed.

    Args:
        sizes: Tokens and tiles of each sample.
        buckets: Buckets of the rows. A row is in the smallest one that fits it.
        num_rows: Rows of a batch. The remaining rows of a bucket are batched with the next larger
            ones. The last batch has empty rows.
        pack: Whether to put several samples in a row.
        seed: Random seed of the order, different for each epoch.
        window: Number of samples that are packed together, longest first. More samples fill rows
            better, and mix lengths less.

    Raises:
        UsageError: A sample is larger than every bucket.
    """
    buckets = sorted(buckets)
    _check_sizes(sizes, buckets[-1])
    random = np.random.default_rng(seed)
    order = [int(i) for i in random.permutation(len(sizes))]
    if pack:
        windows = [order[i : i + window] for i in range(0, len(order), window)]
        rows = [row for some in windows for row in _packed(some, sizes, buckets[-1])]
    else:
        rows = [(index,) for index in order]
    batches, waiting = [], []
    by_bucket: dict[Bucket, list[tuple[int, ...]]] = {bucket: [] for bucket in buckets}
    for row in rows:
        by_bucket[_smallest(row, sizes, buckets)].append(row)
    for bucket, own in by_bucket.items():
        waiting += own
        while len(waiting) >= num_rows:
            batches.append(PlannedBatch(bucket, tuple(waiting[:num_rows])))
            waiting = waiting[num_rows:]
    if waiting:
        rows_left = [*waiting, *[()] * (num_rows - len(waiting))]
        batches.append(PlannedBatch(_largest(rows_left, sizes, buckets), tuple(rows_left)))
    return [batches[int(i)] for i in random.permutation(len(batches))]


def _check_sizes(sizes: Sequence[tuple[int, int]], largest: Bucket) -> None:
    for index, (length, tiles) in enumerate(sizes):
        if length > largest.length or tiles > largest.tiles:
            raise UsageError(
                f"sample {index} has {length} tokens and {tiles} tiles, and the largest row holds"
                f" {largest.length} tokens and {largest.tiles} tiles. What to do: allow longer"
                " rows, or lower --max_seq_length or --max_dynamic_patch"
            )


def _packed(
    samples: list[int], sizes: Sequence[tuple[int, int]], largest: Bucket
) -> list[tuple[int, ...]]:
    """Pack samples into rows by first fit, longest first."""
    rows: list[list[int]] = []
    room: list[list[int]] = []
    for index in sorted(samples, key=lambda i: -sizes[i][0]):
        length, tiles = sizes[index]
        fitting = (n for n, left in enumerate(room) if length <= left[0] and tiles <= left[1])
        number = next(fitting, len(rows))
        if number == len(rows):
            rows.append([])
            room.append([largest.length, largest.tiles])
        rows[number].append(index)
        room[number][0] -= length
        room[number][1] -= tiles
    return [tuple(row) for row in rows]


def _smallest(
    row: Sequence[int], sizes: Sequence[tuple[int, int]], buckets: Sequence[Bucket]
) -> Bucket:
    length, tiles = (sum(sizes[i][part] for i in row) for part in range(2))
    return next(b for b in buckets if length <= b.length and tiles <= b.tiles)


def _largest(
    rows: Sequence[Sequence[int]], sizes: Sequence[tuple[int, int]], buckets: Sequence[Bucket]
) -> Bucket:
    return max(_smallest(row, sizes, buckets) for row in rows)


def weight_of(num_labels: int, reduction: LossReduction) -> float:
    """Return the weight of each label of a sample with this number of labels.

    "token" weights every label of a batch equally, "sample" every sample, and "square" is between
    the two.
    """
    if num_labels == 0:
        return 0.0
    return {"token": 1.0, "sample": 1.0 / num_labels, "square": num_labels**-0.5}[reduction]


def fill_batch(
    rows: Sequence[Sequence[dict[str, Any]]],
    bucket: Bucket,
    *,
    tile_shape: tuple[int, ...],
    reduction: LossReduction = "token",
) -> dict[str, np.ndarray]:
    """Return the arrays of a batch.

    Args:
        rows: Samples of each row: input_ids and labels (length,), pixel_values (tiles, 3, side,
            side).
        bucket: Static size of the rows.
        tile_shape: (3, side, side).
        reduction: How labels are weighted.

    Returns:
        input_ids, labels, segments, position_ids int32 and loss_weight float32, all (rows, length);
        pixel_values float32 (rows, tiles, 3, side, side), image_flags int32 (rows, tiles).

    Raises:
        UsageError: The samples of a row do not fit in it.
    """
    made = [_filled_row(row, bucket, tile_shape, reduction) for row in rows]
    return {name: np.stack([row[name] for row in made]) for name in made[0]}


def _filled_row(
    samples: Sequence[dict[str, Any]],
    bucket: Bucket,
    tile_shape: tuple[int, ...],
    reduction: LossReduction,
) -> dict[str, np.ndarray]:
    length = sum(len(s["input_ids"]) for s in samples)
    if length > bucket.length:
        raise UsageError(f"a row of {bucket.length} tokens was to hold {length}")
    row: dict[str, Any] = {
        name: np.zeros(bucket.length, np.int32)
        for name in ("input_ids", "labels", "segments", "position_ids")
    }
    row["labels"][:] = IGNORED
    row["loss_weight"] = np.zeros(bucket.length, np.float32)
    start = 0
    for number, sample in enumerate(samples, 1):
        place = slice(start, start + len(sample["input_ids"]))
        labels = np.array(sample["labels"])
        weight = weight_of(int((labels != IGNORED).sum()), reduction)
        labels[:1] = IGNORED  # it would be predicted from another sample
        row["input_ids"][place] = sample["input_ids"]
        row["labels"][place] = labels
        row["segments"][place] = number
        row["position_ids"][place] = np.arange(len(labels))
        row["loss_weight"][place] = np.where(labels == IGNORED, 0, weight)
        start = place.stop
    tiles = [s["pixel_values"] for s in samples if len(s["pixel_values"])]
    values = np.concatenate(tiles) if tiles else np.zeros((0, *tile_shape), np.float32)
    return {**row, **pad_tiles(values, bucket.tiles, "a row")}
