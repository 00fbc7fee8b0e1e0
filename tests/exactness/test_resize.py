"""`resize_` inside of a program: other sizes for memory that is there, and what eager refuses."""

import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.errors import PortError


class Resizes(nn.Module):
    """Views of resized tensors see the same memory, and a buffer keeps its new size."""

    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.arange(6.0).view(2, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        memory = x.detach() + 1
        whole = memory.view(-1)
        memory.resize_(2, 2).mul_(3)
        self.kept.resize_(6).mul_(2)
        return memory, whole, (x * self.kept.view(2, 3)).sum()


def test_memory_that_is_there_gets_other_sizes() -> None:
    eager, ported = Resizes(), tpuport.convert(Resizes())
    for seed in range(3):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
        expected, given = eager(x), tpuport.to_torch(ported(x))
        assert [t.shape for t in given] == [t.shape for t in expected]
        torch.testing.assert_close(given, expected)
        kept = tpuport.to_torch(ported.buffers["kept"])
        torch.testing.assert_close(kept, eager.kept)


class Grows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 1).resize_(9).fill_(1.0)


class ResizesWithGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).resize_(6)


def test_memory_that_is_not_there_is_refused_with_a_remedy_that_works() -> None:
    class Assigns(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 1).new_empty(9).fill_(1.0)

    x = torch.ones(2, 3)
    with pytest.raises(PortError, match=r"(?s)resize_ to \(9,\).*6 elements.*new_empty\(size\)"):
        tpuport.convert(Grows())(x)
    assert torch.equal(tpuport.to_torch(tpuport.convert(Assigns())(x)), Grows()(x))


def test_what_eager_refuses_is_refused() -> None:
    x = torch.ones(2, 3)
    message = "cannot resize variables that require grad"
    with pytest.raises(RuntimeError, match=message):
        ResizesWithGradient()(x)
    with pytest.raises(RuntimeError, match=message):
        tpuport.convert(ResizesWithGradient())(x)
