"""Tensors whose size depends on data: how they leave the program, and what C++ makes of them."""

from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F

import tpuport
from tpuport import PortError

Rows = Callable[[torch.Tensor], Any]


def with_rows(body: Rows) -> Callable[[torch.Tensor], Any]:
    return lambda x: body(x[x[:, 0] > -0.5])


def batches() -> list[torch.Tensor]:
    made = [torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    assert len({int((x[:, 0] > -0.5).sum()) for x in made}) > 2
    return made


def ends_of(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return rows[-1], rows[-1:], rows[torch.tensor([0, -1])]


def overwritten(rows: torch.Tensor) -> torch.Tensor:
    rows = rows.clone()
    rows[torch.tensor([-1])] = 7.0
    return rows


def scattered(rows: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Write chosen rows to tensors with as many rows as data decides, as pooling of graphs does."""
    order = torch.arange(rows.shape[0])
    return (
        torch.zeros_like(rows).index_add_(0, chosen, rows[chosen] * 2),
        order.scatter_(0, chosen, order[chosen] * 10),
        rows.new_zeros(rows.size(0)).scatter_(0, chosen, 3.0),
        rows.index_fill(0, chosen, 1.0),
    )


def sampled(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Images at as many places as data decides: the keypoints of a detector."""
    places = rows[:, :2].reshape(1, -1, 1, 2) / 4
    return (
        F.grid_sample(IMAGE, places, align_corners=True)[0, :, :, 0].T,
        F.grid_sample(IMAGE, places.mT.flip(-1).mT, "bicubic", "border", align_corners=False).sum(),
        F.grid_sample(IMAGE[:, :, None], rows.reshape(1, 1, -1, 1, 3), align_corners=True),
        # An image for each row.
        F.grid_sample(rows[:, None, None], rows.reshape(-1, 1, 1, 3)[..., :2], align_corners=True),
    )


def read_at_places(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Read a table at places of which data decides the number, in a last dim of the indices."""
    i = torch.arange(rows.shape[0])
    places, line = i.flip(0).expand(2, -1), torch.arange(2)[:, None]
    table = TABLE * rows.sum()
    return (
        table[line, places],
        table[line[:, None], places[:, None].expand(2, 3, -1), -1 - i],
        table[:, places[0], places] + rows[:, 0],
        table[1:, places],
    )


def padded(rows: torch.Tensor) -> tuple[Any, ...]:
    """Pad lists of unlike lengths to the longest, as keypoints of several images are."""
    lists = [column[column > 0] for column in rows.T]
    out = torch.zeros(len(lists), max(one.shape[0] for one in lists) + 1)
    for i, one in enumerate(lists):
        out[i, : one.shape[0]] = one
    shortest = min([one.shape[0] for one in lists])
    return out, shortest, max(one.sum() for one in lists), min(list(rows[0]))


TABLE = torch.arange(50.0).reshape(2, 5, 5)
IMAGE = torch.randn(1, 2, 4, 5, generator=torch.Generator().manual_seed(9))
EXACT: dict[str, Rows] = {
    "rows": lambda r: r,
    "several": lambda r: {"twice": r * 2, "count": r.shape[0]},
    "ends": ends_of,
    "overwritten": overwritten,
    "tail": lambda r: r[1:] - r[:-1],
    "expand_as": lambda r: torch.ones(1, 3).expand_as(r).sum(),
    "normalize": lambda r: F.normalize(r, dim=0),
    "cosine_similarity": lambda r: torch.cosine_similarity(r, r * 2, dim=0),
    "split": lambda r: torch.cat(r.split([1, r.shape[0] - 1])).view(-1, 3),
    "unflatten": lambda r: r.unflatten(1, (3, 1)).flatten(1, 2),
    "again": lambda r: r[r[:, 1] > 0],
    "read at places": read_at_places,
    "padded": padded,
    "sampled": sampled,
    "scattered": lambda r: scattered(r, (r[:, 1] > 0).nonzero()[:, 0]),
}

# What reads sizes in C++, which sees the padded ones.
REFUSED: dict[str, Rows] = {
    "tensor_split": lambda r: torch.tensor_split(r, 2)[0],
    "vander": lambda r: torch.vander(r[:, 0]),
    "interpolate": lambda r: F.interpolate(r.T[None], 4),
    "equal": lambda r: torch.equal(r, r),
    "beside": lambda r: TABLE[0][torch.arange(5)[None], torch.arange(r.shape[0])[None]],
    "image": lambda r: F.grid_sample(r[None, None], IMAGE.reshape(1, 4, 5, 2), align_corners=True),
}


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        ours, theirs = tuple(ours.values()), tuple(theirs.values())
    if isinstance(theirs, tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(theirs, int):
        assert ours == theirs
    else:
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", EXACT)
def test_results_have_their_real_size(name: str):
    target = with_rows(EXACT[name])
    ported = tpuport.convert(target)
    for x in batches():
        assert_same(tpuport.to_torch(ported(x)), target(x))
    assert not ported.report.retraces


@pytest.mark.parametrize("body", [sampled, read_at_places, padded])
def test_what_data_decides_the_size_of_has_gradients(body: Rows):
    def total(x: torch.Tensor) -> torch.Tensor:
        return sum((one**2).sum() for one in with_rows(body)(x) if isinstance(one, torch.Tensor))

    ported = tpuport.convert(total, verify=False)
    slope = jax.jit(jax.grad(lambda x: ported.apply({}, {}, None, x)[0]))
    for x in batches():
        given = x.clone().requires_grad_()
        total(given).backward()
        torch.testing.assert_close(tpuport.to_torch(slope(x.numpy())), given.grad)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_see_the_padding_is_refused(name: str):
    ported = tpuport.convert(with_rows(REFUSED[name]), verify=False)
    with pytest.raises(PortError, match="depends on data") as caught:
        ported(batches()[0])
    assert caught.value.code == "TPU203"


def test_an_index_past_the_real_end_is_an_index_error():
    ported = tpuport.convert(with_rows(lambda r: r[torch.tensor([3])]), verify=False)
    sizes = [int((x[:, 0] > -0.5).sum()) for x in batches()]
    for x, size in zip(batches(), sizes, strict=True):
        if size > 3:
            assert tuple(ported(x).shape) == (1, 3)
        else:
            with pytest.raises(IndexError, match="out of bounds for dimension 0"):
                ported(x)


@pytest.mark.parametrize("way", ["jit", "eval_shape"])
def test_an_output_without_a_static_size_does_not_leave_a_pure_function(way: str):
    ported = tpuport.convert(with_rows(EXACT["rows"]), verify=False)
    x = batches()[0]

    def pure(value: Any) -> Any:
        return ported.apply({}, {}, None, value)[0]

    assert tuple(pure(x).shape) == tuple(with_rows(EXACT["rows"])(x).shape)
    with pytest.raises(PortError, match="has a size that depends on data"):
        jax.jit(pure)(x.numpy()) if way == "jit" else ported.eval_shape(x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


def test_rows_for_a_custom_function_are_refused_where_it_is_called():
    def layer(x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x[x > 0])

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return layer(x).sum()

    with pytest.raises(PortError, match=r"an argument of Doubled\.apply") as refused:
        tpuport.convert(Net())(torch.randn(4))
    assert refused.value.line == layer.__code__.co_firstlineno + 1
    assert "--eager" in str(refused.value)


def argmax_row(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.argmax().item() < x.shape[1] else x - 1


def stable_order(x: torch.Tensor) -> torch.Tensor:
    return torch.bincount(torch.sort(x, dim=0, stable=True).indices[:, 0], minlength=2)


@pytest.mark.parametrize("target", [argmax_row, stable_order])
def test_the_range_of_an_index_decides_nothing_wrongly(target: Any):
    ported = tpuport.convert(target, verify=False)
    x = torch.arange(12.0).reshape(4, 3)
    for one in (x, -x, x.flip(1)):
        torch.testing.assert_close(tpuport.to_torch(ported(one)), target(one))


RESHAPED: dict[str, Rows] = {
    "inner transpose": lambda r: torch.stack([r, -r], 1).mT.reshape(r.shape[0], 6),
    "outer transpose": lambda r: r.T.contiguous().T.reshape([r.shape[0], 3, 1]),
    "function": lambda r: torch.reshape(torch.stack([r, -r], 1).mT, (r.shape[0], 2, 3)),
    "still a view": lambda r: r.t().contiguous().t()[:, :2].reshape(r.shape[0], 1, 2).add_(1),
    "new zeros": lambda r: r.new_zeros(7, *r.shape[1:]) + r.sum(0),
}


@pytest.mark.parametrize("body", RESHAPED.values(), ids=RESHAPED)
def test_what_is_not_contiguous_is_reshaped_by_one_program(body: Rows):
    ported, eager = tpuport.convert(with_rows(body)), with_rows(body)
    for x in batches():
        torch.testing.assert_close(tpuport.to_torch(ported(x)), eager(x))
    assert ported.report.retraces == []
    assert ported.report.branches == []


def test_an_index_past_the_rows_that_data_decides_raises():
    def write(rows: torch.Tensor) -> torch.Tensor:
        places = (rows[:, 1] > -9).nonzero()[:, 0] + 1
        return rows.new_zeros(rows.shape[0] + 1).scatter_(0, places * 2 - 1, 1.0).sum()

    ported = tpuport.convert(with_rows(write), verify=False)
    one = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]])
    assert float(ported(one)) == 1
    with pytest.raises(RuntimeError, match="out of range"):
        ported(one.abs())


def test_a_reshape_that_eager_makes_a_view_is_written_through():
    def write(rows: torch.Tensor) -> torch.Tensor:
        columns = rows.t().contiguous().t()
        columns.reshape(rows.shape[0], 3, 1).mul_(2)
        rows.mT.reshape(3, rows.shape[0]).mul_(3)
        return torch.cat([columns, rows])

    ported, eager = tpuport.convert(with_rows(write)), with_rows(write)
    for x in batches():
        torch.testing.assert_close(tpuport.to_torch(ported(x)), eager(x))


def test_a_shape_that_data_decides_is_returned():
    def shapes(x: torch.Tensor) -> Any:
        rows = x[x[:, 0] > -0.5]
        return rows.shape, {"all": rows.nonzero().size(), "of x": x.shape}, rows.sum()

    ported = tpuport.convert(shapes)
    for x in batches():
        size, others, total = ported(x)
        expected = shapes(x)
        assert (size, others) == expected[:2]
        assert type(size) is type(others["all"]) is torch.Size
        torch.testing.assert_close(tpuport.to_torch(total), expected[2])
    assert ported.report.retraces == []
    # Sizes of traced arguments of a user's own program are arrays.
    (size, *_), _ = ported.apply({}, {}, None, jax.numpy.asarray(batches()[0].numpy()))
    assert list(map(int, size)) == list(shapes(batches()[0])[0])


def places_up_to_a_size(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Index as transformers does a mask of padding that was cut to the longest row."""
    size = int(kept.sum(1).max())
    rows, columns = torch.arange(x.shape[0])[:, None], torch.arange(size)[None, :]
    return x[:, :size][rows, columns].sum()


def test_an_index_whose_last_dim_has_a_size_of_the_data():
    port = tpuport.convert(places_up_to_a_size)
    for count in (3, 2):
        x, kept = torch.arange(10.0).reshape(2, 5) * count, torch.arange(5).expand(2, 5) < count
        torch.testing.assert_close(tpuport.to_torch(port(x, kept)), places_up_to_a_size(x, kept))


class PooledByGroup(torch.nn.Module):
    """Pool rows that their values choose by their groups, as PyTorch Geometric pools graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(3) + 0.1)

    def forward(self, x: torch.Tensor, groups: torch.Tensor) -> tuple[Any, ...]:
        rows = x @ self.weight
        chosen = (rows[:, 0] > -0.5).nonzero()[:, 0]
        places = torch.arange(chosen.shape[0])
        of_chosen = torch.scatter(places, 0, torch.arange(chosen.shape[0]), groups[chosen])
        best = groups[rows[:, 1].topk(2).indices]
        found = []
        for group, part in ((of_chosen, rows[chosen]), (best, rows[:2])):
            sums = rows.new_zeros(int(group.max()) + 1, 3).index_add_(0, group, part)
            columns = group[:, None].expand(-1, 3)
            sums = sums + torch.zeros_like(sums).scatter_add_(0, columns, part.square())
            found += [sums.square().sum(), sums.mean(), sums.shape[0]]
        return (*found, groups[chosen].amin())


def test_the_largest_group_of_chosen_rows_is_a_size():
    ported, eager, groups = tpuport.convert(PooledByGroup()), PooledByGroup(), torch.arange(5) % 3
    for x in batches():
        assert_same(tpuport.to_torch(ported(x, groups)), eager(x, groups))
    assert len(ported.report.retraces) == 0
    # Other groups are other bounds, and so another program.
    assert_same(tpuport.to_torch(ported(x, groups * 2)), eager(x, groups * 2))

    def loss(params: Any) -> Any:
        out, _ = ported.apply(params, {}, None, x, groups)
        return out[0] + out[1] + out[3] * out[4]

    one, two, _, three, four, *_ = eager(x, groups)
    (one + two + three * four).backward()
    assert eager.weight.grad is not None
    ours = torch.tensor(jax.jit(jax.grad(loss))(ported.params)["weight"].tolist())
    torch.testing.assert_close(ours, eager.weight.grad)


def test_an_index_past_a_size_of_the_data_raises_although_there_is_padding():
    def count(x: torch.Tensor) -> torch.Tensor:
        size = int((x > 0).sum())
        return x.new_zeros(size).index_add_(0, torch.tensor([0, 2]), x[:2])

    ported = tpuport.convert(count)
    x = torch.ones(4)
    assert_same(tpuport.to_torch(ported(x)), count(x))
    with pytest.raises(IndexError, match="out of range"):
        ported(x * torch.tensor([1, 1, -1, -1]))


GROUPS = torch.arange(5) % 3


def pooled_by_outside_groups(x: torch.Tensor) -> torch.Tensor:
    group = GROUPS[x[:, 0].topk(2).indices]
    made = torch.arange(5).mul_(x.argmax())  # holds other values than before the write
    return x.new_zeros(int(group.max()) + 1).index_add_(0, group, x[:2, 0]) + made[:3].max()


def test_bounds_of_a_tensor_outside_follow_what_it_holds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "GROUPS", GROUPS.clone())
    ported = tpuport.convert(pooled_by_outside_groups)
    for x in batches():
        assert_same(tpuport.to_torch(ported(x)), pooled_by_outside_groups(x))
    GROUPS.add_(4)
    for x in batches():
        assert_same(tpuport.to_torch(ported(x)), pooled_by_outside_groups(x))
