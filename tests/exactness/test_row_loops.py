"""`for` loops over rows whose number depends on data, as mixtures of experts have them.

Eager PyTorch runs a round for each expert that some row chose. Each scenario is called with rows
that spread over the experts, that all choose one, and that leave one out.
"""

from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tpuport
from tests.exactness.scenario import Scenario, by_tpuport, check_calls, check_gradients, normal
from tpuport.foundation.errors import PortError
from tpuport.training import from_torch, make_train_step

EXPERTS, DIM = 3, 4
SPREAD, ONE = normal(5, DIM), normal(1, DIM, seed=3).expand(5, DIM).clone()
CALLS = ((SPREAD,), (ONE,), (-SPREAD,))


class Experts(nn.Module):
    """A router and its experts; subclasses say how the rows get to them."""

    chosen_by_each = 2
    experts: Any

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(EXPERTS))

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gate(x).mul(3).softmax(-1).topk(self.chosen_by_each, -1)

    def hit(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights, chosen = self.route(x)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        return weights, mask, torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()


class SwitchTransformers(Experts):
    chosen_by_each = 1

    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ModuleDict({f"expert_{i}": e for i, e in enumerate(self.experts)})

    def forward(self, x: torch.Tensor) -> Any:
        weights, mask, hit = self.hit(x)
        out = torch.zeros_like(x)
        for index in hit:
            idx, top = torch.where(mask[index].squeeze(0))
            current = x[None, top].reshape(-1, x.shape[-1])
            current = self.named[f"expert_{index[0]}"](current) * weights[top, idx, None]
            out.index_add_(0, top, current.to(x.dtype))
        return out


class Mixtral(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.stacked = nn.Parameter(torch.randn(EXPERTS, DIM, DIM) / 3)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            _, mask, hit = self.hit(x)
        weights, _ = self.route(x)
        out = torch.zeros_like(x)
        for index in hit:
            index = index[0]
            if index == EXPERTS:
                continue
            slot, row = torch.where(mask[index])
            gate, up = F.linear(x[row], self.stacked[index]).chunk(2, dim=-1)
            current = torch.cat([F.silu(gate) * up, up], -1) * weights[row, slot, None]
            out.index_add_(0, row, current.to(out.dtype))
        return out


class Longcat(Experts):
    """The number of rows is asked for as well, and the last experts are the identity."""

    def forward(self, x: torch.Tensor) -> Any:
        weights, mask, hit = self.hit(x)
        out = torch.zeros_like(x)
        for each in hit:
            index = int(each.item())
            slot, row = torch.where(mask[index].squeeze(0))
            if row.numel() == 0:
                continue
            current = x[row]
            if index >= EXPERTS - 1:
                current = current * 2
            else:
                current = self.experts[index](current)
            out.index_add_(0, row, current * weights[row, slot, None])
        return out


class DeepSeek(Experts):
    def forward(self, x: torch.Tensor) -> Any:
        weights, indices = self.route(x)
        y = torch.zeros_like(x)
        counts = torch.bincount(indices.flatten(), minlength=EXPERTS).tolist()
        for i in range(EXPERTS):
            if counts[i] == 0:
                continue
            expert = self.experts[i]
            idx, top = torch.where(indices == i)
            y[idx] += expert(x[idx]) * weights[idx, top, None]
        return y


class Guarded(Experts):
    def forward(self, x: torch.Tensor) -> Any:
        weights, indices = self.route(x)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            idx, top = torch.where(indices == i)
            if idx.numel() > 0:
                y[idx] += expert(x[idx]) * weights[idx, top, None]
        return y


class Rebound(Experts):
    """The loop goes over a list of the distinct choices, and carries a tensor and a number."""

    def forward(self, x: torch.Tensor) -> Any:
        weights, indices = self.route(x)
        y, rounds = x.sin(), 0
        for i in indices.unique().tolist():
            share = (weights * (indices == i)).sum(-1, keepdim=True)
            y = y + self.experts[i](x) * share
            rounds += i + 1
        return y, y * rounds


class Nested(Experts):
    """In a checkpoint, with a buffer that rounds write."""

    hits: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hits", torch.zeros(2))

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        weights, indices = self.gate(x)[:, :2].softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        first, second = indices.unbind(1)
        for i in first.unique():
            for j in torch.where(torch.bincount(second[first == i], minlength=2))[0]:
                rows = torch.where((first == i) & (second == j))[0]
                out[rows] = self.experts[i](self.experts[j](x[rows])) * weights[rows].sum()
        return out

    def forward(self, x: torch.Tensor) -> Any:
        hits = self.hits
        for i in self.gate(x)[:, :2].argmax(1).unique():
            hits[i] += 1
        return checkpoint(self.mixed, x, use_reentrant=False)


def _any_rows(x: torch.Tensor) -> Any:
    """The rows themselves are traced, and so is what they decide."""
    x = x[:3, :2]
    total, last = x.new_zeros(2), x[0]
    for row in x[x[:, 0] > 0]:
        total = total + row.sin() * last
        last = row
    for a, b in (x > 1).nonzero():
        total[b] += x[a, b]
    return total, last


# Each is a program of its own: a trace starts again for each line that is rewritten.
FORMS = [SwitchTransformers, Mixtral, Longcat, DeepSeek, Guarded, Rebound, Nested]


def _bump(to: torch.Tensor) -> int:
    to.add_(1)
    return 1


def _hidden_write(x: torch.Tensor) -> Any:
    seen = torch.zeros(2)
    for index in x.argmax(1).unique():
        x = x + index * _bump(seen)
    return x, seen


SCENARIOS = [
    *(Scenario(form.__name__, form, CALLS) for form in FORMS),
    Scenario("any_rows", lambda: _any_rows, CALLS),
    Scenario("hidden_write", lambda: _hidden_write, CALLS),
]


# Below the first is trained and the second runs; "Guarded" asks for the number of rows as well.
SLOW = {"DeepSeek", "SwitchTransformers", "Longcat"}


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(s, marks=[pytest.mark.slow] * (s.name in SLOW), id=s.name) for s in SCENARIOS],
)
def test_values_and_gradients(scenario):
    """The second routing is no other program."""
    ported = check_calls(scenario, by_tpuport)
    assert ported.report.retraces == []
    check_gradients(scenario, by_tpuport)


def _host_tensors(x: torch.Tensor) -> Any:
    """What rounds write depends on no input, and has a view."""
    out, seen = torch.zeros(5, DIM), torch.zeros(DIM)
    view = out.view(-1)
    for index in x.argmax(1).unique():
        rows = torch.where(x.argmax(1) == index)[0]
        out.index_add_(0, rows, x[rows] * 2)
        seen[index] += 1
    return out, view, seen


def _on_one_side(x: torch.Tensor) -> Any:
    """Branches that write to a part of a host tensor, to a view, and at a traced place."""
    out, y = torch.zeros(5, DIM), x.clone()
    row = y[0]
    if x.sum() > 0:
        out[0] += 1
    if x[0].sum() > 0:
        row.add_(1)
        if x.mean() > 0.2:
            row[0] = 7
    else:
        y.view(-1)[1] = 5
    place: Any = x[:, 0].argmax().item()
    if place > 0:
        out[place] = x[place]
        out[:place] += 1
    return out, y, row, x * out[0]


def _by_functions(x: torch.Tensor) -> Any:
    """The write is in a function, so the line of the branch does not show it."""

    def write(to: torch.Tensor, value: torch.Tensor) -> None:
        to[:] = value

    out = torch.zeros(DIM)
    if x.sum() > 0:
        write(out, x[0])
        y = x
    else:
        y = x * 2
    return out, y


def _rows_of_a_host_tensor(x: torch.Tensor) -> Any:
    out = torch.zeros(5, DIM)
    for column in range(2):
        rows = torch.where(x[:, column] > 0)[0]
        out.index_add_(0, rows, x[rows])
    return out


WRITES = [_host_tensors, _on_one_side, _by_functions, _rows_of_a_host_tensor]


@pytest.mark.parametrize("function", WRITES)
def test_writes_to_host_tensors_and_views(function):
    check_calls(Scenario(function.__name__, lambda: function, CALLS), by_tpuport)


def test_an_expert_that_nobody_chose_is_not_trained():
    """Its gradient is None in eager: no decay and no momentum, whichever expert that is."""
    torch.manual_seed(0)
    eager, module = DeepSeek(), DeepSeek()
    module.load_state_dict(eager.state_dict())
    ported = tpuport.convert(module, verify=False)

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x).tanh().square().mean()

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, 0.02, weight_decay=0.5)

    step = make_train_step(ported, loss, from_torch(ported, make(module.parameters())))
    theirs, state = make(eager.parameters()), step.init()
    for x in (SPREAD, ONE):
        state, _ = step(state, x)
        theirs.zero_grad()
        loss(eager, x).backward()
        theirs.step()
    unused = [p.grad is None for p in eager.experts.parameters()]
    assert any(unused)
    assert not all(unused)
    for name, value in eager.named_parameters():
        got: Any = state.params.get(name, state.frozen.get(name))
        np.testing.assert_allclose(got, value.detach(), rtol=1e-5, atol=1e-6, err_msg=name)


def test_absent_rounds_are_not_computed():
    """Each round is one branch of the compiled program: what nobody chose takes no time."""
    ported = tpuport.convert(SwitchTransformers(), verify=False)
    ported(SPREAD)
    lowered = jax.jit(ported.apply).lower(
        ported.params, ported.buffers, jax.random.key(0), SPREAD.numpy()
    )
    assert lowered.compile().as_text().count(" conditional(") == EXPERTS


def _appends(x: torch.Tensor) -> Any:
    found = []
    for row in x[x[:, 0] > 0]:
        found.append(row.sin())
    return torch.stack(found)


def _breaks(x: torch.Tensor) -> Any:
    total = x.new_zeros(DIM)
    for row in x[x[:, 0] > 0]:
        total = total + row
        if total.shape[0] == 3:
            break
    return total


def _counts(x: torch.Tensor) -> Any:
    found: dict[str, Any] = {"n": 0}
    for row in x[x[:, 0] > 0]:
        found["row"] = row
    return found["row"] if "row" in found else x[0]


def _writes_rows(x: torch.Tensor) -> Any:
    hit = (x[:, 0] > 0).nonzero()
    total = x.new_zeros(())
    for index in hit:
        index += 1
        total = total + index.sum()
    return total + hit.sum()


def _many(x: torch.Tensor) -> Any:
    total = x.new_zeros(())
    for value in x[x > 0]:
        total = total + value
    return total


REFUSED = [
    (_appends, SPREAD, "changes more than the values of tensors", "for row in"),
    (_breaks, SPREAD, "a loop over rows whose number depends on data", "for row in"),
    (_counts, SPREAD, "changes more than the values of tensors", "for row in"),
    (_writes_rows, SPREAD, "writes to a row", "for index in"),
    (_many, torch.randn(30, 30), "at most 900", "for value in"),
]


@pytest.mark.parametrize(("function", "x", "message", "line"), REFUSED)
def test_refused(function, x, message, line):
    with pytest.raises(PortError, match=message) as caught:
        tpuport.convert(function, verify=False)(x)
    assert caught.value.code == "TPU203"
    assert (caught.value.source_line or "").startswith(line)
