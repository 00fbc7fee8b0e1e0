"""Forward mode and `torch.func` inside a model: values, gradients and training as in eager."""

import copy
from collections.abc import Callable
from typing import Any

import optax
import pytest
import torch
import torch.autograd.functional as functional
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import tpuport
from tpuport.training import make_train_step

# torch scripts its rules of forward mode when they are first asked for.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

Case = Callable[["Net", torch.Tensor], Any]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * grad

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * tangent


class Branch(nn.Module):
    """A branch on a value, whose sides have other derivatives."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x.sin()
        return x * 3


def dual(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.cos()))))


def pushed(f: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    return jvp(f, (x,), (x.cos(),))


def smooth(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x.exp()).sum()


def written(x: torch.Tensor) -> torch.Tensor:
    z = torch.zeros(5, 3)
    z[1:] = x
    z[0, 0] = x[0, 0] * 2
    return z + z.sin()


def params(m: "Net") -> dict[str, torch.Tensor]:
    return dict(m.net.named_parameters())


FUNCTIONS: dict[str, Case] = {
    "jvp": lambda m, x: pushed(lambda y: torch.tanh(y @ m.weight), x),
    "aux": lambda m, x: jvp(lambda y: (y @ m.weight, y * 2), (x,), (x,), has_aux=True),
    "module": lambda m, x: pushed(m.net, x),
    "twice": lambda m, x: pushed(lambda y: pushed(smooth, y)[1], x),
    "twice of a row": lambda m, x: pushed(lambda y: pushed(smooth, y)[1], x[0]),
    "twice of a column": lambda m, x: pushed(lambda y: pushed(smooth, y)[1], x[:, 1]),
    "batch of a row": lambda m, x: jacfwd(jacfwd(lambda y: smooth(y) * y))(x[2]),
    "of weights": lambda m, x: jvp(
        lambda p: functional_call(m.net, p, (x,)),
        (params(m),),
        ({k: torch.ones_like(v) for k, v in params(m).items()},),
    ),
    "attention": lambda m, x: pushed(
        lambda y: F.scaled_dot_product_attention(y[None], y[None], y[None] @ m.weight), x
    ),
}
SECOND: dict[str, Case] = {
    "jacfwd": lambda m, x: jacfwd(lambda y, w: y @ w, argnums=(0, 1))(x[0], m.weight),
    "hessian": lambda m, x: hessian(lambda y: m.net(y).square().sum())(x[0]),
    "hessian of weight": lambda m, x: hessian(lambda w: torch.tanh(x @ w).sum())(m.weight),
    "batched": lambda m, x: vmap(hessian(lambda y: smooth(m.net(y))))(x),
    "divergence": lambda m, x: vmap(lambda y: torch.trace(jacfwd(lambda z: z @ m.weight)(y)))(x),
    "forward over reverse": lambda m, x: pushed(grad(lambda y: smooth(y @ m.weight)), x),
    "reverse over forward": lambda m, x: grad(lambda y: pushed(smooth, y @ m.weight)[1])(x),
    "mixed": lambda m, x: jacrev(jacfwd(smooth))(x[0]),
    "per sample": lambda m, x: vmap(
        grad(lambda p, y: functional_call(m.net, p, (y,)).sum()), (None, 0)
    )(params(m), x),
    "vjp": lambda m, x: vjp(lambda y: y @ m.weight, x)[1](x.cos())[0],
}
DUAL: dict[str, Case] = {
    "linear": lambda m, x: dual(lambda y: F.linear(y, m.weight), x),
    "module": lambda m, x: dual(m.net, x),
    "norm": lambda m, x: dual(lambda y: F.layer_norm(y, (3,), m.weight[0]), x),
    "written": lambda m, x: dual(written, x @ m.weight),
    "weight": lambda m, x: dual(lambda w: F.linear(x, w), m.weight),
    "constant": lambda m, x: dual(lambda y: y * x @ m.weight, torch.arange(3.0)),
    "stopped": lambda m, x: dual(lambda y: y.detach() * y @ m.weight, x),
}
# A trace begins again for a branch: with these alone.
BRANCHES: dict[str, Case] = {
    "jvp": lambda m, x: pushed(lambda y: m.branch(y) + y @ m.weight, x),
    "dual": lambda m, x: dual(lambda y: m.branch(y) + y, x @ m.weight),
}
LAYERS: dict[str, Case] = {
    "softmax": lambda m, x: dual(lambda y: F.softmax(y, -1) @ m.weight, x),
    "attention": lambda m, x: dual(
        lambda y: F.scaled_dot_product_attention(y[None], y[None], y[None] @ m.weight), x
    ),
    "conv": lambda m, x: dual(lambda y: F.conv1d(y[:, None], m.weight[:, None]), x),
    "recurrent": lambda m, x: dual(lambda y: m.gru(y[None])[0], x),
}
FUNCTIONAL: dict[str, Case] = {
    "jvp": lambda m, x: functional.jvp(lambda y: y.sin() @ m.weight, x, x.cos(), create_graph=True),
    "vjp": lambda m, x: functional.vjp(lambda y: y @ m.weight, x, x.cos(), create_graph=True),
    "jacobian": lambda m, x: functional.jacobian(
        lambda y: y.sin() @ m.weight, x[0], create_graph=True
    ),
    "forward": lambda m, x: functional.jacobian(
        lambda y: y.sin() * y, x[0], vectorize=True, strategy="forward-mode"
    ),
    "hessian": lambda m, x: functional.hessian(
        lambda w: torch.tanh(x @ w).sum(), m.weight, create_graph=True
    ),
    "hvp": lambda m, x: functional.hvp(
        lambda w: torch.tanh(x @ w).sum(), m.weight, m.weight.cos(), create_graph=True
    ),
    "vhp": lambda m, x: functional.vhp(smooth, x, x.cos()),
}
GROUPS = {
    "jvp": FUNCTIONS,
    "second": SECOND,
    "dual": DUAL,
    "branches": BRANCHES,
    "layers": LAYERS,
    "functional": FUNCTIONAL,
}


class Net(nn.Module):
    def __init__(self, group: str) -> None:
        super().__init__()
        self.group, self.branch = group, Branch()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
        self.gru = nn.GRU(3, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {name: case(self, x) for name, case in GROUPS[self.group].items()}


def _batch(seed: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))


def _loss(model: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    leaves = torch.utils._pytree.tree_leaves(model(x))
    return torch.stack([leaf.square().mean() for leaf in leaves]).mean()


@pytest.mark.parametrize("group", GROUPS)
def test_derivatives_inside_a_model_are_those_of_eager(group: str) -> None:
    torch.manual_seed(0)
    model = Net(group)
    eager, ported = copy.deepcopy(model), tpuport.convert(model, verify="always")
    for seed in range(2):
        # Every call is compared with eager, each value by its name.
        ported(_batch(seed))
    assert len([one for one in ported.report.parity if one.ok]) >= len(GROUPS[group])

    step = make_train_step(ported, _loss, optax.sgd(1e-3))
    optimizer = torch.optim.SGD(eager.parameters(), lr=1e-3)
    state = step.init()
    for seed in range(3):
        state, metrics = step(state, _batch(seed))
        loss = _loss(eager, _batch(seed))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert float(metrics["loss"]) == pytest.approx(loss.item(), rel=1e-4)
    for name, value in eager.named_parameters():
        assert value.isfinite().all()
        got = tpuport.to_torch(state.params[name])
        torch.testing.assert_close(got, value.detach())


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while x.abs().sum() > 1:
            x = x * 0.5
        return x


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (lambda x: dual(Halves(), x), "a loop that depends on traced values"),
        (lambda x: dual(Cube.apply, x), "a custom autograd function"),
        (lambda x: pushed(Cube.apply, x), "a custom autograd function"),
        (lambda x: linearize(torch.sin, x)[1](x), "make_fx"),
    ],
)
def test_what_no_tangent_goes_through_is_refused(case: Any, why: str) -> None:
    with pytest.raises(tpuport.PortError, match=why) as caught:
        tpuport.convert(case, verify=False)(_batch(0))
    assert caught.value.file == __file__


def test_a_tangent_that_is_known_to_be_zero_is_a_constant() -> None:
    """Autograd's zeros have no memory, which numpy refuses."""
    zeros = torch._efficientzerotensor(3)
    ported = tpuport.convert(lambda x: (x + zeros, zeros * 2))
    for got, expected in zip(ported(torch.ones(3)), (torch.ones(3), torch.zeros(3)), strict=True):
        torch.testing.assert_close(tpuport.to_torch(got), expected)
