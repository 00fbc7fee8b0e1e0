"""Training of models whose forward writes to frozen parameters, as momentum encoders do."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpuport
from tpuport.foundation.errors import UsageError
from tpuport.training import from_torch, make_train_step


class Momentum(nn.Module):
    """MoCo's shape: an encoder, its moving average, and a queue (He et al., arXiv:1911.05722)."""

    def __init__(self, *, is_frozen=True):
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.teacher = copy.deepcopy(self.student)
        for parameter in self.teacher.parameters():
            parameter.requires_grad = not is_frozen
        self.register_buffer("queue", F.normalize(torch.sin(torch.arange(32.0)).view(4, 8), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _follow(self):
        pairs = zip(self.student.parameters(), self.teacher.parameters(), strict=True)
        for ours, theirs in pairs:
            theirs.data = theirs.data * 0.9 + ours.data * 0.1

    def forward(self, x):
        query = F.normalize(self.student(x), dim=1)
        with torch.no_grad():
            self._follow()
            key = F.normalize(self.teacher(x * 0.9), dim=1)
        positive, negative = (query * key).sum(1, keepdim=True), query @ self.queue.clone()
        first = int(self.place)
        self.queue[:, first : first + len(x)] = key.T
        self.place[0] = (first + len(x)) % 8
        return F.cross_entropy(torch.cat([positive, negative], 1) / 0.2, torch.zeros(len(x)).long())


def batches():
    return [torch.sin(torch.arange(32.0) * (i + 1)).view(8, 4) for i in range(4)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_a_call_writes_to_frozen_parameters_is_kept(accumulate):
    model = Momentum()
    want, ported = copy.deepcopy(model), tpuport.convert(model)
    optimizer = from_torch(ported, torch.optim.SGD(model.student.parameters(), 0.1), steps=4)
    step = make_train_step(ported, "forward", optimizer, accumulate=accumulate)
    state = step.init()
    theirs = torch.optim.SGD(want.student.parameters(), 0.1)
    for x in batches():
        state, _ = step(state, x)
        theirs.zero_grad()
        for part in x.chunk(accumulate):
            (want(part) / accumulate).backward()
        theirs.step()
    found = step.load_state(state).to_torch().state_dict()
    for name, value in want.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_writing_to_parameters_that_are_trained_is_refused():
    model = Momentum(is_frozen=False)
    step = make_train_step(tpuport.convert(model), "forward", "sgd")
    with pytest.raises(
        UsageError, match=r"'teacher\.0\.weight'.*which is a parameter that is trained"
    ):
        step(step.init(), batches()[0])
