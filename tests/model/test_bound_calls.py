"""Later calls by a bound program: which arguments have one, and what still counts."""

from typing import Any

import pytest
import torch

import tpuport
from tpuport.model.ported_model import PortedModel

SETTINGS = {"shift": 0.0}


class Net(torch.nn.Module):
    """Take tensors, numbers and containers of both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = torch.nn.Linear(4, 4)
        self.table = torch.nn.Embedding(5, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, more: Any = None, scale: float = 1.0) -> Any:
        self.calls += 1
        x = self.line(x) * scale + SETTINGS["shift"]
        if more is not None:
            index, (a, times), names = more["index"], more["pair"], more["names"]
            x = x + self.table(index) * a * times * len(names)
        # Python tells the two zeros apart.
        return x, torch.tensor(str(scale) == "-0.0")


def given(seed: int, **changed: Any) -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(seed)
    index = torch.randint(0, 5, (2,), generator=drawn)
    a = torch.randn(2, 4, generator=drawn)
    return {"index": index, "pair": [a, 3], "names": ("a", None)} | changed


def test_containers_numbers_and_results_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, slow = Net(), []
    ported = tpuport.convert(Net())
    general = PortedModel._call

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        slow.append(args)
        return general(self, *args, **kwargs)

    monkeypatch.setattr(PortedModel, "_call", counted)

    def check(times: int, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compare a call with eager, and the number of calls that took the general way."""
        before, expected = len(slow), eager(tpuport.to_torch(x), *args, **kwargs)
        out = ported(x, *args, **kwargs)
        for ours, theirs in zip(tpuport.to_torch(out), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert len(slow) - before == times
        return out

    x = torch.randn(2, 4)
    check(1, x, given(0))
    for seed in (1, 2):
        check(0, torch.randn(2, 4), given(seed))
    # Each of these is another program, or needs a look at the arguments.
    a = torch.randn(2, 4)
    check(1, x, given(0, pair=[a, 4]))
    check(1, x, given(0, pair=(a, 3)))
    check(1, x, dict(reversed(given(0).items())))
    check(1, a, given(0, pair=[a, 3]))
    check(1, a, given(0, pair=[a, 3]))  # one tensor twice is never bound
    check(1, x, scale=0.0)
    check(1, x, scale=-0.0)
    check(0, x, scale=0.0)
    check(0, x, scale=-0.0)
    # A result of a port is an argument like another.
    first = check(1, x)[0]
    check(1, first)
    check(0, first)
    # What the code reads from outside counts in all of them.
    SETTINGS["shift"] = 1.5
    try:
        check(1, x, given(0))
        check(0, x, given(0))
        check(1, first)
    finally:
        SETTINGS["shift"] = 0.0
    # So do edits and loaded weights.
    for net in (eager, ported.module):
        net.line.weight.data.mul_(2)
    check(1, x, given(0))
    assert float(ported.buffers["calls"]) == float(eager.calls)


def test_int64_values_that_do_not_fit_are_refused_in_later_calls() -> None:
    ported = tpuport.convert(lambda x: x + 1, verify=False)
    for _ in range(2):
        assert int(ported(torch.tensor([7]))) == 8
    with pytest.raises((OverflowError, tpuport.foundation.errors.UsageError), match="does not fit"):
        ported(torch.tensor([2**40]))
