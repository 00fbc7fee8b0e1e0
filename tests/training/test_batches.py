"""Batches have fixed shapes, the same order whoever reads them, and a place to go on from."""

import importlib.util
import itertools
import json
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import tpuport
from tests.training.small import Small, loss
from tpuport.foundation.errors import UsageError
from tpuport.training import Batches, Buckets, make_train_step
from tpuport.training.input.sources import ArrayPlace, HostShard


class Numbered(torch.utils.data.Dataset):
    """Samples that say which they are, with noise; one of them may not be readable."""

    def __init__(self, length: int = 37, broken: int | None = None) -> None:
        self.length, self.broken = length, broken

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.broken:
            raise KeyError(f"sample {index} is damaged")
        return {"i": index, "noise": torch.rand(()), "own": np.random.rand(2).astype("f")}


def first(batches: Any, count: int) -> list[Any]:
    return list(itertools.islice(batches, count))


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)


def test_an_epoch_has_each_sample_once_and_its_own_order():
    batches = Batches(Numbered(32), batch_size=8)
    orders = [torch.cat([b["i"] for b in batches.epoch()]).tolist() for _ in range(2)]
    assert [sorted(order) for order in orders] == [list(range(32))] * 2
    assert orders[0] != orders[1] != list(range(32))
    assert (len(batches), batches.position["epoch"], batches.position["batch"]) == (4, 2, 0)
    again = Batches(Numbered(32), batch_size=8)
    assert torch.cat([b["i"] for b in again.epoch()]).tolist() == orders[0]
    other = Batches(Numbered(32), batch_size=8, seed=1)
    assert torch.cat([b["i"] for b in other.epoch()]).tolist() != orders[0]
    still = Batches(Numbered(32), batch_size=8, shuffle=False)
    assert torch.cat([b["i"] for b in still.epoch()]).tolist() == list(range(32))


@pytest.mark.parametrize("taken", [3, 4, 6])
def test_what_comes_after_a_restart_is_what_would_have_come(taken: int):
    whole = first(Batches(Numbered(), batch_size=8), 9)
    begun = Batches(Numbered(), batch_size=8)
    head = first(begun, taken)
    position = json.loads(json.dumps(begun.position))
    later = Batches(Numbered(), batch_size=8)
    later.restore(position)
    assert_same(head + first(later, 9 - taken), whole)


def test_random_numbers_are_a_samples_own_and_the_process_keeps_its():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    batches = first(Batches(Numbered(), batch_size=8), 8)
    assert torch.equal(torch.rand(3), expected)
    noise = {
        (int(i), e): float(n)
        for e, b in enumerate(batches)
        for i, n in zip(b["i"], b["noise"], strict=True)
    }
    assert len(set(noise.values())) == len(noise)
    halves = [first(Batches(Numbered(), batch_size=4), 1)[0], batches[0]]
    torch.testing.assert_close(halves[0]["noise"], halves[1]["noise"][:4])


def test_processes_read_their_rows_of_the_same_batches():
    batches = Batches(Numbered(), batch_size=8, last="pad")
    whole = [
        r.batch for r in itertools.islice(batches._source.read(batches._place, HostShard()), 5)
    ]
    parts = [
        [
            r.batch
            for r in itertools.islice(batches._source.read(batches._place, HostShard(p, 2)), 5)
        ]
        for p in range(2)
    ]
    joined = [{n: torch.cat([a[n], b[n]]) for n in a} for a, b in zip(*parts, strict=True)]
    assert_same(joined, whole)
    with pytest.raises(UsageError, match="a batch of 8 does not divide over 3 processes"):
        next(batches._source.read(batches._place, HostShard(0, 3)))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("last", ["drop", "pad"])
def test_another_number_of_processes_goes_on_with_the_same_batches(count: int, last: Any):
    def read(place: ArrayPlace, processes: int, steps: int) -> list[Any]:
        batches = Batches(Numbered(46), batch_size=12, last=last)
        sources = [batches._source.read(place, HostShard(p, processes)) for p in range(processes)]
        parts = [list(itertools.islice(source, steps)) for source in sources]
        assert len({part[-1].after for part in parts}) == 1
        joined = [
            {n: torch.cat([row.batch[n] for row in rows]) for n in rows[0].batch}
            for rows in zip(*parts, strict=True)
        ]
        return [parts[0][-1].after, *joined]

    _, *whole = read(ArrayPlace(), 1, 9)
    place, *head = read(ArrayPlace(), 4, 2)
    _, *tail = read(place, count, 7)
    assert_same(head + tail, whole)


def test_a_short_batch_is_left_out_or_padded_with_a_mask():
    assert len(Batches(Numbered(), batch_size=8)) == 4
    padded = list(Batches(Numbered(), batch_size=8, last="pad", shuffle=False).epoch())
    assert [b["sample_mask"].sum().item() for b in padded] == [8, 8, 8, 8, 5]
    assert padded[-1]["i"].tolist() == [32, 33, 34, 35, 36, 32, 33, 34]
    pairs = torch.utils.data.TensorDataset(torch.arange(5.0), torch.arange(5))
    *_, (x, y, mask) = Batches(pairs, batch_size=4, last="pad", shuffle=False).epoch()
    assert (x.tolist(), y.tolist(), mask.tolist()) == ([4] * 4, [4] * 4, [True] + [False] * 3)
    small = Batches(Numbered(3), batch_size=8, last="pad")
    assert next(small.epoch())["i"].shape == (8,)
    with pytest.raises(UsageError, match="3 samples make no batch of 8"):
        Batches(Numbered(3), batch_size=8)


def ragged(length: int) -> list[dict[str, Any]]:
    return [
        {"ids": np.arange(n), "labels": torch.arange(n), "image": torch.zeros(3, 2)}
        for n in range(1, length)
    ]


def test_ragged_samples_are_padded_to_the_smallest_length_that_fits():
    buckets = Buckets((4, 8), fill={"ids": 0, "labels": -100})
    batches = Batches(ragged(9), batch_size=4, shuffle=False, buckets=buckets)
    one, two = batches.epoch()
    assert (one["ids"].shape, two["labels"].shape) == ((4, 4), (4, 8))
    assert one["image"].shape == (4, 3, 2)
    assert one["labels"][0].tolist() == [0, -100, -100, -100]
    assert one["ids"][1].tolist() == [0, 1, 0, 0]
    own = Batches(
        ragged(9),
        batch_size=2,
        shuffle=False,
        buckets=Buckets((4, 8), fill={"ids": 7}),
        collate=lambda s: {
            "ids": torch.nn.utils.rnn.pad_sequence(
                [torch.as_tensor(x["ids"]) for x in s], batch_first=True
            )
        },
    )
    assert [b["ids"].shape[1] for b in own.epoch()] == [4, 4, 8, 8]
    alone = [torch.arange(n) for n in (2, 3)]
    assert next(iter(Batches(alone, batch_size=2, buckets=(5,)))).shape == (2, 5)


def test_what_is_ragged_has_to_be_known():
    short = Buckets((4,), fill={"ids": 0, "labels": 0})
    with pytest.raises(UsageError, match="length 8, and the longest bucket is 4"):
        list(Batches(ragged(9), 4, shuffle=False, buckets=short).epoch())
    with pytest.raises(
        UsageError, match=r"different lengths along dim 0 \(ids: 1, labels: 1, image: 3\)"
    ):
        next(iter(Batches(ragged(9), batch_size=4, shuffle=False, buckets=(8,))))
    batches = Batches(ragged(9), batch_size=4, buckets=Buckets((4, 8), fill={"ids": 0}))
    with pytest.raises(UsageError, match="processes have to choose the same length"):
        next(batches._source.read(batches._place, HostShard(0, 2)))
    sizes = Buckets((4, 8), fill={"ids": 0, "labels": 0}, sizes=range(1, 9))
    batches = Batches(ragged(9), batch_size=8, shuffle=False, buckets=sizes)
    assert next(batches._source.read(batches._place, HostShard(0, 2))).batch["ids"].shape == (4, 8)


def test_worker_processes_read_the_same_and_start_without_a_fork():
    threads = threading.active_count()
    expected = first(Batches(Numbered(), batch_size=8, last="pad"), 7)
    with Batches(Numbered(), batch_size=8, last="pad", workers=2) as batches:
        assert_same(first(batches, 7), expected)
        assert batches.position["batch"] == 2
    deadline = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() == threads


def test_an_error_in_a_worker_is_raised_with_its_traceback_and_the_place_stays():
    step = make_train_step(tpuport.convert(Small(0.0)), loss)
    batches = Batches(Numbered(12, broken=5), batch_size=4, shuffle=False, workers=1)
    with batches, batches.device_iterator(step) as given:
        assert [int(v) for v in next(given).values[0]] == [0, 1, 2, 3]
        with pytest.raises(KeyError, match=r"(?s)in __getitem__.*sample 5 is damaged"):
            next(given)
        with pytest.raises(KeyError, match="sample 5 is damaged"):
            next(given)
        assert batches.position["batch"] == 1
    with pytest.raises(RuntimeError, match="the input was closed"):
        next(given)


def test_batches_are_placed_ahead_and_count_when_they_are_taken():
    step = make_train_step(tpuport.convert(Small(0.0)), loss)
    batches = Batches(Numbered(), batch_size=8, prefetch=3)
    given = batches.device_iterator(step)
    call = next(given)
    assert len(given._ready) == 3
    assert (batches.position["batch"], call.rows) == (1, 8)
    assert call.metas[0].dtype == torch.int64
    batches.restore(batches.position)
    with pytest.raises(UsageError, match="restored to another position while they were read"):
        next(given)


def test_batches_that_were_read_ahead_are_not_lost_when_their_iterator_is_closed():
    batches = Batches(Numbered(), batch_size=8, shuffle=False)
    with batches.device_iterator(None) as given:
        next(given)
    with pytest.raises(RuntimeError, match="the input was closed"):
        next(given)
    assert next(batches.device_iterator(None))["i"][0] == 8


class Stream(torch.utils.data.IterableDataset):
    """Samples one after another; each worker gives its own."""

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(torch.arange(start, 10, step))


def test_streams_end_their_epochs_and_are_gone_on_with():
    batches = Batches(Stream(), batch_size=4, last="pad")
    found = list(batches.epoch())
    assert [x.tolist() for x, _ in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 8, 9]]
    assert found[-1][1].tolist() == [True, True, False, False]
    assert batches.position["epoch"] == 1
    batches.restore({**batches.position, "epoch": 0, "batch": 1})
    assert next(iter(batches))[0].tolist() == [4, 5, 6, 7]
    once = Batches(iter(range(8)), batch_size=4)
    list(once.epoch())
    with pytest.raises(UsageError, match=r"gave no batch in epoch 1.*iterated over again"):
        list(once.epoch())
    with pytest.raises(UsageError, match=r"no indices .* cannot be shuffled"):
        Batches(Stream(), batch_size=4, shuffle=True)


def test_a_loaders_settings_are_taken_over():
    data = Numbered(32)
    shuffled = Batches(DataLoader(data, batch_size=8, shuffle=True))
    assert_same(first(shuffled, 3), first(Batches(data, batch_size=8), 3))
    weighted = torch.utils.data.WeightedRandomSampler([0.0] * 16 + [1.0] * 16, 32)
    runs = [first(Batches(DataLoader(data, batch_size=8, sampler=weighted)), 5) for _ in range(2)]
    assert_same(*runs)
    assert min(b["i"].min() for b in runs[0]) >= 16
    pairs = Batches(DataLoader(data, batch_sampler=[[0, 1], [2, 3]]), 2, last="drop")
    assert [b["i"].tolist() for b in pairs.epoch()] == [[0, 1], [2, 3]]
    forked = DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork")
    options = Batches(forked)._settings.workers.options()
    assert (options["multiprocessing_context"], options["pin_memory"]) == ("spawn", False)
    spread = torch.utils.data.DistributedSampler(data, num_replicas=4, rank=1, seed=3)
    settings = Batches(DataLoader(data, batch_size=2, sampler=spread, drop_last=True))._settings
    assert (settings.batch_size, settings.seed, settings.shuffle) == (8, 3, True)
    with pytest.raises(UsageError, match="keeps a last batch that may be short"):
        Batches(DataLoader(Numbered(33), batch_size=8))


def test_a_list_of_batches_is_taken_as_it_is():
    given = [{"x": torch.full((2,), float(i))} for i in range(3)]
    found = [b["x"][0].item() for b in first(Batches(given, None, shuffle=False), 5)]
    assert found == [0, 1, 2, 0, 1]


@pytest.mark.skipif(importlib.util.find_spec("grain") is None, reason="grain is not installed")
def test_grain_keeps_its_own_place():
    grain = pytest.importorskip("grain")
    data = grain.MapDataset.range(20).seed(1).shuffle().map(lambda i: {"i": np.int32(i)})
    whole = first(Batches(data.batch(4).to_iter_dataset()), 7)
    begun = Batches(data.batch(4).to_iter_dataset())
    head = first(begun, 3)
    later = Batches(data.batch(4).to_iter_dataset())
    later.restore(json.loads(json.dumps(begun.position)))
    assert_same(head + first(later, 4), whole)
    by_index = Batches(data, batch_size=4, last="drop")
    assert_same(first(by_index, 2), whole[:2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Batches([1, 2]), "batch_size was not given"),
        (lambda: Batches([1, 2], batch_size=0), "batch_size=0: expected a number of samples"),
        (lambda: Batches([1, 2], batch_size=1, last="keep it"), "last='keep it': expected 'pad'"),
        (lambda: Batches([1, 2], batch_size=1, workers=-1), "workers=-1"),
        (lambda: Batches(3, batch_size=1), "dataset is a int: expected one with __getitem__"),
        (lambda: Batches([1], batch_size=1, buckets=(0,)), "expected lengths from 1 up"),
        (
            lambda: Batches([1, 2], batch_size=1).restore({}),
            "expected a position that Batches gave",
        ),
        (
            lambda: Batches([1] * 8, batch_size=4).restore(Batches([1] * 8, batch_size=2).position),
            r"batches with batch_size=2, and these have batch_size=4: other samples would come",
        ),
    ],
)
def test_what_is_of_no_use_is_refused(make: Any, message: str):
    with pytest.raises(UsageError, match=message):
        make()
