"""What a program reads from outside (closures, globals, module arguments) may change afterwards."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tpuport import PortError


class Holder(nn.Module):
    """A module that hides another in a list, and keeps a plain tensor."""

    def __init__(self, hidden: nn.Module) -> None:
        super().__init__()
        self.hidden = [hidden]
        self.offset = torch.ones(2)

    def forward(self, x):
        return self.hidden[0](x) + self.offset


SCALE = torch.ones(2)


def by_closure(net: nn.Module) -> Any:
    return lambda x: net(x)


def by_global(net: nn.Module) -> Any:
    return lambda x: x * SCALE + net.weight[0].tolist()[0]


def by_number(net: nn.Module) -> Any:
    return lambda x: x * net.weight.sum().item() + float(net.weight.detach().numpy()[0, 0])


WAYS = {"closure": by_closure, "global": by_global, "number": by_number, "hidden": Holder}


def write_weight(net: nn.Linear) -> None:
    with torch.no_grad():
        net.weight.add_(1.0)


def write_global(net: nn.Linear) -> None:
    del net
    SCALE.mul_(3.0)


def rebind(net: nn.Linear) -> None:
    net.weight = nn.Parameter(torch.full((2, 2), 5.0))


CHANGES = [
    ("closure", write_weight),
    ("closure", rebind),
    ("global", write_global),
    ("global", write_weight),
    ("number", write_weight),
    ("hidden", write_weight),
]


@pytest.mark.parametrize(("way", "change"), CHANGES, ids=lambda v: getattr(v, "__name__", v))
def test_a_change_outside_is_seen(way: str, change: Any):
    torch.manual_seed(0)
    net, x = nn.Linear(2, 2), torch.ones(1, 2)
    target = WAYS[way](net)
    ported = tpuport.convert(target, verify=False)
    before = tpuport.to_torch(ported(x))
    ported(x)
    assert not ported.report.retraces
    change(net)
    with torch.no_grad():
        expected = target(x)
    assert not torch.allclose(before, expected)
    torch.testing.assert_close(tpuport.to_torch(ported(x)), expected)
    assert "outside" in str(ported.report.retraces[-1])


def test_the_mode_of_a_module_outside_is_seen():
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9))
    ported = tpuport.convert(lambda x: net(x), verify=False)
    x = torch.ones(8, 4)
    assert (tpuport.to_torch(ported(x)) == 0).any()
    net.eval()
    torch.testing.assert_close(tpuport.to_torch(ported(x)), net(x).detach())


def test_a_module_as_an_argument():
    net, x = nn.Linear(2, 2), torch.ones(1, 2)
    ported = tpuport.convert(lambda m, x: m(x), verify=False)
    for _ in range(2):
        torch.testing.assert_close(tpuport.to_torch(ported(net, x)), net(x).detach())
        write_weight(net)


def test_a_change_before_every_call_is_refused():
    net, x = nn.Linear(2, 2), torch.ones(1, 2)
    ported = tpuport.convert(lambda x: net(x), verify=False)

    def several(count: int) -> None:
        for _ in range(count):
            write_weight(net)
            ported(x)

    several(3)
    ported(x)
    several(3)
    with pytest.raises(PortError, match="before each of the last calls") as caught:
        several(1)
    assert "convert the module that owns it" in caught.value.remedy


def test_a_counter_on_a_module_outside_is_refused():
    class Counting(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls if x.sum() > 0 else x  # traced again to rewrite this

    counting = Counting()
    ported = tpuport.convert(lambda x: counting(x), verify=False)
    with pytest.raises(PortError, match=r"the call sets Counting\.calls of a module"):
        ported(torch.ones(2))
    assert counting.calls == 0
    assert "calls" not in counting.__dict__


@torch.inference_mode()
def write_in_inference_mode(tensor: torch.Tensor) -> None:
    tensor[1] = 9.0


UNCOUNTED: dict[str, Any] = {
    "numpy": lambda t: t.numpy().__setitem__(0, 3.0),
    "data": lambda t: t.data.__setitem__(0, 4.0),
    "dlpack": lambda t: torch.from_dlpack(t.__dlpack__()).__setitem__(1, 5.0),
    "storage": lambda t: t.untyped_storage().fill_(0),
}


def test_writes_that_torch_does_not_count_are_seen():
    held = torch.ones(3)[1:]
    with torch.inference_mode():
        uncounted = torch.ones(2)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * held + uncounted

    ported = tpuport.convert(function, verify=False)
    x = torch.ones(2)
    assert ported(x).tolist() == function(x).tolist()
    for name, write in UNCOUNTED.items():
        write(held)
        assert ported(x).tolist() == function(x).tolist(), name
        ported(x)  # calls that are each traced again would be refused
        ported(x)
    write_in_inference_mode(uncounted)
    assert ported(x).tolist() == function(x).tolist()


SCALED = functools.partial(lambda x, k: x * k, k=2.0)


class Partial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = functools.partial(torch.mul, other=3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SCALED(x) + self.scaled(x)


def test_keywords_of_a_partial_are_seen():
    ported, x = tpuport.convert(Partial(), verify=False), torch.ones(2)
    assert ported(x).tolist() == [5.0, 5.0]
    try:
        SCALED.keywords["k"] = 4.0
        assert ported(x).tolist() == [7.0, 7.0]
        ported.module.scaled.keywords["other"] = 5.0
        assert ported(x).tolist() == [9.0, 9.0]
    finally:
        SCALED.keywords["k"] = 2.0


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.step = 2.0

    def forward(self, x):
        return x * self.step


def test_an_attribute_is_no_read_of_a_global_of_its_name():
    namespace = Counts.forward.__globals__
    ported = tpuport.convert(Counts(), verify=False)
    try:
        for namespace["step"] in range(8):
            assert ported(torch.ones(2)).tolist() == [2.0, 2.0]
    finally:
        del namespace["step"]
    assert not ported.report.retraces
