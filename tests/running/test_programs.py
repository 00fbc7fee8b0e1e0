"""Calls of unedited modules on the accelerator: eager PyTorch's numbers, by jitted programs."""

import copy
import gc
import json
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import tpuport
from tpuport.compat.emulated.programs import PortWarning, programs
from tpuport.foundation.errors import PortError, UsageError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.leave = nn.Linear(8, 3)
        self.scale = 1.0

    def forward(self, x, mask=None):
        h = self.norm(self.enter(x))
        if mask is not None:
            h[mask] = 0.0
        if h.abs().max() > 100:
            h = h / 2
        return {"y": self.leave(F.gelu(h)) * self.scale, "n": (x > 0).sum(), "name": "net"}


def built(make=Net, device="cpu"):
    torch.manual_seed(0)
    return make().to(device)


def batch(device="cpu", rows=5):
    return torch.linspace(-1, 1, 6 * rows).reshape(rows, 6).to(device)


def both(use, make=Net):
    """What a script gives in eager PyTorch, and what the same script gives as programs."""
    expected = use(built(make), "cpu")
    with tpuport.porting():
        got = use(built(make, "cuda"), "cuda")
    return expected, got


def close(expected, got, rtol=1e-4):
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got.cpu(), expected, rtol=rtol, atol=1e-6)
    elif isinstance(expected, dict):
        assert list(expected) == list(got)
        [close(expected[k], got[k], rtol) for k in expected]
    elif isinstance(expected, (list, tuple)):
        assert type(expected) is type(got)
        [close(a, b, rtol) for a, b in zip(expected, got, strict=True)]
    else:
        assert expected == got or expected == pytest.approx(got, rel=rtol)


def test_a_call_gives_the_structure_and_numbers_of_eager():
    with torch.no_grad():
        close(*both(lambda net, device: net(batch(device), mask=torch.arange(5).to(device) > 2)))


def test_results_are_on_the_accelerator_and_one_program_serves_equal_calls():
    with tpuport.porting():
        net = built(device="cuda")
        with torch.no_grad():
            outs = [net(batch("cuda") * i)["y"] for i in range(4)]
        assert {out.device for out in outs} == {torch.device("cuda", 0)}
        (model,) = programs()
        assert model.report.verified
        assert model.report.retraces == []
    assert programs() == []


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw one by one": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adam fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_training_script_ends_with_the_weights_of_eager(make):
    def train(net, device):
        optimizer = make(net.parameters())
        average = copy.deepcopy(net)
        losses = []
        for step in range(6):
            for part in batch(device, rows=4).chunk(2):
                ((net(part * (1 + step))["y"] - 1) ** 2).mean().div(2).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            for ours, theirs in zip(average.parameters(), net.parameters(), strict=True):
                ours.data.mul_(0.9).add_(theirs.data, alpha=0.1)
            with torch.no_grad():
                losses.append(average(batch(device))["y"].sum().item())
        return losses, dict(net.state_dict()), dict(average.state_dict())

    # Each of the six steps adds its rounding, and Adam divides by the root of small gradients.
    close(*both(train), rtol=5e-4)


def test_gradients_reach_arguments_and_stop_at_frozen_weights():
    def gradients(net, device):
        net.enter.requires_grad_(False)
        x = batch(device).requires_grad_()
        net(x)["y"].pow(2).sum().backward()
        first = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        net.enter.requires_grad_(True)
        net(x)["y"].sum().backward()
        return x.grad, first, [p.grad for p in net.parameters()]

    close(*both(gradients))


def test_two_calls_in_one_graph():
    def twice(net, device):
        first = net(batch(device))["y"]
        second = net(torch.cat([first, first], -1))["y"]
        (first * second).sum().backward()
        return [p.grad for p in net.parameters()]

    close(*both(twice))


CHANGES = {
    "data": lambda net: net.leave.weight.data.mul_(2),
    "no_grad": lambda net: nn.init.ones_(net.leave.weight),
    "item": lambda net: net.leave.weight.data.__setitem__((0, 0), 5.0),
    "rebound data": lambda net: setattr(net.leave.weight, "data", net.leave.weight.data * 3),
    "state dict": lambda net: net.load_state_dict({k: v * 2 for k, v in net.state_dict().items()}),
    "vector": lambda net: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(net.parameters()) * 2, net.parameters()
    ),
    "number": lambda net: setattr(net, "scale", 3.0),
    "layer": lambda net: setattr(
        net, "leave", nn.Linear(8, 3, device=net.leave.weight.device).requires_grad_(False)
    ),
    "parameter": lambda net: setattr(net.leave, "bias", nn.Parameter(net.leave.bias.detach() + 1)),
    "hook": lambda net: net.norm.register_forward_hook(lambda m, i, o: o * 2) and None,
    "no bias": lambda net: setattr(net.leave, "bias", None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_what_a_script_changes_reaches_the_next_call(change):
    def use(net, device):
        before = net(batch(device))["y"]
        torch.manual_seed(1)
        change(net)
        return before, net(batch(device))["y"]

    expected, got = both(use)
    assert not torch.equal(*expected)
    close(expected, got)


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.batch_norm = nn.BatchNorm1d(6)
        self.register_buffer("total", torch.zeros(6))
        self.calls, self.last, self.history = 0, None, []

    def forward(self, x):
        h = self.batch_norm(self.inner(x))
        self.total += h.detach().abs().sum(0)
        self.calls += 1
        self.last = h.detach()
        if len(self.history) < 2:
            self.history.append(h.detach().abs().mean())
        return h * self.total


def test_what_a_call_changes_reaches_the_module():
    def use(net, device):
        outs = [net(batch(device) * i).abs().sum() for i in (1, 2, 3, 4)]
        net.eval()
        outs.append(net(batch(device)).abs().sum())
        return [out.detach() for out in outs], net.calls, net.last, net.history, net.state_dict()

    expected, got = both(use, Keeping)
    assert expected[1] == 5
    close((*expected[:4], dict(expected[4])), (*got[:4], dict(got[4])))


def test_a_number_that_changes_at_each_call_does_not_make_a_program_each():
    with tpuport.porting():
        net = built(device="cuda")
        with torch.no_grad():
            for step in range(6):
                net.scale = 1.0 + step
                got = net(batch("cuda"))["y"]
        (model,) = programs()
        assert len(model.report.retraces) <= 2
    net.scale = 6.0
    close(built()(batch())["y"] * 6, got)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return F.dropout(self.inner(x), 0.5, training=True) + torch.randn_like(x)


def test_random_numbers_are_fresh_seeded_and_the_same_forward_and_backward():
    with tpuport.porting():
        net = built(Noisy, "cuda")
        torch.manual_seed(3)
        first, second = net(batch("cuda")), net(batch("cuda"))
        torch.manual_seed(3)
        again = net(batch("cuda"))
        assert not torch.equal(first, second)
        close(first.detach().cpu(), again.detach())
        kept = (net(torch.zeros(64, 6, device="cuda")) - 0).sum(0)
        (bias,) = torch.autograd.grad(kept.sum(), [net.inner.bias])
        # 2 for each kept element, 0 for each dropped one: the mask that the output was made with.
        assert ((bias / 2) % 1 == 0).all()
        assert 32 < bias.min() < bias.max() < 96


LAYOUTS = {
    "transposed": lambda x: (x * 2).transpose(1, 2),
    "channels last": lambda x: x.to(memory_format=torch.channels_last).relu(),
    "of a convolution": lambda x: torch.conv2d(
        x.contiguous(memory_format=torch.channels_last), x.new_ones(4, 3, 2, 2)
    ),
    "by a convolution's weight": lambda x: torch.conv2d(
        x, x.new_ones(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    ),
    "of a matrix": lambda x: (x + 1).mT,
    "contiguous": lambda x: x + 1,
}


@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_what_is_drawn_like_a_result_is_what_eager_draws(make, differentiated):
    class Laid(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()), requires_grad=differentiated)

        def forward(self, x):
            return make(x * self.scale)

    def drawn(device):
        torch.manual_seed(0)
        x = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5).to(device)
        net = Laid().to(device)
        out = net(x)
        assert out.requires_grad is differentiated
        assert len(programs()) == (device != "cpu")
        return out.detach(), out.stride(), torch.randn_like(out.detach())

    expected = drawn("cpu")
    with tpuport.porting():
        got = drawn("cuda")
    assert got[1] == expected[1]
    close(expected[0], got[0])
    assert torch.equal(got[2].cpu(), expected[2])


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Net(), Net()

    def forward(self, x):
        h = self.first(x)["y"]
        words = [f"{value:.3f}" for value in h[0].tolist()]  # no program can do that
        return self.second(torch.cat([h, h], -1))["y"], words


@torch.no_grad()
def test_where_a_module_is_no_program_its_submodules_are():
    expected = built(Outer)(batch())
    with tpuport.porting():
        net = built(Outer, "cuda")
        with pytest.warns(PortWarning, match=r"Outer is not one program, its submodules are: .*"):
            got = net(batch("cuda"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net(batch("cuda"))
        assert len(programs()) == 2
    close(expected, got)


@torch.no_grad()
def test_layers_of_a_class_that_is_refused_are_not_all_tried():
    class Layer(Outer):
        def forward(self, x):
            y, words = super().forward(x)
            return torch.cat([y, y], -1) * len(words[0])

    expected = built(lambda: nn.Sequential(*(Layer() for _ in range(5))))
    inputs = batch()
    with tpuport.porting(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", PortWarning)
        net = copy.deepcopy(expected).cuda()
        got = net(inputs.cuda())
        again = net(inputs.cuda())
    refused = [str(one.message).partition(" ")[0] for one in said]
    assert refused == ["Sequential", "Layer", "Layer"]
    close(expected(inputs), got)
    close(got, again)


class Matching(nn.Module):
    """A loss as detectors have it: class weights in a buffer, and a matching on the host."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 0.5]))

    def forward(self, logits, wanted):
        cost = (logits[:, :1] - wanted.float()).abs().detach().cpu().numpy()
        order = torch.as_tensor(cost.argmin(0), device=logits.device)
        return torch.nn.functional.cross_entropy(logits[order], wanted, self.weight)


def test_a_loss_without_parameters_that_is_no_program_runs_as_other_code_does():
    def step(device):
        net, loss_of = built(lambda: nn.Linear(4, 2), device), Matching().to(device)
        found = [loss_of(net(batch(device)[:, :4]), torch.arange(2, device=device))]
        found[0].backward()
        return [one.detach().cpu() for one in (*found, net.weight.grad)]

    expected = step("cpu")
    text = r"Matching is not one program, and runs in eager PyTorch: .*"
    with tpuport.porting(), pytest.warns(PortWarning, match=text):
        got = step("cuda")
    for want, have in zip(expected, got, strict=True):
        close(want, have)


def test_nothing_inside_to_fall_back_on_is_an_error():
    class Leaf(nn.Linear):
        def forward(self, x):
            return f"{super().forward(x).sum().item():.3f}"

    with tpuport.porting():
        net = Leaf(6, 6).cuda()
        with pytest.raises(PortError, match=r"test_programs.py:\d+: TPU") as raised:
            net(batch("cuda"))
    frames = [frame.path for frame in raised.traceback]
    assert not any("/tpuport/tracing/" in str(path) for path in frames)
    # What the message names helps a person who cannot edit the class.
    assert str(raised.value).endswith("tpuport run --eager Leaf")
    with tpuport.porting(eager=["Leaf"]):
        assert isinstance(Leaf(6, 6).cuda()(batch("cuda")), str)


def test_what_holds_a_class_that_is_left_to_eager_is_not_tried():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.ported = Net(), nn.Linear(6, 3)

        def forward(self, x):
            return self.left(x)["y"] + self.ported(x)

    with tpuport.porting(eager=["Net"]), warnings.catch_warnings():
        warnings.simplefilter("error")
        net = built(Sum, "cuda")
        got = net(batch("cuda"))
        assert sorted(p.report.model for p in programs()) == [
            "LayerNorm",
            "Linear",
            "Linear",
            "Linear",
        ]
    close(built(Sum)(batch()), got)


def test_a_class_can_be_left_to_eager():
    with tpuport.porting(eager=("Net",)):
        net = Outer().cuda()
        net.first(batch("cuda"))
        assert sorted(p.report.model for p in programs()) == ["LayerNorm", "Linear", "Linear"]


class Planner(nn.Module):
    def __init__(self):
        super().__init__()
        self.step = nn.Linear(6, 6)

    def sample(self, x, steps=4):
        for _ in range(steps):
            x = x + self.step(x).tanh()
        return x


@torch.no_grad()
def test_a_named_method_is_one_program():
    expected = built(Planner).sample(batch())
    method = Planner.sample
    with tpuport.porting(methods=("Planner.sample",)):
        net = built(Planner, "cuda")
        got = net.sample(batch("cuda"))
        assert len(programs()) == 1

        class Later(nn.Module):
            def __init__(self):
                super().__init__()
                self.step = nn.Linear(6, 6)

    assert Planner.sample is method
    close(expected, got)


def test_a_gradient_through_an_attribute_is_not_lost():
    class Leaking(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.hidden = None

        def forward(self, x):
            self.hidden = self.inner(x)
            return self.hidden.sum()

    with tpuport.porting():
        net = Leaking().cuda()
        net(batch("cuda"))
        assert len(programs()) == 1
        net.hidden.sum().backward()
        assert net.inner.bias.grad.tolist() == [5] * 6


def test_an_argument_that_is_written_to_is_written_to():
    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x, seen):
            x[0] = 0
            seen["count"] = seen.get("count", 0) + 1
            seen["sum"] = x.sum()
            return self.inner(x)

    def use(net, device):
        x, seen = batch(device), {}
        out = net(x, seen)
        return out.detach(), x, seen

    close(*both(use, Writing))


def test_under_inference_mode():
    def use(net, device):
        with torch.inference_mode():
            return [net(batch(device) * i)["y"] for i in (1, 2)]

    close(*both(use))


def test_a_module_can_be_copied_and_pickled_and_is_not_kept_alive():
    with tpuport.porting():
        net = built(device="cuda")
        net(batch("cuda"))["y"].sum().backward()
        twin = copy.deepcopy(net)
        close(net(batch("cuda"))["y"].detach().cpu(), twin(batch("cuda"))["y"].detach())
        gone = weakref.ref(twin)
        del twin
        gc.collect()
        assert gone() is None
        assert not [name for name in vars(net) if "tpuport" in name]


def test_the_module_is_plain_pytorch_after_the_block():
    with tpuport.porting():
        net = built(Keeping, "cuda")
        net(batch("cuda")).sum().backward()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    reference = built(Keeping)
    reference(batch()).sum().backward()
    assert {p.device.type for p in net.parameters()} == {"cpu"}
    close(dict(reference.state_dict()), state)
    close(reference(batch()).detach(), net(batch()).detach())


def test_recurrent_layers_do_not_look_for_cudnn():
    def use(net, device):
        return net(batch(device)[None])[0].detach()

    close(*both(use, lambda: nn.LSTM(6, 4, batch_first=True)))


def test_a_backward_pass_that_eager_refuses_is_refused_only_if_it_is_asked_for():
    class Overwriting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x):
            h = self.inner(x).sigmoid()
            h[h > 0.5] = 0.0  # sigmoid's derivative needs what this overwrites
            return h

    expected, got = both(lambda net, device: net(batch(device)).detach(), Overwriting)
    close(expected, got)


def test_the_report_says_what_was_ported(tmp_path):
    with tpuport.porting() as run:
        net = built(Outer, "cuda")
        with pytest.warns(PortWarning), torch.no_grad():
            net(batch("cuda"))
    assert run.report.ok
    assert [report.model for report in run.report.programs] == ["Net", "Net"]
    assert str(run.report).startswith("2 programs, 1 call left to the modules inside\n")
    assert "Net: agrees, at most" in str(run.report)
    page = run.report.save(tmp_path / "run.html").read_text()
    assert page.count("<summary><code>Net</code></summary>") == 2
    assert "Outer is not one program" in page
    data = json.loads(run.report.save(tmp_path / "run.json").read_text())
    assert [one["what"] for one in data["descended"]] == ["Outer"]
    with pytest.raises(UsageError, match=r"\.json, \.html or \.txt, got '.*run.pdf'"):
        run.report.save(tmp_path / "run.pdf")


def test_an_option_that_no_shim_has_is_refused():
    with pytest.raises(UsageError, match="no argument 'flash_atn'; did you mean flash_attn"):
        tpuport.porting(flash_atn={}).__enter__()


def test_a_model_that_a_script_converts_itself_is_compared_with_eager_not_with_programs():
    with tpuport.porting() as run:
        net = built(device="cuda")
        ported = tpuport.convert(net)
        with torch.no_grad():
            close(built()(batch())["y"], tpuport.to_torch(ported(batch("cuda"))["y"]))
    assert ported.report.verified
    assert run.report.programs == []


class Settings:
    def __init__(self):
        self.calls, self.seen, self.scale = 0, [], {"by": 1.0}


class Configured(nn.Module):
    def __init__(self, settings, log):
        super().__init__()
        self.inner, self.settings, self.log = nn.Linear(6, 6), settings, log

    def forward(self, x):
        if self.settings.calls < 2:
            self.settings.calls += 1
            self.settings.seen.append(self.settings.calls)
            self.log["calls"] = self.settings.calls
            self.settings.scale["by"] *= 2
        return self.inner(x) * self.settings.scale["by"]


@torch.no_grad()
def test_a_call_changes_the_objects_that_the_script_holds():
    def use(device):
        settings, log = Settings(), {}
        seen = settings.seen
        net = built(lambda: Configured(settings, log), device)
        outs = [net(batch(device)) for _ in range(4)]
        assert (net.settings is settings, net.log is log, settings.seen is seen) == (True,) * 3
        return outs, vars(settings), log

    expected = use("cpu")
    with tpuport.porting():
        close(expected, use("cuda"))
    assert expected[1]["calls"] == 2


def test_a_counter_in_an_object_that_changes_at_each_call_is_not_lost():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.settings = nn.Linear(6, 6), Settings()

        def forward(self, x):
            self.settings.calls += 1
            return self.inner(x) * self.settings.calls

    def use(net, device):
        return [net(batch(device)).detach() for _ in range(6)], net.settings.calls

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PortWarning)
        close(*both(use, Counting))


def test_a_module_of_frozen_weights_passes_gradients_on():
    def gradients(net, device):
        net.requires_grad_(False)
        x = batch(device).requires_grad_()
        net(x)["y"].pow(2).sum().backward()
        assert all(p.grad is None for p in net.parameters())
        return x.grad

    close(*both(gradients))


class TrainsItself(nn.Linear):
    """A layer that keeps its optimizer, as forward-forward training writes it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x / (x.norm(2, 1, keepdim=True) + 1e-4) @ self.weight.T + self.bias)

    def fit(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            self.optimizer.zero_grad()
            self(x).pow(2).mean().backward()
            self.optimizer.step()
        return self(x).detach()


def test_a_module_that_keeps_its_optimizer():
    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [TrainsItself(3, 4).to(device), TrainsItself(4, 2).to(device)]
        x = torch.linspace(-1, 1, 15).reshape(5, 3).to(device)
        for layer in layers:
            x = layer.fit(x)
        return [x.cpu(), *(p.detach().cpu() for layer in layers for p in layer.parameters())]

    expected = trained("cpu")
    with tpuport.porting():
        found = trained("cuda")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


class Listed(nn.Module):
    """Has a `parameters` of its own, as learners of MAML have, which returns a list."""

    def __init__(self):
        super().__init__()
        self.vars = nn.ParameterList([torch.ones(2, 3), torch.zeros(2)])

    def parameters(self, recurse=True):
        return self.vars  # pyright: ignore[reportReturnType]

    def forward(self, x):
        return torch.nn.functional.linear(x, *self.vars).tanh()


def test_a_class_with_a_list_of_parameters_becomes_a_program():
    with tpuport.porting() as run:
        net = Listed().cuda()
        net(torch.ones(4, 3, device="cuda")).sum().backward()
    assert [report.model for report in run.report.programs] == ["Listed"]
    assert net.vars[1].grad is not None


class Static(nn.Module):
    @staticmethod
    def forward(x):
        return x * torch.sigmoid(x)


class OfClass(nn.Module):
    gain = 2.0

    @classmethod
    def forward(cls, x):
        return x * cls.gain


def test_forward_may_be_a_method_of_the_class_or_static():
    x = torch.linspace(-1, 1, 6).view(2, 3)
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(3, 3), Static(), OfClass())(x)
    with tpuport.porting():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), Static(), OfClass()).cuda()
        assert torch.allclose(model(x.cuda()).cpu(), expected)
        assert torch.allclose(Static.forward(x.cuda()).cpu(), Static.forward(x))
        assert torch.allclose(OfClass().forward(x.cuda()).cpu(), OfClass.forward(x))


class Passing(TorchFunctionMode):
    """One that passes everything on, as those that count operations do."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("around", [torch.device, lambda device: Passing()], ids=["device", "own"])
def test_a_whole_script_may_run_in_a_mode(around):
    def use(net, device):
        with around(device):
            out = net(batch(device))["y"]
            out.square().sum().backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            return out, norm, net.enter.weight.grad, out.device == net.enter.weight.device

    close(*both(use))


class Positions(nn.Module):
    """Registers its tables in the first call, of which one is not saved."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        if not hasattr(self, "table"):
            rows = torch.linspace(0, 1, len(x), device=x.device)[:, None]
            self.register_buffer("table", rows, persistent=False)
            self.register_buffer("saved", rows * 2)
        return (x + self.table + self.saved) * self.scale


def test_buffers_that_a_call_registers_are_saved_as_asked():
    def use(net, device):
        out = [net(batch(device)), net(batch(device))]
        return out, dict(net.state_dict()), dict(net.named_buffers())

    close(*both(use, Positions))
