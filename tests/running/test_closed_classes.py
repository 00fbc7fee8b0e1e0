"""Tensors whose memory cannot be looked at: of classes that refuse functions, and sparse ones."""

from typing import Any

import pytest
import torch
from torch import nn

import tpuport


class Closed(nn.Parameter):
    """A parameter whose class refuses functions of torch, as those on manifolds do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in {torch.Tensor.numel, torch.Tensor.untyped_storage, torch.Tensor.resolve_conj}:
            msg = f"{func} of a Closed is refused"
            raise TypeError(msg)
        return super().__torch_function__(func, types, args, kwargs or {})


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = Closed(torch.linspace(0, 1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.by = nn.Linear(3, 3), Closed(torch.linspace(0, 1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) + self.by


def results(device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net, x = Network().to(device), torch.linspace(-1, 1, 6).reshape(2, 3).to(device)
    y = net(x)
    y.square().sum().backward()
    return [y.detach().cpu(), *(p.grad.cpu() for p in net.parameters())]


@pytest.mark.filterwarnings("ignore::tpuport.compat.emulated.programs.PortWarning")
def test_a_module_with_a_weight_of_a_closed_class_runs_by_parts() -> None:
    want = results("cpu")
    with tpuport.porting():
        got = results("cuda")
    torch.testing.assert_close([one.as_subclass(torch.Tensor) for one in got], want)


def test_a_layer_with_a_weight_of_a_closed_class_is_refused() -> None:
    with tpuport.porting():
        layer = Shift().cuda()
        with pytest.raises(tpuport.PortError, match="TPU106 by is a Closed"):
            layer(torch.ones(3).cuda())


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_sparse_tensor_is_made_for_the_accelerator() -> None:
    def product(device: str) -> torch.Tensor:
        rows, columns = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
        values = torch.tensor([2.0, 3.0]).to(device)
        made = torch.sparse_csr_tensor(rows, columns, values, (2, 2), device=device)
        return (made @ torch.eye(2).to(device)).cpu()

    with tpuport.porting():
        got = product("cuda")
    torch.testing.assert_close(got, product("cpu"))
