"""`torch.compile(module)` inside a porting context: scripts see torch's wrapper."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import tpuport
from tpuport.compat.emulated.programs import programs


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.scale = 1.0

    def forward(self, x, shift=0.0):
        return self.norm(self.first(x)) * self.scale + shift

    def extra(self):
        return self.scale + 1


def looked_at(model):
    """Return what scripts read of a compiled module, after they changed it."""
    model.eval()
    seen = [list(model.state_dict()), [n for n, _ in model.named_parameters()], model.training]
    model.train()
    model.scale = 2.0
    model.added = nn.Parameter(torch.ones(2))
    seen += [model._orig_mod.training, model._orig_mod.scale, model.extra(), model.first.weight]
    seen += [
        [n for n, _ in model.named_modules()],
        hasattr(model, "missing"),
        "extra" in dir(model),
    ]
    del model.added
    weights = {name: value + 1 for name, value in model.state_dict().items()}
    seen += [str(model.load_state_dict(weights)), model.norm.bias, isinstance(model, Net)]
    seen += [[n for n, _ in copy.deepcopy(model).named_buffers()], type(model).__name__]
    with pytest.raises(TypeError, match=r"Net does not support len\(\)"):
        len(model)
    return seen


def test_scripts_see_what_they_see_of_torchs_own():
    expected = looked_at(torch.compile(Net()))
    with tpuport.porting():
        found = looked_at(torch.compile(Net()))
    for want, have in zip(expected, found, strict=True):
        assert torch.equal(want, have) if torch.is_tensor(want) else want == have


def trained(device, compiled):
    net = Net().to(device)
    model = compiled(net)
    seen, x = [], torch.sin(torch.arange(12.0)).view(4, 3).to(device)
    model.register_forward_hook(lambda module, args, out: out * 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(3):
        if step == 2:
            model.eval()
            model._forward_hooks.clear()
        loss = model(x, shift=0.5).square().sum() + net(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss)
    return [one.detach().cpu() for one in (*seen, *model.state_dict().values())]


def test_a_compiled_module_trains_with_its_own_hooks():
    expected = trained("cpu", lambda net: torch.compile(net, backend="eager"))
    with tpuport.porting():
        found = trained("cuda", torch.compile)
    for want, have in zip(expected, found, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)


def test_a_module_and_its_compiled_form_are_one_program():
    with tpuport.porting():
        net = Net().cuda()
        model, x = torch.compile(net), torch.ones(2, 3, device="cuda")
        net(x)
        model(x)
        torch.compile(mode="max-autotune", fullgraph=True)(net)(x)
        assert len(programs()) == 1


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.compile(Net())

    def forward(self, x):
        return self.inner(x) + 1


def test_a_compiled_module_inside_another_is_part_of_its_program():
    with tpuport.porting():
        net, x = Outer().cuda(), torch.sin(torch.arange(12.0, device="cuda")).view(4, 3)
        net(x).sum().backward()
        assert len(programs()) == 1
        assert net.inner._orig_mod.norm.num_batches_tracked == 1
        assert net.get_parameter("inner._orig_mod.first.weight").grad is not None
    want = Net()
    want(x.cpu()).sum().backward()
    torch.testing.assert_close(net.inner._orig_mod.norm.running_var.cpu(), want.norm.running_var)


def test_a_compiled_module_is_saved_whole():
    with tpuport.porting():
        model = torch.compile(Net())
        loaded = pickle.loads(pickle.dumps(model))
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
    file.seek(0)
    assert torch.equal(loaded.first.weight, model.first.weight)
    assert list(torch.load(file)) == list(torch.compile(Net()).state_dict())
