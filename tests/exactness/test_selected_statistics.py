"""Order statistics, searches, distances and normalisation of as many elements as data selects."""

import copy

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

import tpuport

NAN = torch.nan


def order(x):
    rows, some = x[x[:, 0] > 0], torch.where(x > 1.2, NAN, x)[x > 0]
    return [
        x[x > 0].median(),
        torch.cat([x, x])[torch.cat([x, x]) > 0].median(),
        some.median(),
        some.nanmedian(),
        rows.median(0).values,
        rows.median(0, keepdim=True).values,
        rows.median(1).values,
        rows.cummax(1).values + rows.cummin(1).values,
        rows.round().mode(1).values * rows[:, 0],
        torch.where(rows > 1.2, NAN, rows).nanmedian(0).values,
        rows.kthvalue(1, dim=0, keepdim=True).values,
        x[x > 0].gather(0, torch.tensor([1, 0, 1])),
        torch.take_along_dim(rows, torch.zeros(1, 3, dtype=torch.long), 0),
    ]


def quantiles(x):
    rows, some = x[x[:, 0] > 0], torch.where(x > 1.2, NAN, x)[x > 0]
    kinds = ("lower", "higher", "nearest", "midpoint")
    return [
        torch.quantile(x[x > 0], torch.tensor([0.1, 0.9])),
        torch.quantile(rows, 0.3),
        torch.quantile(rows, torch.tensor([0.1, 0.9]), dim=0, keepdim=True),
        rows.quantile(0.4, dim=1),
        x[x > 0].quantile(0.4, keepdim=True),
        some.nanquantile(torch.tensor([0.4, 0.1])),
        *(x[x > 0].quantile(0.4, interpolation=kind) for kind in kinds),
    ]


def moved(x):
    rows = x[x[:, 0] > 0]
    written = x[x > 0].clone()
    written[::2] = 5.0
    return [
        rows.roll(1, 0),
        rows.roll((1, -2), (0, 1)),
        x[x > 0][1::3],
        x[x > 0][:-1:2],
        written * x[x > 0],
        rows.diff(dim=0),
        x[x > 0].diff(n=2),
        torch.diff(x[x > 0], prepend=torch.zeros(1)),
        x[x > 0].repeat(2),
        rows.repeat(1, 2),
        torch.eye(rows.shape[0]) * rows[:, 0],
    ]


def compared(x):
    rows = x[x[:, 0] > 0]
    return [
        torch.cdist(rows, rows),
        torch.cdist(rows, x).min(0).values,
        torch.cdist(x, rows).min(1).values,
        torch.cov(rows.T),
        torch.corrcoef(rows.T),
        torch.histc(x[x > 0], 5, -1, 1),
        torch.bucketize(x[x > 0], torch.tensor([0.0, 0.5, 1.0])) * x[x > 0],
        torch.searchsorted(x[x > 0].sort().values, x) * x,
        torch.isin(x[x > 0].round(), torch.tensor([1.0, 2.0])) * x[x > 0],
        torch.isin(x.round(), x[x > 1].round()) * x,
    ]


def searched_in_rows(x):
    """Search in borders of each row's own, as the splines of normalizing flows do inside."""
    inside = x[:, 0] > 0
    rows = x[inside]
    borders = torch.cat([torch.zeros(len(rows), 1), rows.softmax(-1).cumsum(-1)], -1)
    at = torch.stack([rows[:, 0].sigmoid(), rows[:, 1].sigmoid()], -1)
    found = torch.searchsorted(borders, at)
    shuffled = borders.flip(-1).contiguous()
    order = shuffled.argsort(-1)
    columns = x.T[:, inside].sort(-1).values
    return [
        (at - borders.gather(-1, found - 1)) * rows[:, :1],
        torch.searchsorted(borders, at[:, :1].expand(-1, 3).contiguous(), right=True) * rows[:, :1],
        torch.searchsorted(shuffled, at, sorter=order) * rows[:, :1],
        torch.searchsorted(columns, torch.zeros(columns.shape[0], 2)) * x.sum(),
    ]


def distinct(x):
    x = x.detach()
    values, inverse, counts = torch.unique(
        x[x > 0].round(), return_inverse=True, return_counts=True
    )
    return [
        values[inverse] + counts[inverse],
        torch.unique(x[x[:, 0] > 0].round(), return_inverse=True, return_counts=True),
        torch.unique_consecutive(x[x > 0].round(), return_inverse=True, return_counts=True),
        torch.unique(x.round(), return_inverse=True, return_counts=True),
    ]


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.flat, self.deep = nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=0.3)

    def forward(self, x):
        valid = x[:, 0] > 0
        deep = x[:, :, None] * torch.arange(1.0, 5.0)
        found = [self.flat(x[valid]), self.deep(deep[valid])]
        return [(one * one.cos()).sum() for one in found]


def composed(x):
    rows = x[x[:, 0] > 0]
    return [
        nn.functional.cosine_similarity(rows, rows.flip(1)),
        nn.functional.cosine_similarity(rows[None], rows[:, None], dim=-1),
        nn.functional.pairwise_distance(rows, 2 * rows),
        nn.functional.triplet_margin_loss(rows, rows * 2, rows.flip(1)),
        torch.dist(rows, rows * 2),
        torch.mv(rows, torch.arange(3.0)),
        torch.dot(rows[:, 0], rows[:, 1]),
        *torch.aminmax(rows, dim=0),
        rows.sum() * torch.allclose(rows, rows),
        rows.cummax(0).values * rows.cummin(0).values,
        rows.logcumsumexp(0),
        torch.index_put(rows, (torch.tensor([0]),), torch.tensor(2.0)),
    ]


def by_row(x):
    rows = x[x[:, 0] > 0]
    deep = torch.stack([rows, rows * 2], 1)
    return [
        rows.unfold(1, 2, 1),
        torch.linalg.cross(rows, rows * 2 + 1),
        rows.index_copy(1, torch.tensor([0]), rows[:, 1:2]),
        rows.index_fill(1, torch.tensor([0]), 2.0),
        rows.scatter(1, (rows[:, :1] > 1).long(), 1.0),
        rows.scatter_add(1, (rows > 1).long(), rows * 2),
        rows.index_add(1, torch.tensor([0, 0]), rows[:, 1:]),
        nn.functional.conv1d(deep, torch.arange(12.0).reshape(3, 2, 2)),
        nn.functional.avg_pool1d(deep, 2),
        nn.functional.max_pool2d(deep[:, None], (1, 2)),
        nn.functional.interpolate(deep, size=5),
        nn.functional.interpolate(deep[:, None], size=(4, 4), mode="bilinear"),
        torch.fft.rfft(rows, dim=1).abs(),
        torch.complex(rows, rows * 2).abs(),
        nn.functional.prelu(rows, torch.tensor([0.1])),
        torch.baddbmm(deep, deep[:, :, :2], deep),
    ]


def flat(value):
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in flat(part)]
    return [value]


def inputs():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(8, 3, generator=generator) for _ in range(3)]


def summed(leaves):
    terms = [leaf.sum() * (i + 1) for i, leaf in enumerate(leaves)]
    return sum(terms[1:], terms[0])


@pytest.mark.parametrize(
    "function", [order, quantiles, moved, compared, searched_in_rows, distinct, composed, by_row]
)
def test_statistics_of_selected_elements(function):
    ported = tpuport.convert(function, verify=False)
    for x in inputs():
        ours, theirs = flat(tpuport.to_torch(ported(x))), flat(function(x))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
    if function is distinct:
        return
    x = inputs()[2]
    given = x.clone().requires_grad_()
    found = function(given)
    kept = [i for i, one in enumerate(found) if one.requires_grad and one.isfinite().all()]
    expected = torch.autograd.grad(summed([found[i] for i in kept]), given)[0]

    # Sums have a size that a program can return; op by op it would be hundreds of programs.
    def total(x):
        found = function(x)
        return summed([found[i] for i in kept])

    ported = tpuport.convert(total, verify=False)
    gradient = jax.jit(jax.grad(lambda value: ported.apply({}, {}, None, value)[0]))
    found = tpuport.to_torch(gradient(jnp.asarray(x.numpy())))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_gradients_pass_an_output_of_the_size_that_data_selects():
    ported = tpuport.convert(lambda x: x[x > 0] ** 2, verify=False)
    x = inputs()[2]
    found = jax.grad(lambda value: ported.apply({}, {}, None, value)[0].sum())(jnp.asarray(x))
    torch.testing.assert_close(tpuport.to_torch(found), 2 * x.clamp(min=0))


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_selected_rows(training):
    torch.manual_seed(0)
    model = Normalised().train(training)
    nn.init.normal_(model.flat.weight)
    eager = copy.deepcopy(model)
    ported = tpuport.convert(model)
    for x in inputs():
        ours, theirs = flat(tpuport.to_torch(ported(x))), eager(x)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(
            tpuport.to_torch(ported.buffers[name]), buffer, check_dtype=False
        )
    summed(eager(x)).backward()

    def loss(params):
        found, _ = ported.apply(params, ported.buffers, None, jnp.asarray(x.numpy()))
        return summed(found)

    for name, gradient in jax.jit(jax.grad(loss))(ported.params).items():
        expected = eager.get_parameter(name).grad
        torch.testing.assert_close(tpuport.to_torch(gradient), expected, rtol=1e-3, atol=1e-4)


class Refilled(nn.Module):
    """Replaces entries of a table that no row is near to by some that rows are near to."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-2, 2, 8)[:, None].repeat(1, 3))
        self.register_buffer("used", torch.zeros(8))

    def forward(self, x):
        self.used[torch.cdist(x, self.table).argmin(1)] += 1
        unused, used = torch.where(self.used < 1)[0], torch.where(self.used >= 1)[0]
        if unused.numel() > 0 and used.numel() > 0:
            odds = self.used[used] / self.used[used].sum()
            found = odds.multinomial(num_samples=unused.numel(), replacement=True)
            self.table.data[unused] = self.table[used[found]].clone()
        return x @ self.table.T


def test_as_many_of_selected_rows_as_data_decides_are_drawn():
    torch.manual_seed(0)
    ported = tpuport.convert(Refilled(), verify="always")
    before = tpuport.to_torch(ported.params["table"]).clone()
    for i in range(3):
        ported(torch.randn(4, 3, generator=torch.Generator().manual_seed(i)))
    after = tpuport.to_torch(ported.params["table"])
    assert not torch.equal(after, before)
    assert all((row == before).all(1).any() for row in after)


@pytest.mark.parametrize("replaces", [True, False])
def test_draws_of_selected_weights_follow_them(replaces: bool):
    def drawn(w):
        odds = w[w > 0]
        return odds, odds.multinomial(2, replaces), odds.multinomial(odds.numel(), replaces)

    torch.manual_seed(2)
    ported = tpuport.convert(drawn, verify="always")
    counts = torch.zeros(3)
    for _ in range(60):
        odds, two, all_of_them = tpuport.to_torch(ported(torch.tensor([-1.0, 6, 0, -2, 2, 1])))
        assert odds.tolist() == [6, 2, 1]
        assert (len(two), len(all_of_them)) == (2, 3)
        if not replaces:
            assert sorted(all_of_them.tolist()) == [0, 1, 2]
        counts[two[0]] += 1
    # The first of each is drawn as its weight says: 40, 13 and 7 times of 60, within 4 deviations.
    assert ((counts - torch.tensor([40.0, 13, 7])).abs() <= torch.tensor([15.0, 13, 10])).all()


@pytest.mark.parametrize(
    ("values", "replaces", "message"),
    [
        ([1.0, -1, 2, -1], False, "without replacement"),
        ([-1.0, -1, -2, -1], True, "sum of probabilities <= 0"),
        ([1.0, 1, 2, 1], True, "n_sample <= 0"),
    ],
)
def test_draws_of_selected_weights_fail_as_in_eager(values, replaces, message):
    def drawn(w):
        positive, negative = w[w > 0], w[w <= 0]
        count = negative.numel() if replaces else 3
        return positive.multinomial(count, replaces)

    for function in (drawn, tpuport.convert(drawn)):
        with pytest.raises(RuntimeError, match=message):
            function(torch.tensor(values))


def test_a_permutation_of_selected_rows_is_the_one_of_eager():
    def sampled(x):
        found = (x[:, 0] > 0).nonzero()[:, 0]
        order = torch.randperm(found.numel(), device=found.device)
        return x[found[order[:2]]], order

    torch.manual_seed(1)
    ported = tpuport.convert(sampled, verify="always")
    seen = set()
    for _ in range(6):
        rows, order = ported(inputs()[0])
        assert sorted(tpuport.to_torch(order).tolist()) == list(range(len(order)))
        assert (tpuport.to_torch(rows)[:, 0] > 0).all()
        seen.add(tuple(tpuport.to_torch(order).tolist()))
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda x: x[x > 9].median(), None),
        (lambda x: x[x > 9].nanmedian(), None),
        (lambda x: x[x[:, 0] > 9].median(0).values, IndexError),
        (lambda x: x[x > 1].kthvalue(20).values, RuntimeError),
        (lambda x: x[x > 1].gather(0, torch.tensor([20])), RuntimeError),
    ],
)
def test_too_few_elements_are_as_in_eager(function, error):
    ported, x = tpuport.convert(function, verify=False), inputs()[0]
    if error is None:
        assert function(x).isnan()
        assert tpuport.to_torch(ported(x)).isnan()
        return
    for call in (function, ported):
        with pytest.raises(error):
            call(x)


class OneRow(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x[x[:, 0] == x[:, 0].max()])


def test_batch_norm_of_one_row_raises_as_eager_does():
    for call in (OneRow(3), tpuport.convert(OneRow(3), verify=False)):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            call(inputs()[0])
