"""What loaders of users bring along: samplers, collators and streams of their own."""

import itertools
import os
import random
import signal
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.training.test_batches import Numbered, assert_same, first
from tpuport.foundation.errors import UsageError
from tpuport.training import Batches
from tpuport.training.input.sources import ArrayPlace, HostShard


class Shuffled(torch.utils.data.Sampler[int]):
    """An order drawn as research code does."""

    def __init__(self, draw: str) -> None:
        self.draw, self.own = draw, np.random.default_rng(0)

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Any:
        order = list(range(16))
        if self.draw == "python":
            random.shuffle(order)
        elif self.draw == "numpy":
            np.random.shuffle(order)
        else:
            self.own.shuffle(order)
        return iter(order)


def read_by(batches: Batches, process: int, count: int) -> list[Any]:
    """The first batches as one of two processes reads them."""
    reading = batches._source.read(ArrayPlace(), HostShard(process, 2))
    return [read.batch for read in itertools.islice(reading, count)]


@pytest.mark.parametrize("draw", ["python", "numpy"])
def test_a_sampler_that_draws_globally_has_one_order_for_an_epoch(draw: str):
    def made() -> Batches:
        return Batches(DataLoader(Numbered(16), batch_size=4, sampler=Shuffled(draw)))

    begun = made()
    head = [b["i"].tolist() for b in first(begun, 2)]
    later = made()
    later.restore(begun.position)
    tail = [b["i"].tolist() for b in later.epoch()]
    assert sorted(itertools.chain(*head, *tail)) == list(range(16))
    rows = [b["i"].tolist() for process in range(2) for b in read_by(made(), process, 4)]
    assert sorted(itertools.chain(*rows)) == list(range(16))
    assert [b["i"].tolist() for b in later.epoch()] != head + tail


def test_a_sampler_that_answers_otherwise_each_time_is_refused():
    batches = Batches(DataLoader(Numbered(16), batch_size=4, sampler=Shuffled("own")))
    with pytest.raises(UsageError, match="Shuffled gives another order each time it is asked"):
        next(iter(batches))


def masking(samples: list[Any]) -> dict[str, Any]:
    return {"i": torch.as_tensor([int(s) for s in samples]), "mask": torch.rand(len(samples))}


@pytest.mark.parametrize("indexed", [True, False])
def test_what_collate_draws_is_the_same_after_a_restart(indexed: bool):
    class Again(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(16))

    def made() -> Batches:
        given: Any = list(range(16)) if indexed else Again()
        return Batches(given, 4, collate=masking, shuffle=False)

    whole = first(made(), 6)
    begun = made()
    head = first(begun, 2)
    torch.manual_seed(0)
    later = made()
    later.restore(begun.position)
    assert_same(head + first(later, 4), whole)
    draws = {round(float(v), 6) for batch in whole for v in batch["mask"]}
    assert len(draws) == 24


def test_each_process_takes_its_rows_of_a_whole_batch():
    items = [{"x": torch.arange(4), "name": "a"}]
    for given in (items, iter(items)):
        batches = Batches(given, None, shuffle=False)
        reading = batches._source.read(ArrayPlace(), HostShard(1, 2))
        assert next(reading).batch["x"].tolist() == [2, 3]
    mixed = Batches([{"x": torch.zeros(4), "scale": torch.zeros(3)}], None, shuffle=False)
    with pytest.raises(UsageError, match=r"tensors of \[3, 4\] rows.*first dim"):
        read_by(mixed, 0, 1)


class Spread(torch.utils.data.DistributedSampler[int]):
    """A subclass, of which what it changes is not known."""


def test_a_sampler_for_one_of_several_processes_is_refused():
    data = Numbered(16)
    spread = Spread(data, 2, 0)
    groups = [[0, 1]]
    wrapped: Any = type("Groups", (list,), {"sampler": spread})(groups)
    for loader in (
        DataLoader(data, batch_size=4, sampler=spread, drop_last=True),
        DataLoader(data, batch_sampler=wrapped),
    ):
        with pytest.raises(UsageError, match=r"one of 2 processes .*num_replicas=2.*cut twice"):
            Batches(loader)
    Batches(DataLoader(data, batch_size=4, sampler=Spread(data, 1, 0)))


class Ragged(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([{"ids": torch.arange(n)} for n in range(1, 9)])


def test_processes_do_not_choose_lengths_of_a_stream_by_themselves():
    batches = Batches(Ragged(), 8, buckets=(4, 8))
    with pytest.raises(UsageError, match="processes have to choose the same length"):
        read_by(batches, 0, 1)
    assert read_by(Batches(Ragged(), 8, buckets=(8,)), 0, 1)[0]["ids"].shape == (4, 8)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[0, 1, 2, 3], [4, 5], [6, 7, 8, 9]], "batch 1 of the batch sampler has 2 samples of 4"),
        ([[0, 1]], "epoch 0 has no batch of 4 samples"),
    ],
)
def test_groups_are_not_left_out_unsaid(groups: list[list[int]], message: str):
    batches = Batches(DataLoader(Numbered(16), batch_sampler=groups), 4, last="drop")
    with pytest.raises(UsageError, match=message):
        next(iter(batches))


@pytest.mark.parametrize("last", ["pad", "drop"])
def test_there_is_no_last_batch_to_fill_where_items_are_batches(last: Any):
    with pytest.raises(UsageError, match=rf"last='{last}': the items are batches already"):
        Batches([{"x": torch.ones(8)}], None, last=last)
    loader = DataLoader(Ragged(), batch_size=None)
    assert next(iter(Batches(loader)))["ids"].tolist() == [0]


def test_two_readers_of_the_same_batches_are_refused():
    batches = Batches(Numbered(16), 4, prefetch=1)
    given = batches.device_iterator(None)
    next(given)
    list(batches.epoch())
    with pytest.raises(UsageError, match="somebody else took batches meanwhile"):
        next(given)


class Signalled(Numbered):
    """Has its worker told to end before a sample, once: it reads ahead to the next epoch."""

    told = False

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 2 and not self.told:
            self.told = True
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__getitem__(index)


def test_a_worker_reads_on_when_its_group_is_asked_to_end():
    with Batches(Signalled(8), 4, shuffle=False, workers=1) as batches:
        assert [b["i"].tolist() for b in batches.epoch()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
