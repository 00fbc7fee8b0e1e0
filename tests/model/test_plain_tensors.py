"""Tensors in plain attributes that a script writes to between calls, in whatever way."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tpuport.model.originals import OriginalWrittenWarning

LARGE = 1 << 15  # elements: twice what is compared byte by byte


class Reading(nn.Module):
    """Reads plain tensors, a small, a middle and a large one, and one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        self.small, self.listed = torch.ones(2), [torch.ones(2)]
        self.middle, self.large = torch.ones(3000), torch.ones(LARGE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.small * self.listed[0] + self.middle.mean()
        return self.line(x) * scale + self.large.view(-1, 2)[-1]


class Writing(Reading):
    """Writes to them, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for tensor in (self.small, self.middle, self.listed[0], self.large):
            tensor.add_(0.5)
        return super().forward(x)


def tensors(module: Any) -> list[torch.Tensor]:
    return [module.small, module.middle, module.large, module.listed[0]]


WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda t: t.mul_(2),
    "data": lambda t: t.data.mul_(3),
    "numpy": lambda t: t.numpy().__imul__(2),
    "dlpack": lambda t: torch.from_dlpack(t.__dlpack__()).mul_(2),
    "storage": lambda t: torch.empty(0).set_(t.untyped_storage()).mul_(2),
    "other data": lambda t: setattr(t, "data", t * 2),
}


def test_what_calls_read_is_the_tensor_of_the_original():
    torch.manual_seed(0)
    module, x = Reading(), torch.ones(1, 2)
    ported = tpuport.convert(module, verify=False)
    for way, write in WAYS.items():
        for index in range(4):
            write(tensors(module)[index])
            for _ in range(2):
                found = tpuport.to_torch(ported(x))
                torch.testing.assert_close(found, module(x).detach(), msg=f"{way} {index}")
    count = len(ported.report.retraces)
    for tensor in tensors(module)[:2]:
        tensor.add_(0)  # a write that changes nothing, which torch counts
        tensor.numpy()  # an address that somebody took
    ported(x)
    assert count == len(ported.report.retraces) == 4 * len(WAYS) - 1


def test_what_calls_write_is_the_ports_own():
    torch.manual_seed(0)
    module, x = Writing(), torch.ones(1, 2)
    eager, ported = copy.deepcopy(module), tpuport.convert(module, verify=False)
    for call, name in enumerate(["small", r"listed\[0\]", "middle", "large"]):
        torch.testing.assert_close(tpuport.to_torch(ported(x)), eager(x).detach())
        {0: module.small, 1: module.listed[0], 2: module.middle, 3: module.large}[call].data.mul_(3)
        with pytest.warns(OriginalWrittenWarning, match=f"^'{name}' of the Writing was written"):
            torch.testing.assert_close(tpuport.to_torch(ported(x)), eager(x).detach())
    for ours, theirs in zip(tensors(ported.module), tensors(eager), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert [t[-1].item() for t in tensors(module)] == [3.0] * 4


def test_after_its_module_was_asked_for_all_are_the_ports_own():
    module, x = Reading(), torch.ones(1, 2)
    ported = tpuport.convert(module, verify=False)
    before = tpuport.to_torch(ported(x))
    tensors(ported.module)[0].mul_(2)
    after = tpuport.to_torch(ported(x))
    assert not torch.equal(before, after)
    module.small.mul_(5)
    with pytest.warns(OriginalWrittenWarning, match=r"ported\.module\.small"):
        assert torch.equal(tpuport.to_torch(ported(x)), after)


def test_a_write_before_the_first_call_of_one_that_writes_is_told():
    module, x = Writing(), torch.ones(1, 2)
    ported = tpuport.convert(module, verify=False)
    module(x)
    with pytest.warns(OriginalWrittenWarning) as told:
        ported(x)
    assert len(told) == 4


@pytest.mark.parametrize("kind", [Reading, Writing])
def test_under_porting_they_are_the_users(kind: type[Reading]):
    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module, x, found = kind().to(device), torch.ones(1, 2, device=device), []
        for index, write in enumerate(WAYS.values()):
            write(tensors(module)[index % 4])
            found += [module(x).detach().cpu(), *(t.clone() for t in tensors(module))]
        return found

    expected = run("cpu")
    with tpuport.porting(verify=False) as block, warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run("cuda")
    assert [program.model for program in block.report.programs] == [kind.__name__]
    torch.testing.assert_close(found, expected)
