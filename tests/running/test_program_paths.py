"""Each way through a module's code is compared with eager once, and compiled once."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tpuport
from tpuport.compat.emulated.programs import programs
from tpuport.foundation.errors import ParityError
from tpuport.tracing.core.tensor import TracedTensor


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x, *, halved=False):
        y = self.line(x).square().mean()
        if not self.training:
            return y * 3
        return y / 2 if halved else y


def built(module):
    torch.manual_seed(0)
    return module().cuda()


def rows():
    return torch.linspace(-1, 1, 12).reshape(3, 4).cuda()


def test_a_module_that_gives_a_scalar_trains():
    with tpuport.porting():
        net = built(Loss)
        net(rows()).backward()
        host = Loss()
        host.load_state_dict({k: v.cpu() for k, v in net.state_dict().items()})
        host(rows().cpu()).backward()
        torch.testing.assert_close(net.line.weight.grad.cpu(), host.line.weight.grad)


def test_training_after_evaluation_finds_its_program():
    with tpuport.porting():
        net = built(Loss)
        for _ in range(3):
            net.train()
            trained = net(rows())
            trained.backward()
            net.eval()
            with torch.no_grad():
                torch.testing.assert_close(net(rows()), trained.detach() * 3)
        (model,) = programs()
        assert [r.causes for r in model.report.retraces] == [
            ("state of the module changed: training mode",)
        ]


def test_what_changes_beside_the_mode_is_not_forgotten():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.line, self.act, self.scale = nn.Linear(4, 4), nn.ReLU(), 2.0

        def forward(self, x):
            return self.act(self.line(x)) * self.scale

    with tpuport.porting(), torch.no_grad():
        net = built(Scaled)
        first = net(rows())
        net.eval()
        net(rows())
        net.scale = 6.0
        torch.testing.assert_close(net(rows()), first * 3)
        net.train()
        torch.testing.assert_close(net(rows()), first * 3)
        net.act = nn.Identity()
        net.eval()
        torch.testing.assert_close(net(rows()), net.line(rows()) * 6)


@torch.no_grad()
def test_each_option_and_mode_is_compared_with_eager():
    with tpuport.porting():
        net = built(Loss)
        counts = []
        for call in (
            lambda: net(rows()),
            lambda: net(rows(), halved=True),
            lambda: net(rows(), halved=True),
            lambda: net(rows()[:2], halved=True),
            lambda: net.eval()(rows()),
        ):
            call()
            counts.append(len(programs()[0].report.parity))
    one = counts[0]
    assert counts == [one, 2 * one, 2 * one, 2 * one, 3 * one]


class Dropped(nn.Module):
    """A checkpointed block with dropout, which a backward pass computes again."""

    def __init__(self, reentrant=True, frozen=False):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.requires_grad_(not frozen)
        self.reentrant = reentrant

    def block(self, x):
        return nn.functional.dropout(self.second(x), 0.5)

    def forward(self, x):
        return checkpoint(self.block, self.first(x), use_reentrant=self.reentrant).square().sum()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_block_is_verified_on_the_same_random_numbers(reentrant):
    with tpuport.porting():
        net = built(lambda: Dropped(reentrant))
        net(rows()).backward()
        (model,) = programs()
        assert model.report.verified
        assert {"gradient"} < {one.kind for one in model.report.parity}
        assert net.second.weight.grad.any()


def test_a_distribution_on_the_host_stays_there():
    class Timed(nn.Module):
        def __init__(self):
            super().__init__()
            self.line, self.times = nn.Linear(4, 4), torch.distributions.Beta(1.5, 1.0)

        def forward(self, x):
            return self.line(x) * self.times.sample([len(x)]).to(x.device)[:, None]

    with tpuport.porting():
        net = built(Timed)
        first, second = (net(rows()) for _ in range(2))
        assert not torch.equal(first, second)
        assert net.times.concentration1.device.type == "cpu"
        (model,) = programs()
        assert model.report.retraces == []


def test_code_in_a_program_sees_the_accelerator_however_it_asks():
    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x):
            y = self.line(x)
            self.seen = (y.is_cuda, y.is_cpu, y.get_device(), y.device.type)
            return y

    with tpuport.porting():
        net = built(Asking)
        net(rows())
        assert net.seen == (True, False, 0, "cuda")
        (model,) = programs()
        assert model.report.verified


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_a_reentrant_block_without_inputs_to_differentiate_is_not_quietly_trained():
    """torch gives its weights no gradients then."""
    with tpuport.porting():
        net = built(lambda: Dropped(frozen=True))
        assert not net(rows()).requires_grad
        (model,) = programs()
        assert model.report.verified


class Normed(nn.Module):
    """The gradient of the bias is zero but for rounding."""

    def __init__(self):
        super().__init__()
        self.line, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        y = self.line(x)
        if isinstance(x, TracedTensor) and getattr(self, "misled", False):
            y = 2 * y.detach() - y
        return self.norm(y).sigmoid()


@pytest.mark.parametrize("misled", [False, True])
def test_rounding_is_no_error_and_a_wrong_sign_is(misled):
    def made():
        net = Normed()
        net.misled = misled
        return net

    with tpuport.porting():
        net = built(made)
        if misled:
            for _ in range(2):
                with pytest.raises(ParityError, match=r"grad\.line\.weight differs"):
                    net(rows())
            return
        net(rows()).sum().backward()
        (model,) = programs()
        (record,) = (r for r in model.report.parity if r.path == "grad.line.bias")
        assert record.ok
        assert record.max_abs < 1e-6
        assert model.report.verified


def test_every_call_of_a_program_is_compared_if_asked_for():
    with tpuport.porting(verify="always"), torch.no_grad():
        net = built(Loss)
        net(rows())
        (model,) = programs()
        before = model.report.timing.observe
        net(rows() * 2)
        assert model.report.timing.observe > before
        assert model.report.verified


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.line(x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_script_checkpoints_calls_of_a_program(reentrant):
    """Each call again, with the numbers that it drew: they decide what the square passes back."""
    with tpuport.porting():
        net = built(Line)
        for _ in range(3):
            x = rows().requires_grad_()
            made = []

            def block(x, made=made):
                made.append(net(x))
                return made[-1].square().sum()

            checkpoint(block, x, use_reentrant=reentrant).backward()
            assert len(made) == 2
            want = 2 * made[0] * (made[0] != 0) * 2 @ net.line.weight
            torch.testing.assert_close(x.grad, want.detach())


def test_hooks_on_saved_tensors_see_none_of_a_program():
    seen = []
    with tpuport.porting():
        net, x = built(Loss), rows()
        net(x).backward()
        want = net.line.weight.grad.clone()
        for made in (net, built(Loss)):  # one that has its program, one that is traced here
            net.zero_grad()
            with torch.autograd.graph.saved_tensors_hooks(seen.append, lambda tensor: tensor):
                loss = made(x)
            loss.backward()
            torch.testing.assert_close(made.line.weight.grad, want)
    assert not seen


class Estimated(torch.autograd.Function):
    """The logarithm of a norm, whose gradient takes a norm from random directions."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().sum(1).log()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        start = torch.randn(x.shape[0], 1, device=x.device).abs() + 1
        return grad[:, None] * 2 * x / (start / start.square() * start * x.square()).sum(1)[:, None]


class Estimating(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x):
        noise = torch.randn_like(x)
        return (Estimated.apply(self.line(x)) + (noise - noise).sum(1)).sum()


def test_gradients_that_draw_numbers_are_not_compared_with_none():
    """A power iteration begins at random, and the backward pass of an estimator runs it again."""
    torch.manual_seed(0)
    eager = Estimating()
    with tpuport.porting():
        net = built(Estimating)
        for _ in range(2):
            for one, x in ((net, rows()), (eager, rows().cpu())):
                one.zero_grad()
                one(x).backward()
            torch.testing.assert_close(net.line.weight.grad.cpu(), eager.line.weight.grad)
        (model,) = programs()
        assert model.report.ok


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        temperature = max(0.5, 1 - 0.2 * self.steps.item())
        return self.line(x) / temperature, temperature


def test_a_call_returns_a_number_beside_what_is_differentiated():
    torch.manual_seed(0)
    eager = Tempered()
    with tpuport.porting():
        net = built(Tempered)
        for _ in range(4):
            out, temperature = net(rows())
            want, number = eager(rows().cpu())
            assert temperature == number
            assert type(temperature) is float
            net.zero_grad()
            eager.zero_grad()
            out.square().sum().backward()
            want.square().sum().backward()
            torch.testing.assert_close(net.line.weight.grad.cpu(), eager.line.weight.grad)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x, scale):
        return x * self.weight * scale


@pytest.mark.parametrize(
    ("hook", "with_kwargs"),
    [
        (lambda module, args, kwargs: (args, kwargs | {"scale": 2.0}), True),
        (lambda module, args: (*args, args[0].mean()), False),
        (lambda module, args, kwargs: (args[:1], {"scale": kwargs["other"]}), True),
    ],
)
def test_a_hook_gives_arguments_that_the_call_lacks(hook, with_kwargs):
    given = {"other": 4.0} if "other" in hook.__code__.co_consts else {}
    eager = Scaled()
    eager.register_forward_pre_hook(hook, with_kwargs=with_kwargs)
    ported = tpuport.convert(copy.deepcopy(eager), (torch.ones(2, 3),), given)
    with tpuport.porting():
        net = Scaled().cuda()
        net.register_forward_pre_hook(hook, with_kwargs=with_kwargs)
        for factor in (1.0, 2.0):
            x = torch.arange(6.0).reshape(2, 3) * factor
            for one, on in ((net, x.cuda()), (eager, x)):
                one.zero_grad()
                one(on, **given).sum().backward()
            torch.testing.assert_close(net.weight.grad.cpu(), eager.weight.grad)
            torch.testing.assert_close(tpuport.to_torch(ported(x, **given)), eager(x, **given))


class Instead:
    """A forward of one module, with the name and signature of its class's, which it calls."""

    def __init__(self, module):
        functools.update_wrapper(self, type(module).forward)
        self.module = module

    def __call__(self, x):
        return type(self.module).forward(self.module, x, scale=2.0)

    def __deepcopy__(self, memo):
        return Instead(copy.deepcopy(self.module, memo))


def test_a_forward_of_the_module_itself_wraps_that_of_its_class():
    eager = Scaled()
    eager.forward = Instead(eager)
    x = torch.arange(6.0).reshape(2, 3)
    ported = tpuport.convert(copy.deepcopy(eager), (x,))
    torch.testing.assert_close(tpuport.to_torch(ported(x + 1)), eager(x + 1).detach())
    with tpuport.porting():
        net = Scaled().cuda()
        net.forward = Instead(net)
        for factor in (1.0, 2.0):
            for one, on in ((net, x.cuda()), (eager, x)):
                one.zero_grad()
                one(on * factor).sum().backward()
            torch.testing.assert_close(net.weight.grad.cpu(), eager.weight.grad)
