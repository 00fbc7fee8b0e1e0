"""What programs keep, let go, and notice; the numbers are in test_scripts."""

import copy
import random
import warnings

import jax
import numpy as np
import pytest
import torch
from torch import nn

import tpuport
from tpuport.compat.emulated.programs import PortWarning, programs

SINK: list = []


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).cuda()


def test_a_collected_loss_holds_nothing_of_its_program_after_backward():
    with tpuport.porting():
        net, x, total, alive = built(), torch.ones(2, 4, device="cuda"), 0.0, []
        for _ in range(5):
            loss = net(x).sum()
            loss.backward()
            total = total + loss
            alive.append(len(jax.live_arrays()))
        assert len(set(alive[1:])) == 1
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


def test_modes_that_come_back_take_the_programs_they_had():
    with tpuport.porting():
        net, x = built(), torch.ones(2, 4, device="cuda")
        for _ in range(5):
            net.eval()(x)
            net.train()(x)
            net.requires_grad_(False)(x)
            net.requires_grad_(True)
        (model,) = programs()
        assert len(model.report.retraces) == 2


def test_comparing_does_not_move_torchs_generator():
    with tpuport.porting():
        net = built()
        torch.manual_seed(5)
        net(torch.ones(2, 4, device="cuda"))
        after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        y = self.lin(x)
        SINK.append(y)
        return y


def test_what_is_kept_outside_is_kept_once_and_is_a_tensor():
    SINK.clear()
    with tpuport.porting():
        net = Keeps().cuda()
        with pytest.warns(PortWarning, match=r"Keeps writes to what is outside of it \(.*SINK\)"):
            net(torch.ones(2, 4, device="cuda"))
        assert [type(one) for one in SINK] == [torch.Tensor]
        assert [model.report.model for model in programs()] == ["Linear"]
    SINK.clear()


def test_a_backward_hook_is_not_inside_a_program():
    seen = []
    with tpuport.porting():
        net = built()
        net[0].register_full_backward_hook(lambda m, i, o: seen.append(o[0].shape))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            net(torch.ones(2, 4, device="cuda")).sum().backward()
    found = [str(one.message) for one in said if "0 has a backward hook" in str(one.message)]
    assert found
    assert f"{__file__}:" in found[0]
    assert seen == [(2, 8)]


class Shares(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return x, x[0], self.lin.weight, self.lin(x)


def test_outputs_that_are_arguments_or_weights_are_those():
    with tpuport.porting():
        net, x = Shares().cuda(), torch.ones(2, 4, device="cuda")
        for _ in range(2):
            same, row, weight, _ = net(x)
            assert same is x
            assert weight is net.lin.weight
            row.add_(1)
        assert x.tolist() == [[3] * 4, [1] * 4]


MADE: dict | None = None


class MakesOnce(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        global MADE
        if MADE is None:
            MADE = {"scale": 3.0, "shift": torch.ones(4)}
        return self.inner(x) * MADE["scale"] + MADE["shift"].to(x.device)


@torch.no_grad()
def test_a_global_that_is_made_when_it_is_first_asked_for_stays():
    global MADE
    MADE = None
    with tpuport.porting() as run:
        net = MakesOnce().cuda()
        x = torch.ones(2, 4, device="cuda")
        outs = [net(x) for _ in range(3)]
        assert [report.model for report in run.report.programs] == ["MakesOnce"]
        assert run.report.programs[0].retraces == []
    assert MADE["scale"] == 3.0
    torch.testing.assert_close(outs[2].cpu(), net.inner(torch.ones(2, 4)) * 3 + 1)
    MADE = None


class LogsToo(MakesOnce):
    def forward(self, x):
        y = super().forward(x)
        LOG.append("called")
        return y


LOG: list[str] = []


@torch.no_grad()
def test_but_not_if_the_call_writes_more_than_that():
    global MADE
    MADE = None
    LOG.clear()
    with tpuport.porting():
        net = LogsToo().cuda()
        with pytest.warns(PortWarning, match="LogsToo writes to what is outside of it"):
            net(torch.ones(2, 4, device="cuda"))
    assert LOG == ["called"]
    MADE = None


class Shuffled(nn.Module):
    """A layer beside numbers drawn on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 4), []

    def forward(self, x):
        self.seen = [random.random(), np.random.randn(), *np.random.permutation(8)]
        return self.layer(x)


def shuffles(device: str) -> list[float]:
    random.seed(0)
    np.random.seed(0)
    net, x, seen = Shuffled().to(device), torch.ones(2, 4, device=device), []
    for _ in range(3):
        net(x)
        seen += net.seen
    return [*seen, random.random(), np.random.rand()]


def test_a_module_left_to_eager_draws_the_numbers_that_eager_draws():
    with tpuport.porting(), pytest.warns(PortWarning, match="keeps a number"):
        ours = shuffles("cuda")
    assert ours == shuffles("cpu")


class Listed(nn.Module):
    """Lists the parameters of its head only, for an optimizer, by methods with old signatures."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.body(x).tanh()).sum()

    def named_parameters(self, prefix="", recurse=True):
        return ((f"{prefix}{n}", p) for n, p in self.head.named_parameters(recurse=recurse))

    def parameters(self, recurse=True):
        return [p for _, p in self.named_parameters(recurse=recurse)]


def test_a_module_that_lists_some_of_its_parameters_has_gradients_for_all():
    torch.manual_seed(0)
    eager, x = Listed(), torch.linspace(-1, 1, 6).reshape(2, 3)
    port = tpuport.convert(copy.deepcopy(eager), args=(x,))
    grads = jax.grad(lambda params: port.apply(params, port.buffers, None, x)[0])(port.params)
    with tpuport.porting():
        net = copy.deepcopy(eager).to("cuda")
        net(x.to("cuda")).backward()
        got = {n: p.grad.cpu() for n, p in nn.Module.named_parameters(net)}
    eager(x).backward()
    for name, parameter in nn.Module.named_parameters(eager):
        torch.testing.assert_close(got[name], parameter.grad)
        torch.testing.assert_close(tpuport.to_torch(grads[name]), parameter.grad)


class Shifted(nn.Linear):
    def forward(self, x, shift=None):
        return super().forward(x) if shift is None else super().forward(x) + shift


def test_backward_hooks_between_two_calls_of_one_layer_get_the_gradients_of_the_script():
    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer, other = Shifted(3, 3).to(device), nn.Linear(3, 3).to(device)
        seen: list[torch.Tensor] = []

        def before(module, gradients):
            seen.append(gradients[0])
            return (gradients[0] * 2,)

        def after(module, into, gradients):
            seen.extend([*into, *gradients])

        other.register_full_backward_pre_hook(before)
        other.register_full_backward_hook(after)
        for number in range(2):
            x = torch.full((2, 3), number + 1.0, device=device)
            # By an argument of another kind, so that the second call is compared, too.
            layer(other(layer(x)).tanh(), x * 2).square().sum().backward()
        return [one.cpu() for one in (*seen, layer.weight.grad, other.weight.grad)]

    want = trained("cpu")
    with tpuport.porting(), pytest.warns(PortWarning, match="has a backward hook"):
        have = trained("cuda")
    for one, other in zip(want, have, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
