"""Views of weights that a call returns or leaves: they read the weight, and pass gradients on."""

import pytest
import torch
from torch import nn

import tpuport


class Views(nn.Module):
    """Returns and keeps views of its weight and of its argument, taken with and without grad."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 9).reshape(3, 3))
        self.kept = torch.zeros(3, 3)

    def forward(self, x):
        self.kept = self.weight.t()
        with torch.no_grad():
            constant = self.weight[0]
        return self.weight.t(), constant, x.t(), x @ self.weight


def seen(device, no_grad):
    """What a script sees of the views before and after an optimizer's step, and of gradients."""
    net = Views().to(device)
    net.kept = net.kept.to(device)
    x = (torch.arange(9.0).reshape(3, 3) / 9).to(device).requires_grad_()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    found = []
    for _ in range(2):
        with torch.set_grad_enabled(not no_grad):
            views = [*net(x), net.kept]
        found.append([view.requires_grad for view in views])
        loss = sum((view * (i + 1)).square().sum() for i, view in enumerate(views))
        loss = loss + net.weight.sum()
        loss.backward()
        gradients = [net.weight.grad, torch.zeros(0) if x.grad is None else x.grad]
        found += [gradient.flatten().tolist() for gradient in gradients]
        optimizer.step()
        found += [view.detach().flatten().tolist() for view in views]
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("no_grad", [False, True])
def test_views_of_a_weight_follow_its_steps_and_pass_gradients_on_as_in_eager(no_grad):
    expected = seen("cpu", no_grad)
    with tpuport.porting():
        ours = seen("cuda", no_grad)
    assert len(ours) == len(expected) == 16
    for one, other in zip(ours, expected, strict=True):
        # Sums in another order; one of these numbers is a small difference of larger ones.
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)


CACHE = [torch.full((2,), 0.3)]


class Appends(nn.Module):
    """Appends a tensor from outside to a list at each call."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.items = [torch.zeros(2), torch.ones(2)]

    def forward(self, x):
        self.items.append(CACHE[0])
        self.items.pop(0)
        return x * self.scale


def appended(device):
    """What a script sees of the list and the global, which it writes to through the list."""
    CACHE[0] = torch.full((2,), 0.3, device=device)
    net, found = Appends().to(device), []
    net.items = [item.to(device) for item in net.items]
    for call in range(5):
        net(torch.ones(2, device=device))
        if call == 3:
            net.items[0].data.mul_(0.5)
        found.append([(item is CACHE[0], item.tolist()) for item in net.items])
    return found, CACHE[0].tolist()


def test_a_global_that_calls_append_to_a_list_stays_one_tensor():
    expected = appended("cpu")
    with tpuport.porting():
        assert appended("cuda") == expected
