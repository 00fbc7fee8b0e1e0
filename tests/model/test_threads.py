"""Several threads call a port: each gets the result of its own call."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tpuport.model.ported_model import PortedModel


class Net(nn.Module):
    """A network that branches on values, by an argument, and keeps a table for each size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.tables = nn.Linear(4, 4), {}

    def forward(self, x: torch.Tensor, mode: str) -> torch.Tensor:
        h = self.linear(x)
        if h.mean() > 0:
            h = h * 2
        if len(x) not in self.tables:
            self.tables[len(x)] = float(len(x))
        return (h + 1 if mode == "b" else h) * self.tables[len(x)]


def test_a_call_is_not_bound_to_the_program_of_another_threads(monkeypatch: pytest.MonkeyPatch):
    ported, eager, x = tpuport.convert(Net(), verify=False), Net(), torch.ones(2, 4)
    ported(x, "a")
    ported(x * 2, "b")  # the state has settled
    ported._bound.clear()
    real, others = PortedModel._call, list[threading.Thread]()

    def interrupted(self: PortedModel, method: str, args: Any, kwargs: Any, **named: Any) -> Any:
        out = real(self, method, args, kwargs, **named)
        if args[1] == "a":
            others.append(threading.Thread(target=ported, args=(x, "b")))
            others[-1].start()
            others[-1].join(1.0)  # it ends now only if calls may overlap
        return out

    monkeypatch.setattr(PortedModel, "_call", interrupted)
    ported(x, "a")
    monkeypatch.undo()
    others[0].join()
    for mode in ("a", "b", "a"):
        torch.testing.assert_close(tpuport.to_torch(ported(x, mode)), eager(x, mode).detach())


def test_threads_that_call_two_ports_get_eagers_results():
    ports, eager = [tpuport.convert(Net(), verify=v) for v in (False, True)], Net()

    def work(seed: int) -> None:
        for call in range(6):
            size, mode = (seed + call) % 3 + 1, "ab"[call % 2]
            x = torch.full((size, 4), 0.1 * call - 0.2)
            got = tpuport.to_torch(ports[(seed + call) % 2](x, mode))
            torch.testing.assert_close(got, eager(x, mode).detach())

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
