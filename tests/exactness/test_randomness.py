"""Randomness is explicit.

Fresh numbers at each call, the same key gives the same numbers, no tracer leaks.

Contents:
    DRAWS                every random op and dropout layer: fresh, reproducible, of the right
                         distribution
    test_gradient_*      fresh inside value_and_grad, masks agree with their gradient
    test_seed_*          torch.manual_seed, torch.Generator, second batch shape, leaks, host
                         generators
    DISTRIBUTIONS        torch.distributions: sampled on the device; rsample gradients;
                         validate_args
"""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchax
from torch import nn
from torch.distributions import Beta, Categorical, Dirichlet, Gamma, Normal, Uniform

import tpuport
from tests.exactness.plain_torchax import PlainTorchax
from tests.exactness.scenario import assert_same, by_tpuport, expect_torchax_wrong, host, normal
from tpuport.foundation.errors import PortError
from tpuport.tracing.core import keys

N = 4000
FROZEN = "the key is closed over by jax.jit: the same numbers at every call"
X = normal(N)

# Name -> (draw of N numbers, mean, standard deviation, dtype).
DRAWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float, float, torch.dtype]] = {
    "rand": (lambda x: torch.rand(N), 0.5, 12**-0.5, torch.float32),
    "randn": (lambda x: torch.randn(N, device=x.device), 0.0, 1.0, torch.float32),
    "randn_bfloat16": (lambda x: torch.randn(N, dtype=torch.bfloat16), 0.0, 1.0, torch.bfloat16),
    "rand_like": (torch.rand_like, 0.5, 12**-0.5, torch.float32),
    "randn_like": (lambda x: torch.randn_like(x) + 0 * x, 0.0, 1.0, torch.float32),
    "randint": (lambda x: torch.randint(0, 10, (N,)), 4.5, 8.25**0.5, torch.int64),
    "randint_like": (lambda x: torch.randint_like(x, 4), 1.5, 1.25**0.5, torch.float32),
    "randperm": (lambda x: torch.randperm(N), (N - 1) / 2, N / 12**0.5, torch.int64),
    "bernoulli": (lambda x: torch.bernoulli(torch.full((N,), 0.3)), 0.3, 0.21**0.5, torch.float32),
    "bernoulli_": (lambda x: torch.empty(N).bernoulli_(0.3), 0.3, 0.21**0.5, torch.float32),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 3), 1.0, 4 / 12**0.5, torch.float32),
    "normal_": (lambda x: torch.zeros(N).normal_(2, 3), 2.0, 3.0, torch.float32),
    "normal": (lambda x: torch.normal(torch.full((N,), 2.0), 0.5), 2.0, 0.5, torch.float32),
    "exponential_": (lambda x: torch.empty(N).exponential_(2.0), 0.5, 0.5, torch.float32),
    "multinomial": (
        lambda x: torch.multinomial(torch.tensor([0.25, 0.5, 0.25]), N, replacement=True),
        1.0, 0.5**0.5, torch.int64,
    ),
    "poisson": (lambda x: torch.poisson(torch.full((N,), 4.0)), 4.0, 2.0, torch.float32),
    "dropout": (lambda x: F.dropout(torch.ones(N), 0.25), 1.0, 3**-0.5, torch.float32),
    "dropout_in_place": (
        lambda x: F.dropout(x * 0 + 1, 0.25, inplace=True), 1.0, 3**-0.5, torch.float32,
    ),
    "feature_dropout": (
        lambda x: F.dropout1d(torch.ones(1, N, 2), 0.5)[0, :, 1], 1.0, 1.0, torch.float32,
    ),
    "init": (
        lambda x: nn.init.kaiming_uniform_(torch.empty(N // 4, 4)).flatten(),
        0.0, 0.5**0.5, torch.float32,
    ),
    "gumbel_hard": (
        lambda x: F.gumbel_softmax(torch.zeros(N, 2), hard=True)[:, 0], 0.5, 0.5, torch.float32,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def drawn_twice() -> Any:
    """Every draw made twice in one program, and that program called twice."""
    torch.manual_seed(1)
    port = by_tpuport(lambda x: {name: (draw(x), draw(x)) for name, (draw, *_) in DRAWS.items()})
    return port(X), port(X)


@pytest.mark.parametrize("name", DRAWS)
def test_draw_is_fresh_and_right(name, drawn_twice):
    _, mean, deviation, dtype = DRAWS[name]
    (one, two), (three, _) = drawn_twice[0][name], drawn_twice[1][name]
    drawn = [host(t).double() for t in (one, two, three)]
    assert one.dtype == dtype
    assert not torch.equal(drawn[0], drawn[1]), "two draws in one call are equal"
    assert not torch.equal(drawn[0], drawn[2]), "two calls draw the same"
    for numbers in drawn:
        assert abs(float(numbers.mean()) - mean) < 6 * deviation / N**0.5
        assert abs(float(numbers.std()) - deviation) < 0.1 * deviation + 1e-9
    assert abs(float(torch.corrcoef(torch.stack(drawn[:2]))[0, 1])) < 0.1


@pytest.mark.parametrize("name", ["rand", "randn_like", "randint", "dropout", "normal_"])
@expect_torchax_wrong(FROZEN)
def test_draw_is_fresh_under_plain_torchax(name):
    port = PlainTorchax(DRAWS[name][0])
    assert not torch.equal(host(port(X)), host(port(X)))


class Noisy(nn.Module):
    """Dropout in each of its module forms, and attention with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [nn.Dropout(0.5), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2), nn.RReLU()]
        )
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.recurrent = nn.GRU(8, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        x = self.attention(x, x, x, need_weights=False)[0]
        p = 0.2 if self.training else 0.0
        return self.recurrent(F.scaled_dot_product_attention(x, x, x, dropout_p=p))[0]


def test_dropout_modules_are_fresh_in_training_and_off_in_evaluation():
    torch.manual_seed(0)
    eager = Noisy()
    port = by_tpuport(eager)
    x = normal(2, 2, 8)
    assert not torch.equal(host(port(x)), host(port(x)))
    assert_same(port.eval()(x), eager.eval()(x), "evaluation", 1e-4)


# Gradients.


def _dropout_step() -> tuple[Any, Any]:
    port = by_tpuport(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)))

    def loss(params: Any, key: Any, x: Any) -> Any:
        return jnp.mean(port.apply(params, port.buffers, key, x)[0] ** 2)

    return port, jax.jit(jax.value_and_grad(loss))


def test_gradient_step_draws_fresh_numbers_from_its_key():
    port, step = _dropout_step()
    x = normal(4, 8).numpy()
    first, again, other = (step(port.params, jax.random.key(k), x) for k in (0, 0, 1))
    assert first[0] == again[0]
    assert first[0] != other[0]
    assert bool((first[1]["0.weight"] == again[1]["0.weight"]).all())
    assert step._cache_size() == 1


def test_gradient_step_takes_a_second_batch_shape():
    port, step = _dropout_step()
    with jax.checking_leaks():
        losses = [
            float(step(port.params, jax.random.key(0), normal(n, 8).numpy())[0]) for n in (4, 2, 4)
        ]
    assert losses[0] == losses[2]
    assert np.isfinite(losses).all()


def test_gradient_follows_the_mask_that_was_drawn():
    port = by_tpuport(lambda x: F.dropout(x, 0.5))
    x = jnp.ones(64)
    value, pull = jax.vjp(lambda x: port.apply({}, {}, jax.random.key(3), x)[0], x)
    assert bool((pull(jnp.ones(64))[0] == value).all())
    assert 0 < float((value == 0).mean()) < 1


@expect_torchax_wrong(FROZEN)
def test_gradient_step_is_fresh_under_plain_torchax():
    port = PlainTorchax(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)))

    def loss(params: Any, x: Any) -> Any:
        with torchax.default_env():
            return jnp.mean(port.pure(params, {}, x)[0] ** 2)

    step = jax.jit(jax.value_and_grad(loss))
    x = normal(4, 8).numpy()
    assert step(port.params, x)[0] != step(port.params, x)[0]


@expect_torchax_wrong("the trace leaves a tracer in the environment's key")
def test_second_batch_shape_under_plain_torchax():
    port = PlainTorchax(lambda x: x + torch.randn(x.shape, device="jax"))
    env = torchax.default_env()
    env.manual_seed(0)
    try:
        with env:
            port._jitted({}, {}, jnp.ones(4))
            port._jitted({}, {}, jnp.ones(2))
    finally:
        env.manual_seed(0)


# Seeds and keys.


def test_seed_of_torch_decides_the_calls():
    port = by_tpuport(lambda x: x + torch.randn(8))
    x = torch.zeros(8)
    torch.manual_seed(7)
    first = [host(port(x)) for _ in range(3)]
    torch.manual_seed(7)
    second = [host(port(x)) for _ in range(3)]
    torch.manual_seed(8)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], host(port(x)))


@expect_torchax_wrong("torch.manual_seed does not seed it")
def test_seed_of_torch_under_plain_torchax():
    results = []
    torchax.default_env().manual_seed(0)
    for seed in (7, 8):
        torch.manual_seed(seed)
        results.append(
            host(PlainTorchax(lambda x: x + torch.randn(8, device="jax"))(torch.zeros(8)))
        )
    torchax.default_env().manual_seed(0)
    assert not torch.equal(*results)


def test_seed_set_inside_the_function():
    def program(x: torch.Tensor) -> Any:
        torch.manual_seed(3)
        first = torch.randn(8)
        torch.manual_seed(3)
        return x + first, x + torch.randn(8), x + torch.randn(8)

    port = by_tpuport(program)
    a, b, c = (host(t) for t in port(torch.zeros(8)))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(a, host(port(torch.zeros(8))[0]))


def test_seed_of_a_generator_argument():
    port = by_tpuport(
        lambda x, generator: (x + torch.randn(8, generator=generator), x + torch.rand(8))
    )
    x = torch.zeros(8)
    generator = torch.Generator().manual_seed(5)
    first, second = port(x, generator), port(x, generator)
    again = port(x, torch.Generator().manual_seed(5))
    assert not torch.equal(host(first[0]), host(second[0]))
    assert torch.equal(host(first[0]), host(again[0]))
    assert not torch.equal(host(first[1]), host(again[1]))
    assert len(port.report.retraces) == 0


def test_seed_of_a_generator_made_inside_is_eagers():
    def program(x: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(11)
        return x + torch.randn(8, generator=generator)

    x = normal(8)
    port = by_tpuport(program)
    assert_same(port(x), program(x), "host generator of its own")
    assert_same(port(x), program(x), "and again")


def test_seed_state_moves_once_a_call_and_not_while_tracing():
    port = by_tpuport(lambda x: x + torch.randn(8) * torch.rand(8))
    quiet = by_tpuport(lambda x: x * 2)
    x = torch.zeros(8)
    torch.manual_seed(0)
    port(x)
    after_first = torch.rand(1)
    torch.manual_seed(0)
    port(x)
    assert torch.equal(torch.rand(1), after_first), "tracing drew from torch's generator"
    state = torch.get_rng_state()
    quiet(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_no_key_is_an_error_with_a_remedy():
    port = by_tpuport(lambda x: x + torch.randn(8))
    with pytest.raises(PortError, match=r"given no key(.|\n)*jax\.random\.key\(0\)"):
        port.apply({}, {}, None, torch.zeros(8))


# Draws of one number on the host, their means and standard deviations.
HOST_DRAWS: list[tuple[Callable[[], Any], float, float]] = [
    (lambda: random.random(), 0.5, 12**-0.5),  # a list of functions is not looked through
    (lambda: random.uniform(-1, 3), 1.0, 4 / 12**0.5),
    (lambda: random.gauss(2, 3), 2.0, 3.0),
    (lambda: random.normalvariate(sigma=0.5), 0.0, 0.5),
    (lambda: random.randint(1, 4), 2.5, 1.25**0.5),
    (lambda: random.randrange(4), 1.5, 1.25**0.5),
    (lambda: np.random.rand() + np.random.random(), 1.0, 6**-0.5),
    (lambda: np.random.uniform(0, high=2), 1.0, 2 / 12**0.5),
    (lambda: np.random.randn() + np.random.normal(1.0, 2.0), 1.0, 5**0.5),
    (lambda: np.random.randint(5, 9), 6.5, 1.25**0.5),
]


def test_single_numbers_of_the_host_are_drawn_from_the_key():
    """And equal those of the eager run that the program is compared with."""

    def program(x):
        return torch.stack([x.sum() + draw() for draw, _, _ in HOST_DRAWS])

    state = random.getstate(), np.random.get_state()[2:4]
    port, x = tpuport.convert(program), torch.zeros(1)
    first, second = host(port(x)), host(port(x))
    assert (random.getstate(), np.random.get_state()[2:4]) == state
    assert (first == second).sum() < 4  # integers may agree
    keys = jax.random.split(jax.random.key(0), N)
    drawn = np.asarray(jax.vmap(lambda key: port.apply({}, {}, key, jnp.zeros(1))[0])(keys))
    for numbers, (_, mean, deviation) in zip(drawn.T, HOST_DRAWS, strict=True):
        assert abs(numbers.mean() - mean) < 5 * deviation / N**0.5
        assert numbers.std() == pytest.approx(deviation, rel=0.05)


def test_a_number_of_the_host_decides_a_branch_with_a_gradient():
    """As in layers that are left out, and in self-conditioning."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if random.random() < 0.5 else x * 2

    torch.manual_seed(0)
    module, x = Skips(), torch.ones(2, 4)
    port = tpuport.convert(module)
    assert len({round(float(port(x).sum()), 3) for _ in range(12)}) == 2

    def loss(params: Any, key: Any) -> Any:
        return port.apply(params, {}, key, jnp.ones((2, 4)))[0].sum()

    keys = jax.random.split(jax.random.key(0), 16)
    _, gradients = jax.vmap(jax.value_and_grad(loss), (None, 0))(port.params, keys)
    bias = np.asarray(gradients["layer.bias"])
    assert {tuple(row) for row in bias} == {(0.0,) * 4, (2.0,) * 4}


def test_an_item_of_the_hosts_choice_is_drawn_from_the_key():
    """Sizes, names and layers of a list are chosen as well as numbers, in branches."""

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            layer = random.choice([self.layers[0], self.layers[1], None])
            y = x * 2 if layer is None else layer(x)
            return y.mean() * random.choice(range(1, 3)) + x[: random.choice((1, 2))].sum()

    torch.manual_seed(0)
    module, x = Chooses(), torch.arange(8.0).reshape(2, 4)
    state = random.getstate()
    port = tpuport.convert(module)
    seen = {round(float(port(x)), 3) for _ in range(60)}
    assert random.getstate() == state
    with torch.no_grad():
        means = [float(y.mean()) for y in (*(layer(x) for layer in module.layers), x * 2)]
    assert seen == {round(m * n + t, 3) for m in means for n in (1, 2) for t in (6, 28)}
    assert len(port.report.retraces) == 0

    def loss(params: Any, key: Any) -> Any:
        return port.apply(params, {}, key, jnp.asarray(x.numpy()))[0]

    keys = jax.random.split(jax.random.key(0), 30)
    gradients = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(port.params, keys)
    chosen = [np.asarray(gradients[f"layers.{n}.bias"])[:, 0] != 0 for n in range(2)]
    assert not (chosen[0] & chosen[1]).any()
    assert [bool(one.any()) for one in chosen] == [True, True]
    assert not (chosen[0] | chosen[1]).all()


@pytest.mark.parametrize(
    "draw",
    [
        lambda: random.choices([1.0])[0],
        lambda: random.choice({0: 1.0}),
        lambda: np.random.rand(1)[0],
        lambda: np.random.normal(np.zeros(2))[1],
        lambda: np.random.uniform(low=[0.0, 1.0], high=2.0)[1],
        lambda: np.random.randint(0, high=np.array([3]))[0],
        lambda: np.random.randint(3, dtype=np.int32),
        lambda: random.randrange(0, 9, 2),
    ],
)
def test_host_generators_are_refused_where_nothing_is_drawn_before(draw):
    """What a call draws before is in test_host_draws.py."""
    port = by_tpuport(lambda x: x * float(draw()))
    with pytest.raises(PortError, match=r"drew random numbers from(.|\n)*draw them with torch"):
        port.apply({}, {}, jax.random.key(0), torch.zeros(8))


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.randn()), float(torch.rand(()))


def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("refused", ["size", "random", "numpy"])
def test_refused_call_leaves_the_generators_of_the_host(refused: str, verify: bool):
    draw = {
        "size": lambda: 1,
        "random": lambda: random.sample([1.0, 2.0], 1)[0],
        "numpy": lambda: np.random.rand(1)[0],
    }[refused]

    def program(x):
        if refused == "size":
            return sum(x for _ in range(int(x.sum().item())))
        return x * float(draw()) if x.sum() > 3 else x

    seed()
    expected = draws()
    seed()
    with pytest.raises(PortError):
        tpuport.convert(program, verify=verify)(torch.ones(8))
    assert draws() == expected


@pytest.mark.parametrize("verify", [True, False])
def test_restarted_trace_leaves_the_generators_of_the_host(verify: bool):
    def program(x):
        state = random.getstate(), np.random.get_state()
        random.random()
        np.random.randn()
        y = x * 2 if bool(x.sum() > 3) else x - 1
        random.setstate(state[0])
        np.random.set_state(state[1])
        return y

    seed()
    expected = draws()
    seed()
    ported = tpuport.convert(program, verify=verify)
    assert_same(ported(torch.ones(8)), program(torch.ones(8)), "restarted")
    assert draws() == expected


def test_cached_second_normal_of_numpy_is_seen():
    np.random.randn(1)  # numpy draws a pair, and the second call changes nothing but the cache
    port = tpuport.convert(lambda x: x * float(np.random.randn(1)[0]), verify=False)
    with pytest.raises(PortError, match="numpy's global random state"):
        port.apply({}, {}, jax.random.key(0), torch.zeros(8))


@pytest.mark.parametrize("verify", [True, False])
def test_numbers_from_a_state_that_the_code_sets_are_the_hosts(verify):
    """They are the same at every call, as in eager PyTorch."""

    def program(x):
        x = x + 0 * random.random()
        state, numpy_state = random.getstate(), np.random.get_state()
        random.seed(3)
        np.random.seed(3)
        y = x * random.random() + np.random.rand()
        random.setstate(state)
        np.random.set_state(numpy_state)
        return y

    port = tpuport.convert(program, verify=verify)
    with pytest.raises(PortError, match="TPU404"):  # the first number is drawn from the state
        port.apply({}, {}, jax.random.key(0), torch.ones(8))
    random.seed(3)
    np.random.seed(3)
    expected = 2 * random.random() + np.random.rand()

    def without(x):
        state, numpy_state = random.getstate(), np.random.get_state()
        y = program(x)
        random.setstate(state)
        np.random.set_state(numpy_state)
        return y

    port = tpuport.convert(without, verify=verify)
    for _ in range(2):
        assert_same(port(torch.full((8,), 2.0)), torch.full((8,), expected), "the host's numbers")


def test_generators_of_a_module_are_left_by_a_refused_call():
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = [np.random.default_rng(0), np.random.RandomState(0), random.Random(0)]

        def forward(self, x):
            numpy, old, python = self.held
            return x * (numpy.random() + old.rand() + python.random())

    refused, plain = Holder(), Holder()
    for verify in (True, False):
        with pytest.raises(PortError, match="drew random numbers from"):
            tpuport.convert(refused, verify=verify)(torch.ones(2))
    assert_same(refused(torch.ones(2)), plain(torch.ones(2)), "unchanged")


@pytest.mark.parametrize("draws_in_program", [True, False])
def test_verified_call_advances_torchs_generator_like_another(draws_in_program: bool):
    def program(x):
        return x + torch.rand(8) if draws_in_program else x * 2

    after = []
    for verify in (True, False):
        torch.manual_seed(0)
        tpuport.convert(program, verify=verify)(torch.zeros(8))
        after.append(torch.rand(4))
    assert torch.equal(*after)
    if not draws_in_program:
        torch.manual_seed(0)
        assert torch.equal(after[0], torch.rand(4))


def test_vmap_over_keys():
    port = by_tpuport(lambda x: x + torch.randn(3))
    keys = jax.random.split(jax.random.key(0), 4)
    drawn = jax.vmap(lambda key: port.apply({}, {}, key, jnp.zeros(3))[0])(keys)
    assert len({float(v) for v in drawn.ravel()}) == 12


# Distributions.

ALPHA = torch.full((N,), 1.5)
DISTRIBUTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float, float]] = {
    "beta": (lambda s: Beta(1.5 * s, 1.0).sample(), 0.6, 0.0685714**0.5),
    "beta_of_numbers": (lambda s: Beta(1.5, 1.0).sample((N,)) * s, 0.6, 0.0685714**0.5),
    "normal": (lambda s: Normal(2 * s, s, validate_args=True).sample(), 2.0, 1.0),
    "normal_of_numbers": (lambda s: Normal(2.0, 1.0).sample((N,)), 2.0, 1.0),
    "uniform": (lambda s: Uniform(-s, 3 * s).sample(), 1.0, 4 / 12**0.5),
    "gamma": (lambda s: Gamma(4 * s, 2 * s).sample(), 2.0, 1.0),
    "dirichlet": (lambda s: Dirichlet(torch.stack([s, s], -1)).sample()[:, 0], 0.5, 12**-0.5),
    "categorical": (
        lambda s: Categorical(logits=torch.zeros(N, 3) * s[:, None]).sample().float(),
        1.0,
        (2 / 3) ** 0.5,
    ),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distribution_is_sampled_on_the_device(name):
    sample, mean, deviation = DISTRIBUTIONS[name]
    port = by_tpuport(sample)
    ones = torch.ones(N)
    first, second = host(port(ones)), host(port(ones))
    assert not torch.equal(first, second)
    assert abs(float(first.mean()) - mean) < 6 * deviation / N**0.5
    assert abs(float(first.std()) - deviation) < 0.1 * deviation


@pytest.mark.parametrize("name", ["beta_of_numbers", "normal_of_numbers", "gamma"])
@expect_torchax_wrong("samples on the host, once, while it traces; or has no lowering")
def test_distribution_is_fresh_under_plain_torchax(name):
    port = PlainTorchax(DISTRIBUTIONS[name][0])
    ones = torch.ones(N)
    assert not torch.equal(host(port(ones)), host(port(ones)))


def test_distribution_rsample_gradient():
    """d(mean + std * eps) is 1 and eps; sample() has none."""
    port = by_tpuport(lambda m, s: (Normal(m, s).rsample(), Normal(m, s).sample() * 1))
    m, s = jnp.zeros(8), jnp.full(8, 2.0)
    (value, _), pull = jax.vjp(lambda m, s: port.apply({}, {}, jax.random.key(0), m, s)[0], m, s)
    to_mean, to_std = pull((jnp.ones(8), jnp.zeros(8)))
    assert_same(to_mean, torch.ones(8), "by the mean")
    assert_same(to_std, host(value) / 2, "by the deviation")
    assert all(float(jnp.abs(g).max()) == 0 for g in pull((jnp.zeros(8), jnp.ones(8))))


def test_distribution_log_prob_and_entropy_and_their_gradients():
    def program(x: torch.Tensor, s: torch.Tensor) -> Any:
        normal_ = Normal(x, s.exp())
        choice = Categorical(logits=x)
        return (
            normal_.log_prob(x.detach() + 1).sum(),
            choice.entropy().sum(),
            choice.log_prob(torch.tensor([1, 0])),
        )

    x, s = normal(2, 3), normal(2, 3, seed=2)
    inputs = [t.clone().requires_grad_() for t in (x, s)]
    want = program(*inputs)
    (want[0] + want[1] + want[2].sum()).backward()
    port = by_tpuport(program)
    for got, expected in zip(port(x, s), want, strict=True):
        assert_same(got, expected, "value")

    def total(x: Any, s: Any) -> Any:
        out, _ = port.apply({}, {}, None, x, s)
        return out[0] + out[1] + out[2].sum()

    got = jax.jit(jax.grad(total, argnums=(0, 1)))(x.numpy(), s.numpy())
    for have, tensor in zip(got, inputs, strict=True):
        assert_same(have, tensor.grad, "gradient")


def test_distribution_arguments_are_validated_on_the_device():
    port = by_tpuport(lambda m, s: Normal(m, s, validate_args=True).log_prob(m))
    port(torch.zeros(3), torch.ones(3))
    with pytest.raises(ValueError, match="Expected parameter scale"):
        Normal(torch.zeros(3), -torch.ones(3), validate_args=True)
    with pytest.raises(ValueError, match="Expected parameter scale"):
        port(torch.zeros(3), -torch.ones(3))


# -- branches and loops that draw ------------------------------------------------------------------


def walk(x):
    count = x.sum() * 0
    while count < 4:
        x = x + torch.randn(5, 3)
        count = count + 1
        if x.sum() > 0:
            x = x - torch.rand(5, 3).mean()
    return x, torch.rand(3)


def uneven(x):
    noise = torch.rand(3) if x.sum() > 0 else torch.zeros(3)
    return noise, torch.rand(3)


def uneven_try(x):
    noise = torch.zeros(3)
    try:
        if x.sum() > 0:
            noise = torch.rand(3)
    finally:
        x = x * 2
    return noise, torch.rand(3)


def checkpointed(x):
    return torch.utils.checkpoint.checkpoint(walk, x, use_reentrant=False)[0], torch.rand(3)


@pytest.mark.parametrize("target", [walk, uneven, uneven_try, checkpointed])
def test_every_draw_of_every_path_is_its_own(target):
    for seed in range(4):
        ported = tpuport.convert(target)
        torch.manual_seed(seed)
        # Verified: eager draws from the same numbered keys, in its own order.
        first, last = map(tpuport.to_torch, ported(torch.randn(5, 3)))
        assert ported.report.verified
        assert not torch.isin(last, first).any()


def test_a_gradient_in_a_jit_before_any_call_leaves_no_tracer_behind(monkeypatch):
    monkeypatch.setattr(keys, "_KEYS", [])
    ported, x = tpuport.convert(nn.Linear(2, 2)), torch.ones(2)
    total = jax.jit(jax.grad(lambda p: ported.apply(p, {}, None, x)[0].sum()))
    assert total(ported.params)["bias"].tolist() == [1, 1]
    assert len(keys._KEYS) == 1
    assert tpuport.to_torch(by_tpuport(lambda x: x + 1)(x)).tolist() == [2, 2]


@pytest.mark.parametrize("count", [150_000, 3])
def test_no_weight_of_zero_is_drawn(count: int):
    """Running sums are rounded where a weight is zero, too: a draw could end there."""
    chosen = np.random.default_rng(1)
    weights = torch.zeros(2, count)
    for row in weights:
        places = torch.from_numpy(chosen.choice(count, min(count - 1, 50), replace=False))
        row[places] = torch.from_numpy(chosen.random(len(places), np.float32)) ** 4
    torch.manual_seed(0)
    port = by_tpuport(lambda w: torch.multinomial(w, 2_000_000, replacement=True))
    drawn = host(port(weights))
    taken = weights.gather(1, drawn)
    assert (taken > 0).all()
    share = (
        torch.zeros_like(weights).scatter_add_(1, drawn, torch.ones_like(taken)) / drawn.shape[1]
    )
    torch.testing.assert_close(share, weights / weights.sum(1, keepdim=True), rtol=0, atol=2e-3)
