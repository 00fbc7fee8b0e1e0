"""A module that comes back to attributes it had before gets the programs that it had then."""

import pytest
import torch
from torch import nn

import tpuport


class Reversible(nn.Module):
    """Keeps statistics of a batch between its two ends, and a shape and a word of the call."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.word = "first"

    def forward(self, x, word):
        if word != self.word:
            self.word, x = word, x + len(self.word)
        self.mean = x.mean(1, keepdim=True).detach()
        return self.norm(self.layer(x - self.mean)) + self.mean


def test_later_calls_find_the_programs_of_earlier_structures():
    torch.manual_seed(0)
    net = Reversible()
    ported = tpuport.convert(net)
    calls = [(True, 4, "a"), (True, 4, "a"), (False, 2, "bb"), (True, 4, "a"), (False, 2, "bb")]
    counts = []
    for step, (training, rows, word) in enumerate(calls * 2):
        net.train(training)
        if ported.training is not training:
            ported.train(training)
        x = torch.randn(rows, 3)
        torch.testing.assert_close(
            tpuport.to_torch(ported(x, word)), net(x, word), rtol=1e-4, atol=1e-5, msg=str(step)
        )
        counts.append(len(ported.report.retraces))
    assert tpuport.to_numpy(ported.buffers["norm.running_mean"]) == pytest.approx(
        net.norm.running_mean.numpy(), abs=1e-5
    )
    assert ported.module.word == net.word
    # The first structure, whose attribute is not there yet, comes but once.
    assert counts[4:] == [counts[4]] * 6
