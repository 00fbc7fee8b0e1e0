"""Training of models that leave tensors in attributes: a loss that balances, a map to look at."""

import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.errors import UsageError
from tpuport.training import from_torch, make_train_step


class Balanced(nn.Module):
    def __init__(self, reads=False):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.norm, self.reads = nn.Linear(4, 4), nn.BatchNorm1d(4), reads
        self.balance = self.last = self.size = None

    def forward(self, x):
        weights = torch.softmax(self.gate(x), -1)
        if self.reads:
            # At the first call this is what a state of zeros gives.
            last = torch.zeros_like(x) if self.last is None else self.last
            weights = weights + last
        self.size = weights.shape[-1]  # a number that is set once
        self.balance = weights.mean(0).square().sum()
        self.weights, self.last = weights.detach(), weights.detach()
        return self.norm(weights) * x


def loss(model, x):
    return model(x).square().mean() + model.balance


def batches():
    return [torch.sin(torch.arange(16.0) + i).view(4, 4) for i in range(3)]


def trained(model, accumulate):
    ported = tpuport.convert(model)
    optimizer = from_torch(ported, torch.optim.SGD(model.parameters(), 0.1), steps=3)
    step = make_train_step(ported, loss, optimizer, accumulate=accumulate)
    state = step.init()
    for x in batches():
        state, _ = step(state, x)
    return step.load_state(state).to_torch()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_tensor_that_no_call_reads_is_left_out_of_the_step(accumulate):
    found, want = trained(Balanced(), accumulate), Balanced()
    optimizer = torch.optim.SGD(want.parameters(), 0.1)
    for x in batches():
        optimizer.zero_grad()
        for part in x.chunk(accumulate):
            (loss(want, part) / accumulate).backward()
        optimizer.step()
    for name, value in want.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    assert found.balance is None
    assert found.size == 4
    assert not hasattr(found, "weights")


def test_a_tensor_that_the_next_call_reads_is_named():
    with pytest.raises(
        UsageError, match=r"the loss function changes 'balance', 'last', 'weights', 'size'"
    ):
        trained(Balanced(reads=True), 1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.hidden = nn.GRUCell(4, 4), None

    def forward(self, x):
        begin = self.hidden is None or len(self.hidden) != len(x)
        hidden = x.new_zeros(len(x), 4) if begin else self.hidden
        self.hidden = self.cell(x, hidden).detach()
        return self.cell(x, hidden)


def test_state_that_has_the_rows_of_a_batch_is_named_where_parts_have_fewer():
    ported = tpuport.convert(Recurrent())
    ported(batches()[0])
    step = make_train_step(ported, lambda model, x: model(x).sum(), "sgd", accumulate=2)
    message = r"'hidden' has shape \[4, 4\] before a part of the batch and \[2, 4\] after it"
    with pytest.raises(UsageError, match=message):
        step(step.init(), batches()[0])
