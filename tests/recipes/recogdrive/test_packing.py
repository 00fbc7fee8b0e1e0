"""Samples in rows of static sizes."""

import numpy as np
import pytest

from recipes.recogdrive.chats import IGNORED
from recipes.recogdrive.packing import (
    Bucket,
    fill_batch,
    make_buckets,
    plan_epoch,
    weight_of,
)
from tpuport.foundation.errors import UsageError

BUCKETS = [Bucket(16, 2), Bucket(32, 4), Bucket(64, 8)]


def sizes(count: int = 100) -> list[tuple[int, int]]:
    random = np.random.default_rng(0)
    return [(int(n), int(min(8, n // 8))) for n in random.integers(4, 65, count)]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_each_sample_is_in_an_epoch_once(pack: bool, num_rows: int):
    given = sizes()
    plan = plan_epoch(given, BUCKETS, num_rows=num_rows, pack=pack, seed=1)
    assert sorted(i for b in plan for row in b.rows for i in row) == list(range(100))
    for batch in plan:
        assert len(batch.rows) == num_rows
        for row in batch.rows:
            assert sum(given[i][0] for i in row) <= batch.bucket.length
            assert sum(given[i][1] for i in row) <= batch.bucket.tiles
            assert len(row) <= 1 or pack
    empty = sum(not row for b in plan for row in b.rows)
    assert empty < num_rows


def test_packing_fills_rows():
    given = [(length, 0) for length, _ in sizes(1000)]
    used = sum(length for length, _ in given)

    def filled(pack: bool) -> float:
        plan = plan_epoch(given, BUCKETS[-1:], num_rows=4, pack=pack, seed=1)
        return used / sum(b.bucket.length * len(b.rows) for b in plan)

    assert filled(True) > 0.95
    assert filled(False) < 0.6


def test_the_order_follows_from_the_seed():
    def order(seed: int) -> list[int]:
        plan = plan_epoch(sizes(), BUCKETS, num_rows=2, pack=True, seed=seed)
        return [i for b in plan for row in b.rows for i in row]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_what_fits_no_row_is_refused():
    with pytest.raises(UsageError, match="sample 1 has 65 tokens and 1 tiles"):
        plan_epoch([(5, 1), (65, 1)], BUCKETS, num_rows=1, pack=True, seed=0)
    with pytest.raises(UsageError, match="9 tiles, and the largest row holds 64 tokens and 8"):
        plan_epoch([(5, 9)], BUCKETS, num_rows=1, pack=True, seed=0)


def test_a_length_bounds_the_tiles():
    assert make_buckets([64, 16, 64], 4, bound=6) == [Bucket(16, 4), Bucket(64, 6)]
    with pytest.raises(UsageError, match="expected one or more"):
        make_buckets([], 4, 6)


def sample(length: int, tiles: int, first: int) -> dict[str, np.ndarray]:
    ids = np.arange(first, first + length, dtype=np.int32)
    labels = ids.copy()
    labels[1:3] = IGNORED
    return {
        "input_ids": ids,
        "labels": labels,
        "pixel_values": np.full((tiles, 3, 2, 2), first, np.float32),
    }


def test_rows_are_laid_out():
    rows = [[sample(5, 1, 10), sample(4, 1, 20)], []]
    batch = fill_batch(rows, Bucket(12, 3), tile_shape=(3, 2, 2), reduction="sample")
    assert batch["input_ids"][0].tolist() == [10, 11, 12, 13, 14, 20, 21, 22, 23, 0, 0, 0]
    # The first token of a sample is predicted by nothing of its own.
    ignored = IGNORED
    assert batch["labels"][0].tolist() == [
        *(ignored, ignored, ignored, 13, 14),
        *(ignored, ignored, ignored, 23),
        *[ignored] * 3,
    ]
    assert batch["segments"][0].tolist() == [1] * 5 + [2] * 4 + [0] * 3
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 0]
    np.testing.assert_allclose(
        batch["loss_weight"][0], [0, 0, 0, 1 / 3, 1 / 3, 0, 0, 0, 1 / 2, 0, 0, 0]
    )
    assert batch["image_flags"].tolist() == [[1, 1, 0], [0, 0, 0]]
    assert batch["pixel_values"][0, 1, 0, 0, 0] == 20
    assert not batch["segments"][1].any()
    assert not batch["loss_weight"][1].any()
    with pytest.raises(UsageError, match="a row of 8 tokens was to hold 9"):
        fill_batch(rows, Bucket(8, 3), tile_shape=(3, 2, 2))


def test_weights_of_labels():
    assert weight_of(0, "sample") == 0
    assert weight_of(4, "token") == 1
    assert weight_of(4, "sample") == 0.25
    assert weight_of(4, "square") == 0.5
