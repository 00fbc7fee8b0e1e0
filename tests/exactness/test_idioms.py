"""Idioms of research code around masks, queues, padding and buffers that are filled later."""

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

import tpuport
from tests.exactness.scenario import Scenario, by_tpuport, check_calls, check_gradients, normal
from tpuport.foundation.errors import PortError

X, UP, DOWN = normal(4, 4), normal(4, 4).abs(), -normal(4, 4).abs()


def others(n):
    return ~torch.eye(n, dtype=torch.bool)


def known_masks(x):
    """The number of elements that a constant mask selects is a number."""
    wide = x[:, None].expand(4, 4, 4).masked_select(others(4)[..., None])
    rows = torch.masked_select(x, others(4)[0])
    return x.masked_select(others(4)).reshape(4, 3), wide.reshape(4, 3, 4), rows.view(4, 3)


def deviations(x):
    kept = x[x > 0]
    rows = x[x[:, 0] > 0]
    return kept.std(), kept.var(unbiased=False), torch.var_mean(rows, 0, keepdim=True), rows.std(0)


def counted(x):
    rows, columns = torch.where(x > 0)
    n = len(rows)
    if n == 0:
        return x.sum() * 0, n
    return x[rows, columns].sum() / n, len(columns) + max(len(rows), 1)


def skipped(x):
    """Rows for which a comment says that there is nothing to do."""
    made = torch.zeros(4, 4)
    for i in range(2):
        if x[i].sum() < 0:
            # too small
            continue
        else:
            made[i] = x[i] * 2
        if x[i].max() > 9:
            made[i + 2] = x[i]
        else:
            # as it is

            pass  # for now
    return made


def filled_later(x):
    order = torch.empty(4, 2, dtype=torch.long)
    for i in range(2):
        order[:, i] = x[i].argsort() + i
    copy = x.new_empty(4, 4)
    copy[:] = x
    like = torch.empty_like(order)
    like[1:], like[0] = order[1:], 7
    return order, copy, like


class Queue(nn.Module):
    """A memory bank: rows from a pointer that wraps, as MoCo and lightly keep them."""

    def __init__(self, wraps):
        super().__init__()
        self.wraps = wraps
        self.register_buffer("bank", torch.zeros(12, 4))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        out = x @ self.bank.clone().T
        n, at = x.shape[0], int(self.pointer)
        if self.wraps and at + n >= 12:
            self.bank[at:] = x[: 12 - at].detach()
            self.pointer.zero_()
        else:
            self.bank[at : at + n] = x.detach()
            self.pointer[0] = (at + n) % 12
        return out


class Encoder(nn.Module):
    """In evaluation `nn.TransformerEncoder` makes nested tensors of padded sequences."""

    def __init__(self, trained):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, nn.LayerNorm(8)).requires_grad_(trained)

    def forward(self, x, padding):
        return self.encoder(x, src_key_padding_mask=padding)


class Packed(nn.Module):
    """A recurrent layer over sequences of the lengths that a call is given."""

    def __init__(self, kind):
        super().__init__()
        self.layer = kind(4, 3, batch_first=True, bidirectional=True)

    def forward(self, x, lengths):
        packed = rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, last = self.layer(packed)
        return rnn.pad_packed_sequence(out, batch_first=True), last


BATCH = normal(3, 5, 4)
LENGTHS = tuple((BATCH, torch.tensor(n)) for n in ([2, 5, 3], [4, 1, 4], [2, 5, 3]))

ENDS = torch.arange(5) >= torch.tensor([5, 2, 4])[:, None]
WORDS = normal(3, 5, 8)
ROWS = tuple((normal(5, 4, seed=n),) for n in range(4))
PADDED = ((WORDS, ENDS), (WORDS, ENDS.flip(1)), (WORDS, ENDS.flip(0)))

SCENARIOS = [
    Scenario("known masks", lambda: known_masks, ((X,), (UP,))),
    Scenario("deviations", lambda: deviations, ((X,), (UP,))),
    Scenario("skipped", lambda: skipped, ((X,), (-X,), (UP,))),
    Scenario("counted", lambda: counted, ((X,), (UP,), (DOWN,))),
    Scenario("filled later", lambda: filled_later, ((X,), (UP,)), grads=False),
    Scenario("a queue", lambda: Queue(False), tuple((x[:4],) for (x,) in ROWS), grads=False),
    Scenario("a queue that wraps", lambda: Queue(True), ROWS, grads=False),
    Scenario("packed lstm", lambda: Packed(nn.LSTM), LENGTHS),
    Scenario("packed gru", lambda: Packed(nn.GRU), LENGTHS, grads=False),
    Scenario("an encoder", lambda: Encoder(True), PADDED, train=False),
    Scenario("a frozen encoder", lambda: Encoder(False), PADDED, train=False, grads=False),
]


# Eager's fast path makes a nested tensor, and torch says so once a process.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_values(scenario):
    check_calls(scenario, by_tpuport)


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s.grads], ids=str)
def test_gradients(scenario):
    check_gradients(scenario, by_tpuport)


def test_uninitialised_memory_is_not_read():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch then fills it with the largest number
    try:
        got = tpuport.to_torch(tpuport.convert(filled_later)(X))
        assert all(a.equal(b) for a, b in zip(got, filled_later(X), strict=True))
    finally:
        torch.use_deterministic_algorithms(before)


def test_a_queue_that_overflows_raises_as_eager_does():
    bank, rows = torch.zeros(12, 4), ROWS[0][0]

    def push(bank, x, at):
        bank = bank.clone()
        start = int(at.sum())
        bank[start:] = x
        return bank

    ported = tpuport.convert(push)
    at = torch.tensor([3, 4])
    torch.testing.assert_close(ported(bank, rows, at).torch(), push(bank, rows, at))
    with pytest.raises(RuntimeError):
        ported(bank, rows, at + 1)


def test_lengths_that_are_computed_are_refused_with_the_line():
    def lengths(x):
        return rnn.pack_padded_sequence(x, (x[:, 0, 0] > 0) + 1, True, enforce_sorted=False).data

    with pytest.raises(PortError, match=r"test_idioms.*TPU203 the lengths of packed sequences"):
        tpuport.convert(lengths, verify=False)(BATCH)
