"""Draws from the generators of the host in traced code: made before each call, as in eager."""

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import tpuport
from tpuport import PortError
from tpuport.compat.emulated.programs import PortWarning

X = torch.arange(12.0).reshape(2, 6) / 4


def states() -> Any:
    return random.getstate(), repr(np.random.get_state(legacy=False))


def seed() -> None:
    random.seed(1)
    np.random.seed(1)


def calls(function: Callable[..., Any], x: torch.Tensor, count: int) -> Any:
    """Return what calls give, and how they leave the generators."""
    seed()
    outs = [tpuport.to_torch(function(x)).detach() for _ in range(count)]
    return outs, states()


def assert_as_eager(module: Any, count: int = 4, x: torch.Tensor = X, **options: Any) -> Any:
    want, after = calls(copy.deepcopy(module), x, count)
    port = tpuport.convert(copy.deepcopy(module), **options)
    got, left = calls(port, x, count)
    for expected, found in zip(want, got, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert left == after
    return port


class Kinds(nn.Module):
    """Draws of all kinds, that become tensors in all ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.values, self.names = np.array([1.5, 2.5, 4.0]), {"a": 1.0, "b": 3.0}

    def orders(self, count: int) -> torch.Tensor:
        orders = []
        for _ in range(count):
            order = np.array(list(range(6)))
            np.random.shuffle(order)
            orders.append(order)
        return torch.Tensor(np.array(orders)).long()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.gather(x, 1, self.orders(len(x)))
        x = x[:, np.random.permutation(6)] * torch.from_numpy(np.random.rand(6)).float()
        numbers = [1, 2, 3, 4]
        random.shuffle(numbers)
        x = x + numbers[0] + torch.tensor(random.sample(range(9), 3)).sum() - numbers[-1] * 2
        x = x + random.choices([0.5, 1.5], weights=[1, 3], k=2)[1] * random.randint(1, 3)
        x = x + np.random.choice(self.values) + self.names[np.random.choice(["a", "b"])]
        low = np.random.uniform(0, 1)
        noise = np.random.uniform(low, 2, size=(2, 6)).astype(np.float32)
        noise[0] = 0
        filled = np.zeros((2, 6))
        filled[:] = np.stack([noise[1], noise[0]]) * noise.mean()
        x = x + torch.as_tensor(filled, dtype=torch.float32) + sum(np.random.rand(3))
        x = x + torch.tensor(np.argsort(np.random.randn(6)).tolist())
        mask = torch.from_numpy(np.random.rand(2, 6) > 0.5)
        return random.choice(self.layers)(x) * mask + x[:, int(np.random.randint(0, 5)) :].sum()


def test_draws_of_all_kinds_are_those_of_eager():
    torch.manual_seed(0)
    port = assert_as_eager(Kinds())
    assert port.report.verified
    assert not port.report.retraces


class Sampler(nn.Module):
    """Fills positions in a drawn order, a few a step: how many is known, and which is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bsz, length = 2, 8
        order = torch.Tensor(np.array([np.random.permutation(length) for _ in range(bsz)])).long()
        mask, tokens = torch.ones(bsz, length), x.new_zeros(bsz, length, 3)
        for step in range(3):
            seen = self.layer(tokens[(1 - mask).nonzero(as_tuple=True)].reshape(bsz, -1, 3))
            left = torch.maximum(
                torch.tensor([1.0]),
                torch.minimum(mask.sum(-1, keepdims=True) - 1, torch.tensor([5.0 - 2 * step])),
            )
            following = torch.zeros(bsz, length)
            index = order[:, : left[0].long()]
            following = following.scatter(-1, index, torch.ones(bsz, length)).bool()
            chosen = mask.bool() if step == 2 else torch.logical_xor(mask.bool(), following)
            mask = following.float()
            count = int(chosen.sum())
            new = x.repeat(count, 1)[:count] + seen.sum() * torch.arange(count)[:, None]
            tokens = tokens.clone()
            tokens[chosen.nonzero(as_tuple=True)] = new * (1 + left[0] / length)
        return tokens


def test_sizes_that_are_the_same_whatever_is_drawn_are_static():
    torch.manual_seed(0)
    port = assert_as_eager(Sampler(), x=torch.rand(2, 3))
    assert not port.report.retraces


class Tensors(nn.Module):
    """Tensors of what is drawn: written in place, seen by numpy, kept, and of unknown sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        array = np.random.rand(6)
        t = torch.from_numpy(array)
        y = x * t
        array *= 2
        y = y + t
        t[0] = 5
        rest = t[1:]
        rest.add_(1)
        host = torch.zeros(6)
        host[1:3] = rest[1:3].float()
        y = (y - torch.from_numpy(t.numpy()[::-1].copy())).float() + host
        t += x[0]
        self.total += t.float()
        self.last = host * 2
        mask = torch.from_numpy(np.random.rand(2, 6)) > 0.5
        y = y + x[mask].sum() + mask.sum().item()
        if x.sum() > 100:
            host = host + mask[0]
            y = y - host
        for place in torch.from_numpy(np.random.permutation(3)):
            y = y + x[:, place][:, None] * place
        return y + rest.sum() + self.total + host


def test_tensors_of_what_is_drawn_are_those_of_eager():
    port = assert_as_eager(Tensors())
    eager = Tensors()
    calls(eager, X, 4)
    torch.testing.assert_close(tpuport.to_torch(port.buffers["total"]), eager.total)
    torch.testing.assert_close(tpuport.to_torch(port.buffers["last"]), eager.last)


class Held(nn.Module):
    """Draws from generators of its own, and begins the global ones anew."""

    def __init__(self) -> None:
        super().__init__()
        self.numpy, self.python = np.random.default_rng(5), random.Random(7)
        self.inner = nn.Identity()
        self.inner.old = np.random.RandomState(2)  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order, numbers = np.arange(6), [1.0, 2.0, 3.0]
        self.numpy.shuffle(order)
        self.python.shuffle(numbers)
        x = x[:, order] * torch.from_numpy(self.inner.old.rand(6)) + numbers[1]
        state, numpy_state = random.getstate(), np.random.get_state()
        x = x + random.random() * self.numpy.integers(3)
        np.random.seed(3)
        x = x * torch.from_numpy(np.random.rand(6)) + self.python.random()
        random.setstate(state)
        np.random.set_state(numpy_state)
        return x + random.random() + np.random.rand(1)[0]


@pytest.mark.parametrize("verify", [True, False])
def test_generators_of_a_module_and_seeds_inside_are_those_of_eager(verify: bool):
    eager, ours = Held(), Held()
    port = tpuport.convert(ours, verify=verify)
    want, got = calls(eager, X, 3), calls(port, X, 3)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    assert got[1] == want[1]
    left = port.module
    assert left.numpy.random() == eager.numpy.random()
    assert left.python.random() == eager.python.random()
    assert left.inner.old.rand() == eager.inner.old.rand()


def test_equal_draws_on_both_sides_of_a_branch():
    def program(x: torch.Tensor) -> torch.Tensor:
        x = x * 2 if random.random() < 0.5 else x
        if x.sum() > 30:
            x = x + torch.from_numpy(np.random.rand(6)).float()
        else:
            x = x - torch.from_numpy(np.random.rand(6)).float()
        return x * torch.tensor(np.random.rand(6))

    assert_as_eager(program, 6)


def test_a_call_that_raises_leaves_the_generators_where_eager_does():
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * torch.from_numpy(np.random.rand(6))
            if x.sum() < 0:
                raise ValueError("negative")
            return x + torch.from_numpy(np.random.rand(6))

    def run(function: Callable[..., Any]) -> Any:
        seed()
        function(X)
        with pytest.raises(ValueError, match="negative"):
            function(-X)
        middle = states()
        return middle, tpuport.to_torch(function(X))

    want, got = run(Raises()), run(tpuport.convert(Raises()))
    assert got[0] == want[0]
    torch.testing.assert_close(got[1], want[1])


GENERATOR = np.random.default_rng(0)


def on_one_side(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 3:
        x = x[:, np.random.permutation(6)]  # here
    return x


def in_a_loop(x: torch.Tensor) -> torch.Tensor:
    while x.sum() < 1000:
        x = x * 2 + torch.from_numpy(np.random.rand(6)).float()  # here
    return x


def of_the_program(x: torch.Tensor) -> torch.Tensor:
    return x * torch.from_numpy(np.random.normal(float(x[0, 0]), 1.0, size=6))  # here


def times_an_array(x: torch.Tensor) -> torch.Tensor:
    return x * np.random.rand(6)  # here


def old_constructor(x: torch.Tensor) -> torch.Tensor:
    return x + torch.FloatTensor(np.random.rand(6))  # here


def made_elsewhere(x: torch.Tensor) -> torch.Tensor:
    order = torch.arange(6).numpy()
    np.random.shuffle(order)  # here
    return x[:, order]


def outside_of_the_module(x: torch.Tensor) -> torch.Tensor:
    return x * torch.from_numpy(GENERATOR.random(6))  # here


def returned(x: torch.Tensor) -> Any:
    return x, np.random.rand(6)


def state_returned(x: torch.Tensor) -> Any:
    return x * torch.from_numpy(np.random.rand(6)), np.random.get_state()


def unseeded(x: torch.Tensor) -> torch.Tensor:
    return x * random.Random().random()  # here


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (on_one_side, "a branch or loop on a value of the program decides"),
        (in_a_loop, "is made in a loop of the program"),
        (of_the_program, "takes a number that depends on|depends on the program's inputs"),
        (times_an_array, "meets a tensor in mul(.|\n)*torch.from_numpy"),
        (old_constructor, "is read here(.|\n)*torch.from_numpy"),
        (made_elsewhere, "was made elsewhere(.|\n)*numpy.random.permutation"),
        (outside_of_the_module, "drew random numbers from a numpy random Generator"),
        (returned, "is returned, kept in an attribute"),
        (state_returned, "the result holds a state"),
        (unseeded, "TPU402"),
    ],
)
def test_what_cannot_be_drawn_before_the_call_is_refused_at_its_line(program: Any, why: str):
    before = states()
    with pytest.raises(PortError, match=why) as refused:
        tpuport.convert(program, verify=False)(X)
    assert states() == before
    if program not in (returned, state_returned):
        assert "# here" in (refused.value.source_line or "")


def test_a_size_that_depends_on_the_draw_is_refused_at_its_line():
    def program(x: torch.Tensor) -> torch.Tensor:
        array = np.random.rand(6)
        array = array[array > 0.5]  # here
        return x.sum() + torch.from_numpy(array).sum()

    port = tpuport.convert(program, verify=False)

    before = None

    def draw_until_another_size() -> None:
        nonlocal before
        for _ in range(20):
            before = states()
            port(X)

    seed()
    with pytest.raises(PortError, match="size") as refused:
        draw_until_another_size()
    assert states() == before
    assert "# here" in (refused.value.source_line or "")


def test_apply_has_no_draws_before_it():
    """They would be constants of the user's own `jax.jit`."""
    port = tpuport.convert(lambda x: x * torch.from_numpy(np.random.rand(6)).float())
    with pytest.raises(PortError, match="only a call of the ported model itself"):
        port.apply({}, {}, jax.random.key(0), jnp.ones((2, 6)))
    assert port.eval_shape(X).shape == (2, 6)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = np.arange(6)
        np.random.shuffle(order)
        hidden = self.layer(x) * torch.from_numpy(np.random.rand(6)).float().to(x.device)
        return self.head(hidden)[:, order].square().mean() * random.random()


def trained(device: str) -> Any:
    torch.manual_seed(0)
    network = Network().to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    seed()
    losses = []
    for step in range(3):
        loss = network((X + step).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, network.layer.weight.detach().cpu().clone(), states()


def test_a_script_trains_a_network_that_draws_as_one_program():
    want = trained("cpu")
    with warnings.catch_warnings(), tpuport.porting():
        warnings.simplefilter("error", PortWarning)
        got = trained("cuda")
    torch.testing.assert_close(got[:2], want[:2], rtol=1e-5, atol=1e-6)
    assert got[2] == want[2]


class Fitted(nn.Module):
    """Chooses rows by numpy at its first call, which a buffer tells."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("bias", torch.zeros(6))
        self.register_buffer("is_fitted", torch.tensor([False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_fitted:
            np.random.seed(3)
            self.bias = x[np.random.choice(x.shape[0], 4)].mean(0)
            self.is_fitted = torch.tensor([True])
        return (x * self.scale > self.bias).float() + x * self.scale


def test_a_flag_among_the_buffers_may_decide_whether_a_call_draws() -> None:
    assert_as_eager(Fitted())
    fitted = Fitted()
    fitted(X)
    ported = tpuport.convert(fitted)
    assert_as_eager(fitted)
    key, args = jax.random.key(0), (jnp.asarray(X.numpy()),)
    grads = jax.grad(lambda p: ported.apply(p, ported.buffers, key, *args)[0].sum())(ported.params)
    torch.testing.assert_close(tpuport.to_torch(grads["scale"]), X.sum(0))
