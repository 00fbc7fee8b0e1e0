"""Idioms of other people's packages, without the packages."""

import gc
import random
import weakref

import jax
import opt_einsum
import pytest
import torch
from torch import distributions, nn

import tpuport
from tests.exactness.scenario import Scenario, by_tpuport, check_calls, check_gradients, normal
from tpuport.foundation import pytree
from tpuport.foundation.errors import ParityError, PortError
from tpuport.model.parity import verify

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")
X, Y, Z = normal(4, 3), normal(4, 3, seed=2), normal(4, 3, seed=3)


class ActNorm(nn.Module):
    """The first batch sets a parameter by `.data`, in a branch on a buffer (normalizing flows)."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(3))
        self.register_buffer("initialized", torch.tensor(False))

    def forward(self, x):
        before = self.scale.detach()
        if not self.initialized:
            with torch.no_grad():
                self.scale.data = -torch.log(x.std(0))
                self.initialized.data = torch.tensor(True)
        return x * self.scale.exp(), before


class Average:
    """It refers to the parameters of a module, weakly and otherwise, and keeps other state."""

    def __init__(self, parameters):
        self.known = list(parameters)
        self.weak = [weakref.ref(p) for p in self.known]
        self.kept, self.calls = None, 0


class Averaged(nn.Module):
    """An average of weights as torch-ema keeps it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.average = Average(self.linear.parameters())

    def forward(self, x):
        weak, known = self.average.weak, self.average.known
        self.average.kept = [p().clone() for p in weak]
        self.average.calls += 1
        with torch.no_grad():
            known[1].add_(1)
        return self.linear(x) + self.average.kept[0].sum() + weak[1]().sum()


class Inverse:
    """It refers to its transform, and the transform to it weakly, as in torch.distributions."""

    def __init__(self, transform):
        self.transform, self.itself = transform, self


class Transform(nn.Module):
    def __init__(self, keeps=False):
        super().__init__()
        self.weight, self.inverse = nn.Parameter(torch.ones(3)), None
        self.kept, self.keeps = None, keeps

    def forward(self, x):
        inverse = None if self.inverse is None else self.inverse()
        if inverse is None:
            inverse = Inverse(self)
            self.inverse = weakref.ref(inverse)
            self.kept = inverse if self.keeps else None
        return x / inverse.transform.weight


class Flow(nn.Module):
    """Distributions and transforms that refer to parameters, made early and late (pyro)."""

    def __init__(self):
        super().__init__()
        self.shift, self.loc = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
        self.prior = distributions.Normal(self.loc, 1.0)
        self.transform = None

    def forward(self, x):
        if self.transform is None:
            self.transform = distributions.AffineTransform(self.shift, 2.0, cache_size=1)
        y = self.transform.inv(x)
        return self.prior.log_prob(y), self.transform.log_abs_det_jacobian(y, x)


def lists(x):
    """Ops on lists, as tensordict and optimizers call them."""
    a = [x * 1, x[:2] * 2]
    with torch.no_grad():
        b = torch._foreach_maximum(torch._foreach_mul(a, 0.5), 0.1)
        torch._foreach_mul_(b, [2.0, 3.0])
        torch._foreach_addcdiv_(b, a, torch._foreach_add(a, a, alpha=4), [0.5, 0.25])
        c = torch._foreach_lerp(torch._foreach_pow(2.0, a), b, 0.3)
        d = torch._foreach_addcmul(b, c, a, torch.tensor([1.0, 2.0]))
    return b, c, d, torch._foreach_norm(a), torch._foreach_sub(a, [1.0, 2.0])


def forces(x):
    """A sum that is scattered into zeros requires grad, and so does what is made of it (NequIP)."""
    at = x.detach().requires_grad_()
    energies = (at**2).sum(-1, keepdim=True)
    total = torch.zeros(2, 1).scatter_add_(0, torch.tensor([[0], [1], [1], [0]]), energies)
    assert total.sum().requires_grad
    ones = torch.ones_like(total)
    kept = torch.autograd.grad([total], [at], grad_outputs=[ones], retain_graph=True)[0]
    return kept, torch.autograd.grad([total.sum()], [at])[0]


class Contracted(nn.Module):
    """opt_einsum finds the functions for an array by the module of its class."""

    def __init__(self):
        super().__init__()
        self.w, self.v = nn.Parameter(normal(3, 4)), nn.Parameter(normal(4, 5))

    def forward(self, x):
        return opt_einsum.contract("ij,jk,kl->il", x, self.w, self.v)


def logmap(y):
    ahead = torch.sqrt(torch.clamp_min(y[..., :1].double().pow(2) - 1.0, 1e-15))
    rest = torch.cat((y.narrow(-1, 0, 1) - 1.0, y.narrow(-1, 1, 2)), -1)
    length = torch.sqrt(torch.clamp_min((rest * rest).sum(-1, keepdim=True), 1e-8))
    return torch.log(y[..., :1] + ahead).to(y.dtype) * rest / length


class Logmap(nn.Module):
    def forward(self, y):
        return logmap(y)


class Scripted(nn.Module):
    """TorchScript takes its own autograd after some calls that have gradients (geoopt, e3nn)."""

    def __init__(self, compile, target):
        super().__init__()
        self.linear, self.compiled = nn.Linear(3, 3), compile(target)

    def forward(self, x):
        return self.compiled(self.linear(x).cosh() + 1)


def scripted(target):
    module = Scripted(torch.jit.script, target)
    for _ in range(4):
        module(X).sum().backward()
    module.zero_grad()
    return module


SCENARIOS = [
    Scenario("set by the first batch", ActNorm, ((X,), (Y,), (Z,)), grads=False),
    Scenario("an average of weights", Averaged, ((X,), (Y,), (Z,)), grads=False),
    Scenario("a helper", lambda: Transform(keeps=True), ((X,), (X[:2],), (Y,))),
    Scenario("a flow", Flow, ((X,), (X[:2],), (Y,))),
    Scenario("forces", lambda: forces, ((X,), (Y,)), grads=False),
    Scenario("lists", lambda: lists, ((X,), (Y,))),
    Scenario("opt_einsum", Contracted, ((X,),)),
    Scenario("a scripted function", lambda: scripted(logmap), ((X,), (Y,))),
    Scenario("a scripted module", lambda: scripted(Logmap()), ((X,), (Y,))),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_values(scenario):
    check_calls(scenario, by_tpuport)


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s.grads], ids=str)
def test_gradients(scenario):
    check_gradients(scenario, by_tpuport)


def test_an_object_of_an_earlier_call_is_gone():
    gc.disable()
    try:
        check_calls(Scenario("an inverse", Transform, ((X,), (X[:2],), (Y,))), by_tpuport)
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_a_hook_of_the_graph_is_refused_when_a_gradient_is_taken():
    module = nn.Linear(3, 3)
    module.register_backward_hook(lambda module, before, after: None)
    ported = tpuport.convert(module, verify=False)
    torch.testing.assert_close(ported(X).torch(), module(X))

    def loss(params):
        return ported.apply(params, ported.buffers, None, X)[0].sum()

    with pytest.raises(PortError, match="TPU403 a hook of torch's autograd graph"):
        jax.grad(loss)(ported.params)


def test_parameters_of_a_scripted_module_are_refused():
    module = nn.Sequential(torch.jit.script(nn.Linear(3, 3)))
    with pytest.raises(PortError, match="compiled by TorchScript, reads parameters"):
        tpuport.convert(module, verify=False)(X)


class Normalized(nn.Module):
    """A normalizer of observations, as rl_games scripts its own."""

    def __init__(self, write):
        super().__init__()
        self.register_buffer("mean", torch.full((3,), 0.5))
        self.write, self.seen = write, [torch.ones(3)]

    def forward(self, x):
        made = x + self.mean
        made[0].mul_(2.0)
        if self.training:
            if self.write == "set":
                self.mean = self.mean * 0.9
            elif self.write == "in place":
                self.mean[1:].add_(x.mean(0)[1:])
            elif self.write == "list":
                self.seen.append(x.mean(0))
            else:
                made = nn.functional.batch_norm(made, self.mean, self.seen[0], training=True)
        return made * self.seen[0]


@pytest.mark.parametrize("write", ["set", "in place", "list", "statistics"])
def test_state_of_a_scripted_module_is_refused(write):
    module = nn.Sequential(torch.jit.script(Normalized(write)), nn.Linear(3, 3))
    with pytest.raises(PortError, match="compiled by TorchScript, writes to its attributes"):
        tpuport.convert(module)(X)
    module.eval()
    torch.testing.assert_close(tpuport.convert(module)(X).torch(), module(X))


def test_a_difference_beside_a_scripted_module_is_found(monkeypatch):
    module = nn.Sequential(torch.jit.script(Logmap()), nn.Linear(3, 3))
    whole = verify.outputs

    def wrong(expected, out, given):
        return whole(expected, pytree.map_tensors(lambda t: t * 1.01, out), given)

    monkeypatch.setattr(verify, "outputs", wrong)
    with pytest.raises(ParityError):
        tpuport.convert(module)(X.abs() + 1)


@torch.compile
def doubled(grad):
    return grad[torch.arange(3)].cos() * 2


class Compiled(torch.autograd.Function):
    """Its backward calls a compiled function, as hippynn's does."""

    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return doubled(grad)


class Backward(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return Compiled.apply(self.linear(x)).sum()


def test_a_backward_calls_a_compiled_function():
    module, x = Backward(), normal(3, 3)
    ported = tpuport.convert(module, verify=False)
    found = jax.jit(jax.grad(lambda p: ported.apply(p, ported.buffers, None, x)[0]))(ported.params)
    with torch.compiler.set_stance("force_eager"):
        module(x).backward()
    for name, weight in module.named_parameters():
        torch.testing.assert_close(tpuport.to_torch(found[name]), weight.grad)


@pytest.mark.parametrize("made", [lambda x: x[:2], torch.Tensor.half], ids=["shape", "dtype"])
def test_data_of_another_form_is_refused(made):
    def replaced(x):
        y = x * 1
        y.data = made(x)
        return y * 1

    with pytest.raises(PortError, match=r"`.data` of a tensor .* gets another dtype or shape"):
        tpuport.convert(replaced, verify=False)(X)


class Picked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, i):
        ctx.save_for_backward(i)
        return x[i]

    @staticmethod
    def backward(ctx, gradient):
        (i,) = ctx.saved_variables
        return gradient[i - 1], None


def test_a_try_around_a_gradient_catches_nothing_of_the_program():
    ported = tpuport.convert(Picked.apply, verify=False)
    i = torch.tensor([2, 1])
    try:
        (got,) = jax.grad(lambda x: ported.apply({}, {}, None, *x, i)[0].sum())([jax.numpy.ones(2)])
    except IndexError:
        pytest.fail("there is none")
    assert got.shape == (2,)


class Rejected(RuntimeError):
    """An error class of a package."""


def test_the_text_of_an_error_may_need_a_number_of_the_program():
    def checked(x, i):
        if i.max() >= 3:
            raise Rejected(f"index {int(i.max())}, {x[0].item():.2f}")
        assert x.sum() < 100, f"sum {int(x.sum())}"
        return x[i]

    ported, x, i = tpuport.convert(checked, verify=False), torch.arange(4.0), torch.tensor([1, 2])
    torch.testing.assert_close(ported(x, i).torch(), checked(x, i))
    for kind, args in ((Rejected, (x, i + 1)), (AssertionError, (x * 100, i))):
        with pytest.raises(kind, match="its text needs values that the program computes"):
            ported(*args)


# What beartype makes of a function whose argument is a list: the item that it checks is drawn.
CHECKED = """
def checked(x, parts, __beartype_getrandbits=getrandbits):
    item = parts[__beartype_getrandbits(32) % len(parts)]
    assert isinstance(item, int)
    return checks(x, parts)
"""


@pytest.mark.parametrize("draws", [False, True])
def test_the_checks_of_beartype_draw_nothing(draws):
    def scaled(x, parts):
        return x * sum(parts) * (random.sample([1, 2], 1)[0] if draws else 1)

    names = {"getrandbits": random.getrandbits, "checks": scaled}
    exec(compile(CHECKED, "<@beartype(scaled) at 0x1>", "exec"), names)
    checked = names["checked"]
    ported = tpuport.convert(lambda x: checked(x, [1, 2, 3]))
    random.seed(3)
    drawn = random.sample([1, 2], 1)[0] if draws else 1
    after = random.random()
    random.seed(3)
    torch.testing.assert_close(ported(X).torch(), X * 6 * drawn)
    # As the checks are left out, what follows them is what it is without them.
    assert random.random() == after
