"""Loops whose rounds write to tensors from before the loop: one program, equal to eager PyTorch."""

import pytest
import torch
from torch import nn

from tests.exactness.scenario import Scenario, by_tpuport, check_calls, check_gradients
from tests.model.test_long_loops import rolled, size_of


class Recurrent(nn.Module):
    """A cell that writes its states into a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, out = x[:, 0], torch.zeros_like(x)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            out[:, t] = h
        return out


def test_states_written_into_a_tensor_are_one_scan():
    calls = tuple((torch.randn(2, length, 4),) for length in (64, 72))
    ported = check_calls(Scenario("written", Recurrent, calls, train=False), by_tpuport)
    assert rolled(ported)
    check_gradients(Scenario("written", Recurrent, calls[:1], train=False), by_tpuport)
    few, many = (size_of(Recurrent(), torch.randn(2, length, 4)) for length in (64, 160))
    assert few == many


class Loops(nn.Module):
    """Loops that become one program."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("total", torch.zeros(4))

    def rows(self, x):
        out, h = torch.zeros(2, 6, 4), x
        for t in range(6):
            h = h * 0.5 + self.lin(x) + t
            out[:, t] = h
        return out, h

    def read_back(self, x):
        out = torch.ones(7, 4)
        for t in range(7):
            out[t] = out[t - 1] * 0.5 + x[0] * t
        return out

    def added(self, x):
        out = x.new_zeros(6, 2, 4)
        for t in range(6):
            out[t] += x * t
            out[-t - 1] -= x
            out[:, 0, t % 4] += 1
        return out

    def views(self, x):
        out = torch.zeros(2, 6, 4)
        rows = out.transpose(0, 1)
        for t in range(5):
            out[:, t : t + 1] = x[:, None] * t
            rows[t + 1].add_(x)
            out.select(1, t)[0].mul_(self.lin.bias)
        return out, rows[2:4]

    def copied(self, x):
        out, flat = torch.empty_like(x).fill_(0.5), torch.zeros(6)
        for t in range(6):
            flat[t] = flat[:3].sum().detach() + x.sum()
            out[t % 2].copy_(flat[t].clone() * x[0])
            out.index_copy_(0, torch.tensor([1]), out[:1] + 1)
        return out, flat

    def in_place(self, x):
        h = x * 1
        same = h
        for t in range(6):
            h *= 0.5
            h.add_(self.lin.bias * t)
        return h, same

    def first_round(self, x):
        start = h = x * 1
        for t in range(6):
            h.mul_(0.5)
            h = h + self.lin.bias * t
        return h, start

    def seen_by_view(self, x):
        out = self.lin(x).repeat(3, 1)
        view, h = out[1:3], x[0]
        for t in range(6):
            h = h + view.sum(0) * 0.1
            out[t] = h
        return out, view.flatten()

    def normed(self, x):
        for t in range(6):
            x = self.norm(x) + t
            self.total += x[0].detach()
        return x

    def growing(self, x):
        out = torch.zeros(8, 4)
        for t in range(6):
            y = torch.tanh(x[-1] + x.mean(0))
            out[t] = y
            x = torch.cat([x, y[None] + out.sum(0)])
        return x, out

    def until(self, x):
        out = torch.zeros(7, 2, 4)
        for t in range(1, 7):
            x = x * 1.5 + t
            out[t] = x
            if x.abs().max() > 30:
                break
        return x, out

    def nested(self, x):
        out = torch.zeros(6, 3, 4)
        for i in range(6):
            for j in range(3):
                x = x * 0.5 + i
                out[i, j] = x[0] + j
        return out

    def without_gradient(self, x):
        out, h = self.lin(x) * 2, x
        for t in range(6):
            h = h * 0.5 + self.lin(x)
            with torch.no_grad():
                out[0, t % 3] = h.sum()
            out[1] = h[1]
        return out, h

    def only_writes(self, x):
        out = torch.zeros(6, 4)
        for t in range(6):
            out[t] = self.lin(x[t % 2])
        return out

    def truths(self, x):
        seen, places = torch.zeros(6, 2, dtype=torch.bool), torch.zeros(6, dtype=torch.long)
        for t in range(6):
            x = x * 0.5 - 0.1
            seen[t] = x.sum(1) > 0
            places[t] = x.argmax() + t
        return seen, places

    def linked(self, x):
        out = self.lin(x)
        other = out if x.sum() > 0 else out * 2
        for t in range(6):
            out[0] += t
        return out, other

    def the_state_was_a_row(self, x):
        out = self.lin(x)
        h = out[0]
        for t in range(6):
            out[t % 2] = h * 0.5
            h = h + out[1]
        return out, h

    def on_the_host(self, x):
        count = torch.zeros(())
        for _ in range(6):
            count += 1
            x = x + count
        return x, count

    def later_on_the_host(self, x):
        out = torch.zeros(6, 4)
        for t in range(6):
            out[1] += 1.0
            out[t] = out[1] + x[0]
        return out


class Left(Loops):
    """Loops whose rounds are compiled one by one."""

    def numbers(self, x):
        out, n = torch.zeros(6, 4), 1
        for t in range(6):
            n += 2
            out[t, : n % 4] = x[0, : n % 4] * n
            out[t, 3] = n
        return out, n

    def appended(self, x):
        h, outs = x * 1, []
        for _ in range(6):
            h.mul_(0.5)
            outs.append(h)
        return torch.stack(outs), outs

    def kept(self, x):
        h, outs = x * 1, []
        for _ in range(6):
            h *= 0.5
            outs.append(h)
        return torch.stack(outs), outs

    def appended_then_written(self, x):
        h, outs = x * 1, []
        for _ in range(6):
            h.mul_(0.5)
            h = h + 1
            outs.append(h)
        return torch.stack(outs), outs

    def a_row_is_the_state(self, x):
        out = torch.zeros(6, 2, 4)
        h = x
        for t in range(6):
            out[t] = h * 0.5
            h = out[t]
        out += 1
        return out, h

    def growing_is_written(self, x):
        x = x * 1
        for _ in range(6):
            x.mul_(0.9)
            x = torch.cat([x, x[-1:] + 1])
        return x


ONE, MANY = vars(Loops), vars(Left)
WAYS = [n for n, f in {**ONE, **MANY}.items() if callable(f) and n[0] != "_"]


@pytest.mark.parametrize("name", WAYS)
def test_a_loop_that_writes(name: str, short: None):
    class One(Left):
        forward = getattr(Left, name)

    calls = ((torch.randn(2, 4),), (torch.randn(2, 4),))
    ported = check_calls(Scenario(name, One, calls), by_tpuport)
    assert bool(rolled(ported)) is (name in ONE), str(ported.report)
    check_gradients(Scenario(name, One, calls[:1]), by_tpuport)
