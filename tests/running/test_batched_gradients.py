"""Several gradients of a program at once, as vectorized Jacobians and Hessians ask for them."""

import pytest
import torch
from torch import nn

import tpuport


def derivatives(device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).to(device)
    x = torch.linspace(-1, 1, 6).reshape(2, 3).to(device).requires_grad_()
    rows = torch.eye(3).to(device).unsqueeze(1).expand(3, 2, 3)
    (first,) = torch.autograd.grad(net(x), x, rows, is_grads_batched=True)
    (graph,) = torch.autograd.grad(net(x), x, rows, create_graph=True, is_grads_batched=True)
    graph.square().sum().backward()
    weights = [p.grad for p in net.parameters() if p.grad is not None]
    functional, point = torch.autograd.functional, x.detach()
    jacobian = functional.jacobian(lambda a: net(a).sum(0), point, vectorize=True)
    hessian = functional.hessian(lambda a: net(a).square().sum(), point, vectorize=True)
    made = [first, graph.detach(), x.grad, *weights, jacobian, hessian]
    return [one.cpu() for one in made if one is not None]


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_gradients_of_a_batch_of_cotangents_are_those_of_each() -> None:
    want = derivatives("cpu")
    with tpuport.porting():
        got = derivatives("cuda")
    assert len(got) == len(want)
    torch.testing.assert_close(got, want)
