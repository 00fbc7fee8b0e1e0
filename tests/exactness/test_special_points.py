"""Gradients where a derivative has a corner, a pole or a tie: those of eager PyTorch.

Every function of a table is called at all its special points at once, with arguments of its own, so
that one backward pass gives the gradients of the table. A point where eager itself gives NaN says
nothing, and is left out.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tpuport
from tests.exactness.scenario import by_tpuport

Function = Callable[..., torch.Tensor]
POINTS = torch.tensor([0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 0.5, -0.5, 2.0, -2.0, 6.0, 20.0, -20.0])
PAIRS = tuple(p.reshape(-1) for p in torch.meshgrid(POINTS, POINTS, indexing="ij"))


def twice(function: Function, **options: Any) -> Function:
    return lambda x: function(torch.stack([x, x], 1), **options)


def with_zero(function: Function, **options: Any) -> Function:
    return lambda x: function(torch.stack([x, x * 0], 1), **options)


UNARY: dict[str, Function] = {
    **{
        name: getattr(torch, name)
        for name in """abs acos acosh asin asinh atan atanh ceil cos cosh digamma erf erfc erfinv
        exp exp2 expm1 floor frac lgamma log log10 log1p log2 nan_to_num neg reciprocal relu
        round sgn sigmoid sign sin sinc sinh sqrt square tan tanh trunc""".split()
    },
    **{
        name: getattr(F, name)
        for name in """elu selu celu gelu silu mish softplus logsigmoid hardswish hardsigmoid
        hardtanh relu6 hardshrink softshrink leaky_relu tanhshrink softsign""".split()
    },
    # At -0.0 torch's gradient is +inf and jax's -inf.
    "rsqrt": lambda x: torch.where(x == 0, 1.0, x).rsqrt(),
    "threshold": lambda x: F.threshold(x, 1.0, 0.0),
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_min": lambda x: x.clamp(min=0),
    "hardtanh of 3": lambda x: F.hardtanh(x, -0.5, 3.0),
    **{f"power {p}": partial(torch.pow, exponent=p) for p in (0, 0.5, 1, 1.5, 2, 3, -1)},
    "exponent": lambda x: 2.0**x,
    "norm": lambda x: x.norm(),
    **{f"norm {p}": with_zero(torch.linalg.vector_norm, ord=p, dim=1) for p in (1, 2, 3)},
    "norm inf": twice(torch.linalg.vector_norm, ord=float("inf"), dim=1),
    "normalize": with_zero(F.normalize, dim=1),
    "amax": twice(torch.amax, dim=1),
    "amin": twice(torch.amin, dim=1),
    "max": twice(lambda x: x.max(1)[0]),
    "max of all": twice(torch.max),
    "min of all": twice(torch.min),
    "cummax": twice(lambda x: x.cummax(1)[0]),
    "prod": twice(torch.prod, dim=1),
    "cumprod": twice(torch.cumprod, dim=1),
    "logsumexp": twice(torch.logsumexp, dim=1),
    "std": twice(torch.std, dim=1),
    "max_pool": lambda x: F.max_pool1d(torch.stack([x, x, x, x], 1)[:, None], 2),
    "layer_norm": twice(F.layer_norm, normalized_shape=(2,)),
    "complex abs": lambda x: torch.complex(x, x * 0).abs(),
}


def loss(name: str, **options: Any) -> Function:
    return lambda a, b: getattr(F, name)(a, b, reduction="none", **options)


def side(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.detach() > 0, 1.0, -1.0)


def scattered(how: str, own: bool, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a[:13].scatter_reduce(0, PLACES, b, how, include_self=own)


CLASSES = torch.arange(169) % 3
LABELS = torch.tensor([[0, 2, -1], [1, -1, 0], [-1, 1, 1], [0, 1, 2]]).repeat(43, 1)[:169]
PLACES = torch.arange(169) % 13

BINARY: dict[str, Function] = {
    **{
        name: getattr(torch, name)
        for name in """add sub mul div pow atan2 maximum minimum fmin fmax xlogy fmod remainder
        logaddexp copysign dist""".split()
    },
    "where": lambda a, b: torch.where(a > b, a, b),
    "clamp": lambda a, b: a.clamp(max=b),
    "clamp_min": lambda a, b: a.clamp(min=b),
    "clamp to one value": lambda a, b: a.clamp(b, b),
    "xlog1py": torch.special.xlog1py,
    "cdist": lambda a, b: torch.cdist(a[:20, None], b[:20, None]),
    "cdist 1": lambda a, b: torch.cdist(a[:20, None], b[:20, None], p=1.0),
    "pairwise_distance": lambda a, b: F.pairwise_distance(a[:, None], b[:, None]),
    "cosine_similarity": lambda a, b: F.cosine_similarity(
        torch.stack([a, b], 1), torch.stack([b, a], 1)
    ),
    "l1": loss("l1_loss"),
    "mse": loss("mse_loss"),
    "smooth_l1": loss("smooth_l1_loss"),
    "smooth_l1 of 0": loss("smooth_l1_loss", beta=0.0),
    "huber": loss("huber_loss"),
    "huber of 3": loss("huber_loss", delta=3.0),
    "soft_margin": lambda a, b: F.soft_margin_loss(a, side(b), reduction="none"),
    "hinge": lambda a, b: F.hinge_embedding_loss(a, side(b), reduction="none"),
    "margin_ranking": lambda a, b: F.margin_ranking_loss(a, b, side(b), 1.0, reduction="none"),
    "poisson": lambda a, b: F.poisson_nll_loss(a, b.detach(), reduction="none"),
    "bce": lambda a, b: F.binary_cross_entropy(
        a.clamp(0, 1), b.detach().clamp(0, 1), reduction="none"
    ),
    "bce of weights": lambda a, b: F.binary_cross_entropy(
        a.clamp(0, 1), b.detach().clamp(0, 1), weight=b.detach().abs()
    ),
    "bce with logits": loss("binary_cross_entropy_with_logits"),
    "kl": loss("kl_div"),
    "kl of logs": loss("kl_div", log_target=True),
    "multi_margin": lambda a, b: F.multi_margin_loss(
        torch.stack([a, b, a], 1), CLASSES, reduction="none"
    ),
    "multi_margin squared": lambda a, b: F.multi_margin_loss(
        torch.stack([a, b, a], 1), CLASSES, p=2, margin=0.5
    ),
    "multilabel_margin": lambda a, b: F.multilabel_margin_loss(
        torch.stack([a, b, a], 1), LABELS, reduction="none"
    ),
    "triplet_margin": lambda a, b: F.triplet_margin_loss(
        torch.stack([a, b], 1), torch.stack([a, a], 1), torch.stack([b, b], 1), reduction="none"
    ),
    "cross_entropy": lambda a, b: F.cross_entropy(
        torch.stack([a, b], 1), CLASSES % 2, reduction="none"
    ),
    **{
        f"scatter_reduce {how} {own}": partial(scattered, how, own)
        for how in ("amax", "amin", "mean")
        for own in (True, False)
    },
    "index_reduce": lambda a, b: a[:13].index_reduce(0, PLACES[:13] % 5, b[:13], "amax"),
}

NOT_FINITE = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0, 0.0])
NOT_FINITE_PAIRS = tuple(
    p.reshape(-1) for p in torch.meshgrid(NOT_FINITE, NOT_FINITE, indexing="ij")
)
AT_NAN: dict[str, Function] = {
    **{
        name: getattr(F, name)
        for name in """elu selu celu silu mish softplus logsigmoid hardswish hardsigmoid hardtanh
        relu relu6 hardshrink softshrink leaky_relu tanhshrink""".split()
    },
    **{name: getattr(torch, name) for name in "abs max min amax nansum nan_to_num".split()},
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_min": lambda x: x.clamp(min=torch.tensor(0.0)),
    "max of half": lambda x: torch.max(x.bfloat16()).float(),
}
BOTH_AT_NAN: dict[str, Function] = {
    name: getattr(torch, name) for name in "maximum minimum fmax fmin".split()
}

# Eager's nan is compared too. Reductions are of one row each, as most give nan for all of a row.
ROWS = torch.tensor(
    [
        [1.0, torch.inf, 2.0, 3.0],
        [1.0, -torch.inf, 2.0, 3.0],
        [0.0, torch.inf, 1.0, 2.0],
        [0.0, torch.nan, 1.0, 0.0],
        [1.0, torch.nan, 2.0, 3.0],
        [torch.nan] * 4,
        [0.0, 0.0, 2.0, 1.0],
        [2.0, 1.0, 2.0, 1.0],
    ]
)
REDUCTIONS: dict[str, Function] = {
    **{
        name: getattr(torch, name)
        for name in "prod nanmean nansum amax amin median nanmedian max min".split()
    },
    **{f"{name} of a dim": partial(getattr(torch, name), dim=0) for name in ("prod", "nanmean")},
    "aminmax": lambda x: torch.stack(torch.aminmax(x)),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    **{
        f"norm {p}": partial(torch.linalg.vector_norm, ord=p)
        for p in (0, 0.5, 1, 1.5, 3, torch.inf, -torch.inf, -1)
    },
}


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_gradients_of_reductions_of_nan_and_infinities_are_those_of_eager(row: int) -> None:
    both = [given_and_gradient(ROWS[row], of_tpuport) for of_tpuport in (True, False)]
    wrong = [
        f"{name}: {ours}, eager {theirs}"
        for name, ours, theirs in zip(REDUCTIONS, *both, strict=True)
        if not all(map(same, ours, theirs))
    ]
    assert not wrong, "\n".join(wrong)


def given_and_gradient(x: torch.Tensor, of_tpuport: bool) -> list[tuple[Any, Any]]:
    """Return the value and the gradient of each reduction."""
    if not of_tpuport:
        return [eager_value_and_gradient(f, x) for f in REDUCTIONS.values()]
    ported = by_tpuport(lambda xs: [f(x) for f, x in zip(REDUCTIONS.values(), xs, strict=True)])

    def total(xs: Any) -> Any:
        outs = ported.apply({}, {}, jax.random.key(0), xs)[0]
        return sum(jnp.sum(o) for o in outs), outs

    copies = jnp.stack([jnp.asarray(x.numpy())] * len(REDUCTIONS))
    (_, outs), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(copies)
    return list(zip(outs, gradients, strict=True))


def eager_value_and_gradient(function: Function, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    leaf = x.clone().requires_grad_()
    out = function(leaf)
    out.sum().backward()
    return out.detach(), leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)


def test_gradients_of_other_functions_at_nan_and_at_limits_are_those_of_eager() -> None:
    functions: dict[str, Function] = {
        "rrelu": lambda x: F.rrelu(x, training=False),
        "rrelu in training": lambda x: F.rrelu(x, 0.25, 0.25, training=True),
    }
    target = torch.tensor([0.0, 1.0, 0.5, 1.0, 0.0])

    def run(x: torch.Tensor, target: torch.Tensor) -> Any:
        losses = F.binary_cross_entropy(target.new([0, 1, 0.5, 0, 1]), target, reduction="none")
        return [*(f(x) for f in functions.values()), losses]

    leaves = [NOT_FINITE.clone().requires_grad_(), target.clone().requires_grad_()]
    sum(out.sum() for out in run(*leaves)).backward()
    ported = by_tpuport(run)

    def total(x: Any, target: Any) -> Any:
        return sum(jnp.sum(o) for o in ported.apply({}, {}, jax.random.key(0), x, target)[0])

    given = [jnp.asarray(leaf.detach().numpy()) for leaf in leaves]
    for ours, leaf in zip(jax.jit(jax.grad(total, (0, 1)))(*given), leaves, strict=True):
        assert leaf.grad is not None
        assert same(ours, leaf.grad), f"{ours}, eager {leaf.grad}"


TABLES = {
    "unary": (UNARY, (POINTS,)),
    "binary": (BINARY, PAIRS),
    "unary at nan": (AT_NAN, (NOT_FINITE,)),
    "binary at nan": (BOTH_AT_NAN, NOT_FINITE_PAIRS),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("table", TABLES)
def test_gradients_at_special_points_are_those_of_eager(table):
    functions, args = TABLES[table]
    ported = by_tpuport(
        lambda *copies: [f(*own) for f, *own in zip(functions.values(), *copies, strict=True)]
    )
    weights = torch.from_numpy(np.random.default_rng(0).uniform(0.5, 1.5, 1000)).float()

    def total(*copies: Any) -> Any:
        outs = ported.apply({}, {}, jax.random.key(0), *copies)[0]
        return sum(jnp.sum(o.reshape(-1) * weights.numpy()[: o.size]) for o in outs), outs

    copies = [jnp.stack([jnp.asarray(a.numpy())] * len(functions)) for a in args]
    places = tuple(range(len(args)))
    backward = jax.jit(jax.value_and_grad(total, argnums=places, has_aux=True))
    (_, outs), gradients = backward(*copies)
    wrong = []
    for index, (name, function) in enumerate(functions.items()):
        leaves = [a.clone().requires_grad_() for a in args]
        out = function(*leaves)
        if not same(outs[index], out.detach()):
            wrong.append(f"{name}: {outs[index]}, eager {out}")
        (out.reshape(-1) * weights[: out.numel()]).sum().backward()
        for leaf, ours in zip(leaves, gradients, strict=True):
            theirs = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            told = ~theirs.isnan().numpy()
            if not same(np.asarray(ours[index])[told], theirs[told]):
                wrong.append(f"gradient of {name}: {ours[index]}, eager {theirs}")
    assert not wrong, "\n".join(wrong)


def same(ours: Any, theirs: torch.Tensor) -> bool:
    return np.allclose(ours, theirs.numpy(), rtol=1e-3, atol=1e-4, equal_nan=True)


# -- faults of XLA, which the optimizations of a program have -------------------------------------


@pytest.mark.xfail(strict=True, reason="XLA returns a broadcast: core/cumulative.py can go")
@pytest.mark.parametrize(("function", "identity"), [(jnp.cumsum, 0), (jnp.cumprod, 1)])
def test_xla_folds_a_pad_into_a_cumulative_sum(function: Any, identity: int) -> None:
    def padded(one: jax.Array) -> jax.Array:
        return function(jnp.pad(one, ((2, 2), (0, 0)), constant_values=identity), axis=0)

    one = jnp.full((1, 2), 3.0)
    assert (jax.jit(padded)(one) == padded(one)).all()


class _Cumulative(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        padded = F.pad(x[:1], (0, 0, 2, 2))
        return padded.cumsum(0), x.cumsum(0)[2], x.cumprod(0)[2], x.logcumsumexp(0)[2]


def test_cumulative_functions_of_padded_elements() -> None:
    x = torch.linspace(-2, 3, 10).reshape(5, 2).requires_grad_()
    weights = [torch.arange(10.0).reshape(5, 2), *torch.tensor([2.0, 3.0, -1.0])]
    module = _Cumulative()
    wanted = module(x)
    sum((w * one).sum() for w, one in zip(weights, wanted, strict=True)).backward()
    ported = tpuport.convert(module)
    for have, want in zip(tpuport.to_torch(ported(x.detach())), wanted, strict=True):
        torch.testing.assert_close(have, want.detach())

    def loss(x: jax.Array) -> Any:
        out, _ = ported.apply(ported.params, ported.buffers, jax.random.key(0), x)
        return sum((w.numpy() * one).sum() for w, one in zip(weights, out, strict=True))

    gradient = jax.jit(jax.grad(loss))(jnp.asarray(x.detach().numpy()))
    torch.testing.assert_close(tpuport.to_torch(gradient), x.grad)


def test_logsumexp_has_no_gradient_through_its_maximum() -> None:
    # Where the compiler computes x twice, rounded differently, no element equals the maximum: 0/0.
    ported = tpuport.convert(lambda x: x.logsumexp(1), verify=False)
    x = torch.tensor([[-torch.inf, -torch.inf], [1.0, -torch.inf], [1.0, 3.0]], requires_grad=True)
    x.logsumexp(1).sum().backward()

    def total(value: jax.Array) -> jax.Array:
        return ported.apply({}, {}, jax.random.key(0), value)[0].sum()

    value = jnp.asarray(x.detach().numpy())
    np.testing.assert_allclose(jax.grad(total)(value), x.grad, rtol=1e-6)
    compared = [
        equation
        for equation in jax.make_jaxpr(jax.grad(total))(value).eqns
        if equation.primitive.name == "eq" and equation.invars[1].aval.size > 1
    ]
    assert not [e for e in compared if e.invars[0].aval.shape == value.shape]


@pytest.mark.parametrize("name", ["amax", "amin", "max", "min"])
def test_extremes_are_compared_with_the_elements_that_they_are_of(name: str) -> None:
    # Elements that the compiler computed again may be rounded differently: 0/0 there, too.
    ported = tpuport.convert(getattr(torch, name), verify=False)

    def total(value: jax.Array) -> jax.Array:
        return ported.apply({}, {}, jax.random.key(0), value * 0.3)[0]

    program = jax.make_jaxpr(jax.grad(total))(jnp.ones((2, 3))).jaxpr
    (kept,) = [e.outvars[0] for e in program.eqns if e.primitive.name == "optimization_barrier"]
    readers = {e.primitive.name for e in program.eqns if kept in e.invars}
    assert "eq" in readers
    assert readers & {"custom_jvp_call", f"reduce_{name[-3:]}"}
