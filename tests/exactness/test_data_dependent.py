"""Code whose path or shape depends on values: exact, or refused with the line and a remedy.

Contents:
    BRANCHES          if, while, and/or, ternaries, early returns, branches in loops and in
                      submodules
    ITEMS             .item(), .tolist(), float() feeding arithmetic, indices and slices
    SELECTIONS        boolean masks read and written, nonzero, unique-free routing, bincount,
                      sorting, one-hot
    test_raise_*      asserts and raises on values reach the caller as the user's own exceptions
    test_try_*        try/except around tensor code
    test_refused_*    what cannot be exact is a PortError that names the line
"""

from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpuport
from tests.exactness.plain_torchax import PlainTorchax
from tests.exactness.scenario import (
    Scenario,
    against_torchax,
    assert_same,
    by_tpuport,
    check_calls,
    check_gradients,
    expect_torchax_wrong,
    normal,
)
from tpuport.foundation.errors import PortError

CONCRETE = "a traced value is asked for"
MASK = "a boolean index of traced values"
POSITIVE, NEGATIVE = normal(4, 6).abs(), -normal(4, 6).abs()
MIXED = normal(4, 6)
EACH = ((POSITIVE,), (NEGATIVE,), (MIXED,))


def _if(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        y = x * 2
    else:
        y = x - 1
    return y.exp()


def _early_return(x: torch.Tensor) -> Any:
    if x.min() > 0:
        return x.log()
    if (x < 0).all():
        return -x
    return x * 0.5


def _and_or_ternary(x: torch.Tensor) -> torch.Tensor:
    scale = 2.0 if x.max() > 1 and x.min() < -1 else 3.0
    shift = x.mean() if not (x > 0).any() or x.sum() > 5 else x.std()
    return x * scale + shift


def _in_loop(x: torch.Tensor) -> torch.Tensor:
    for row in range(3):
        if x[row].sum() > 0:
            x = x + row
        elif x[row].max() > 0:
            x = x * 1.5
    return x


def _writes(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    if y[0, 0] > 0:
        y[1:].mul_(2)
        y[0] = 7
    return y


def _while(x: torch.Tensor) -> torch.Tensor:
    while x.abs().max() > 0.5:
        x = x * 0.7
    return x


class Gate(nn.Module):
    """A branch in a submodule that is used twice, with a buffer that only one side moves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("taken", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.mean() > 0:
            self.taken += 1
            return y * 2
        return y


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(self.gate(x) + 0.3)


def _two_names(x: torch.Tensor) -> Any:
    y = x * 2
    z, row = y, y[1]
    if x.sum() > 0:
        z += 10
        row -= 1
    z.mul_(2)
    row.add_(x[0])
    return y, z


BRANCHES = [
    Scenario("if", lambda: _if, EACH, CONCRETE),
    Scenario("early_return", lambda: _early_return, EACH, CONCRETE),
    Scenario("and_or_ternary", lambda: _and_or_ternary, EACH, CONCRETE),
    Scenario("in_loop", lambda: _in_loop, EACH, CONCRETE),
    Scenario("writes", lambda: _writes, EACH, CONCRETE),
    Scenario("two_names", lambda: _two_names, EACH, CONCRETE),
    Scenario("gates", Gates, EACH, CONCRETE, rtol=1e-4),
    Scenario("while", lambda: _while, EACH, CONCRETE, grads=False),
]


def _item_in_arithmetic(x: torch.Tensor) -> Any:
    top, low = x.max().item(), float(x.detach().min())
    eta = (top - low) ** 0.5 / 3
    return (
        (x - low) / (top - low),
        torch.full((3,), top) * eta,
        x * max(top, 1.0) + int(x.detach().sum()),
    )


def _item_as_index(x: torch.Tensor) -> Any:
    row = x.sum(1).argmax().item()
    column = int(x[0].argmin())
    return x[row], x[:, column], x[row, column], x.roll(1, 0)[row] * row


def _tolist(x: torch.Tensor) -> Any:
    first, second = x[0, :2].tolist()
    return x * first + second, torch.tensor([first, second]) + x[:2, 0]


def _scalar_functions(x: torch.Tensor) -> Any:
    top = x.abs().max().item()
    return x * round(top, 2), x + (-top // 1), x * (top % 1), abs(-top) * x, x / (2**top)


ITEMS = [
    Scenario("item_in_arithmetic", lambda: _item_in_arithmetic, EACH, CONCRETE),
    Scenario("item_as_index", lambda: _item_as_index, EACH, CONCRETE),
    Scenario("tolist", lambda: _tolist, EACH, CONCRETE),
    Scenario("scalar_functions", lambda: _scalar_functions, EACH, CONCRETE, grads=False),
]


def _masked_mean(x: torch.Tensor) -> Any:
    kept = x[x > 0]
    return kept.sum(), kept.mean() if kept.numel() > 0 else x.sum() * 0


def _masked_rows(x: torch.Tensor) -> Any:
    keep = x[:, 0] > 0
    y = x.clone()
    y[keep] = x[keep] * 2 + 1
    y[~keep] = 0
    return y


def _masked_loss(x: torch.Tensor) -> Any:
    target = x.detach().argmax(1)
    target = torch.where(x[:, 0] > 0, target, torch.full_like(target, -100))
    valid = target != -100
    return F.cross_entropy(x[valid], target[valid], reduction="sum"), F.cross_entropy(
        x, target, reduction="sum"
    )


def _masked_losses(x: torch.Tensor) -> Any:
    kept, target = x > 0, x.detach().sin()
    logits, labels = x[x < 1], target[x < 1] > 0
    return (
        F.mse_loss(x[kept], target[kept]),
        F.smooth_l1_loss(x[kept], target[kept], reduction="sum"),
        F.huber_loss(x[kept], target[kept], delta=0.5),
        F.binary_cross_entropy_with_logits(logits, labels.float()),
    )


def _scatter_features(x: torch.Tensor, features: torch.Tensor, tokens: torch.Tensor) -> Any:
    """Image features into the places of image tokens."""
    out = x.clone()
    selected = tokens == 7
    out[selected] = out[selected] * 0.0 + features.reshape(-1, 6)
    return out


def _nonzero_rows(x: torch.Tensor) -> Any:
    index = (x[:, 0] > 0).nonzero(as_tuple=True)[0]
    out = torch.zeros_like(x)
    out[index] = x[index].sin()
    return out.index_add(0, index, x[index])


def _lengths(x: torch.Tensor) -> Any:
    """The length of a selection decides, divides and is counted, as losses on mined pairs do."""
    pairs = torch.where(x > 0.9)
    if all(len(index) <= 1 for index in pairs):
        return x.sum() * 0, x.mean(0)
    rows, columns = pairs
    scale = 1 / max(len(rows), 1) if len(columns) else 0.5
    return x[rows, columns].sum() * scale, x.mean(0) / len(rows)


def _safe_one_hot(x: torch.Tensor) -> Any:
    """Rows past the last class are zeros, as mixtures of experts with a capacity drop them."""
    index = x.abs().mul(3).long()[:, 0]
    classes = max(index.max() + 1, 3)
    wide = F.one_hot(index, max(9, classes))[..., :2]
    return x.T @ F.one_hot(index, classes)[..., :3].float(), wide


class Experts(nn.Module):
    """Mixture of experts the way it is written: one masked pass for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        hit = F.one_hot(chosen, 3).permute(2, 1, 0)
        for index, expert in enumerate(self.experts):
            slot, row = torch.where(hit[index])
            out.index_add_(0, row, expert(x[row]) * weights[row, slot, None])
        return out


class SortedExperts(Experts):
    """The inference form: sort by expert, split by bincount."""

    def forward(self, x: torch.Tensor) -> Any:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        ends = flat.bincount(minlength=3).cumsum(0)
        out = torch.zeros_like(x)
        for index, end in enumerate(ends.tolist()):
            start = 0 if index == 0 else int(ends[index - 1])
            places = order[start:end]
            rows = places // 2
            out.scatter_add_(
                0,
                rows[:, None].expand(-1, 6),
                self.experts[index](x[rows]) * weights.flatten()[places, None],
            )
        return out


def _counts(x: torch.Tensor) -> Any:
    index = x.argmax(1)
    return (
        torch.bincount(index, minlength=6),
        torch.histc(x, 4, -2, 2),
        x[index.argsort(stable=True)],
        index.sort()[0],
    )


TOKENS = torch.tensor([[1, 7, 7, 2], [7, 3, 4, 5]])
SELECTIONS = [
    Scenario("masked_mean", lambda: _masked_mean, EACH, MASK),
    Scenario("masked_rows", lambda: _masked_rows, EACH, MASK),
    Scenario("masked_loss", lambda: _masked_loss, EACH, MASK),
    Scenario("masked_losses", lambda: _masked_losses, EACH, MASK),
    Scenario(
        "scatter_features",
        lambda: _scatter_features,
        ((normal(2, 4, 6), normal(3, 6), TOKENS),),
        MASK,
    ),
    Scenario("nonzero_rows", lambda: _nonzero_rows, EACH, CONCRETE),
    Scenario("lengths", lambda: _lengths, EACH, CONCRETE),
    Scenario("safe_one_hot", lambda: _safe_one_hot, EACH, CONCRETE),
    Scenario("experts", Experts, EACH, MASK, rtol=1e-4),
    Scenario("sorted_experts", SortedExperts, EACH, CONCRETE, rtol=1e-4),
    Scenario("counts", lambda: _counts, EACH, "bincount of traced values", grads=False),
]
SCENARIOS = [*BRANCHES, *ITEMS, *SELECTIONS]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_values(scenario):
    ported = check_calls(scenario, by_tpuport)
    assert ported.report.retraces == []


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s.grads], ids=str)
def test_gradients(scenario):
    check_gradients(scenario, by_tpuport)


@pytest.mark.parametrize("scenario", against_torchax(SCENARIOS))
def test_values_under_plain_torchax(scenario):
    check_calls(scenario, PlainTorchax)


def _signed(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x * 2
    return x - 1


_SIGNED_TOO = FunctionType(_signed.__code__, globals(), "signed_too")


def test_a_branch_in_a_function_and_in_a_copy_of_it():
    # Both have the same code, but the first that runs says nothing of the second.
    both = Scenario("both", lambda: lambda x: _signed(x) + 3 * _SIGNED_TOO(-x), EACH, CONCRETE)
    assert check_calls(both, by_tpuport).report.retraces == []


# Exceptions.


class TooSmall(ValueError):
    """The user's own exception."""


def _raises(x: torch.Tensor) -> torch.Tensor:
    assert torch.isfinite(x).all(), "not finite"
    if x.min() < 0:
        raise TooSmall("below zero")
    if (x > 100).any():
        msg = f"too large for {tuple(x.shape)}"
        raise RuntimeError(msg)
    torch._assert(x.sum() != 1, "sums to one")
    return x.sqrt()


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda x: x * float("nan"), AssertionError, "not finite"),
        (lambda x: x - 10, TooSmall, "below zero"),
        (lambda x: x * 1000, RuntimeError, r"too large for \(4, 6\)"),
        (lambda x: torch.eye(4, 6) / 4, AssertionError, "sums to one"),
    ],
    ids=["assert", "raise", "raise_with_shape", "torch_assert"],
)
def test_raise_reaches_the_caller(make, kind, message):
    ported = by_tpuport(_raises)
    good, bad = POSITIVE, make(POSITIVE)
    assert_same(ported(good), _raises(good), "output")
    with pytest.raises(kind, match=message):
        _raises(bad)
    with pytest.raises(kind, match=message):
        ported(bad)
    assert_same(ported(good), _raises(good), "output afterwards")
    assert ported.report.retraces == []


def test_raise_leaves_state_as_it_was():
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.min() < 0:
                raise TooSmall("below zero")
            self.count += 1
            return x * self.count

    ported = by_tpuport(Strict())
    ported(POSITIVE)
    with pytest.raises(TooSmall):
        ported(NEGATIVE)
    assert_same(ported(POSITIVE), POSITIVE * 2, "output")


def test_raise_is_dropped_on_request():
    ported = tpuport.convert(_raises, verify=False, checks=False)
    assert torch.isnan(ported(NEGATIVE).torch()).any()


@expect_torchax_wrong(CONCRETE)
def test_raise_under_plain_torchax():
    PlainTorchax(_raises)(POSITIVE)


class Fusion(nn.Module):
    """Image features go to the places of image tokens.

    A wrong number of them makes the sample ignored.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(
        self, x: torch.Tensor, features: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        out = self.linear(x).reshape(-1, 6)
        selected = tokens.reshape(-1) == 7
        ignored = False
        try:
            out[selected] = out[selected] * 0.0 + features
        except Exception:
            count = min(int(selected.sum()), features.shape[0])
            out[selected] = out[selected] * 0.0 + features[:count]
            ignored = True
        loss = out.square().mean()
        return loss * 0.0 if ignored else loss


def test_try_except_around_a_masked_write():
    scenario = Scenario("fusion", Fusion, ((normal(2, 4, 6), normal(3, 6), TOKENS),), rtol=1e-4)
    check_calls(scenario, by_tpuport)
    check_gradients(scenario, by_tpuport)


def test_try_except_where_a_later_batch_takes_the_other_path():
    """Fewer places than features: eager ignores the sample.

    The same shapes, so the same program.
    """
    fewer = TOKENS.clone()
    fewer[0, 1] = 0
    x, features = normal(2, 4, 6), normal(3, 6)
    torch.manual_seed(0)
    eager = Fusion()
    ported = by_tpuport(eager)
    assert_same(ported(x, features, TOKENS), eager(x, features, TOKENS), "enough", 1e-4)
    assert float(eager(x, features, fewer).detach()) == 0.0
    try:
        got = ported(x, features, fewer)
    except (PortError, RuntimeError):
        return  # refusing is allowed, another loss is not
    assert_same(got, torch.zeros(()), "fewer")


def test_try_except_of_host_code():
    def program(x: torch.Tensor) -> torch.Tensor:
        try:
            return x @ torch.ones(5, 5)
        except RuntimeError:
            return x @ torch.ones(6, 6)

    assert_same(by_tpuport(program)(MIXED), program(MIXED), "output")


# Refusals.


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (lambda x: x[: int(x.abs().sum())], "x[: int(x.abs().sum())]"),
        (lambda x: torch.zeros(int(x.abs().max() * 10)), "torch.zeros(int("),
        (lambda x: x.unique(), "x.unique()"),
        (lambda x: [x * i for i in range(int(x.abs().max() + 1))], "range(int("),
        (lambda x: torch.from_numpy(x.detach().numpy() * 2), ".numpy()"),
        (lambda x: {float(x.max()): x}, "float(x.max())"),
    ],
    ids=["slice", "size", "unique", "range", "numpy", "dict_key"],
)
def test_refused_or_exact(program, line):
    """Never a silently different result: eager's own, or an error at this line."""
    ported = by_tpuport(program)
    for x in (MIXED, NEGATIVE * 2):
        want, got = _leaves(program(x)), _leaves(_or_refusal(ported, x))
        if isinstance(got[0], PortError):
            assert (got[0].file, bool(got[0].remedy), bool(got[0].code)) == (__file__, True, True)
            assert line in (got[0].source_line or "")
            continue
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert_same(torch.as_tensor(a), torch.as_tensor(b), "output")


def _or_refusal(ported: Any, x: torch.Tensor) -> Any:
    try:
        return tpuport.to_torch(ported(x))
    except PortError as error:
        return error


def _leaves(out: Any) -> list[Any]:
    if isinstance(out, dict):
        return [*out.keys(), *out.values()]
    return out if isinstance(out, list) else [out]


def test_refused_shapes_that_differ_by_branch():
    def program(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x[:2]
        return x

    with pytest.raises(PortError, match=r"branch(.|\n)*What to do"):
        by_tpuport(program)(MIXED)


class Recorded(nn.Module):
    """Appends to a list by values, so each element doubles the number of paths."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for index, value in enumerate(x):
            if value > 0:
                found.append(index)
        return x * len(found)


def test_refused_paths_name_the_line_that_branches():
    with pytest.raises(PortError, match=r"too many paths(.|\n)*if value > 0:") as refused:
        tpuport.convert(nn.Sequential(Recorded()))(normal(14))
    code = Recorded.forward.__code__
    assert (refused.value.file, refused.value.line) == (__file__, code.co_firstlineno + 3)


def cleared(x):
    """Rows and columns as sequences of traced scalars (transformers' UDOP does this)."""
    out = x.clone()
    order = x.argsort(1)
    rows, columns = zip(*torch.stack([order[:, 0] % 2, order[:, 1]], 1), strict=True)
    out[rows, columns] = 0.0
    return out, x[rows[0], columns[1]], out[rows, columns]


def test_an_index_of_sequences_of_traced_scalars():
    ported = tpuport.convert(cleared)
    for seed in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(tpuport.to_torch(ported(x)), cleared(x))


# Whether code asks for the truth of a value as an object or as text, by each way to write it.
ASKS: dict[str, Any] = {
    "is True": lambda x: x * 2 if (x.sum() > 0).item() is True else x * 3,
    "is not False": lambda x: x * 2 if (x.sum() > 0).item() is not False else x * 3,
    "True is": lambda x: x * 2 if True is bool(x.sum() > 0) else x * 3,
    "match": lambda x: _matched(x),
    "key": lambda x: {True: x * 2, False: x * 3}[bool(x.sum() > 0)],
    "text": lambda x: x * 2 if str(bool(x.sum() > 0)) == "True" else x * 3,
}


def _matched(x: torch.Tensor) -> torch.Tensor:
    match (x.sum() > 0).item():
        case True:
            return x * 2
        case _:
            return x * 3


@pytest.mark.parametrize("how", ASKS)
def test_a_truth_is_an_object_where_code_asks_for_one(how: str):
    ported = tpuport.convert(ASKS[how])
    for sign in (-1.0, 1.0, -1.0):
        x = torch.tensor([3.0, 2.0]) * sign
        assert torch.equal(ported(x).torch(), ASKS[how](x))


@pytest.mark.parametrize(
    "code",
    [
        lambda x: x * 2 if str(x.argmax().item()) == "0" else x * 3,
        lambda x: {"0": x * 2}.get("" + str(x.argmax().item()), x * 3),
        lambda x: x * 2 if str(x.argmax().item()).startswith("0") else x * 3,
    ],
)
def test_the_text_of_a_number_with_few_values_may_be_compared(code: Any):
    ported = tpuport.convert(code)
    for x in map(torch.tensor, ([1.0, 2.0], [2.0, 1.0], [1.0, 3.0])):
        assert torch.equal(ported(x).torch(), code(x))


def test_the_text_of_any_number_is_not_compared():
    ported = tpuport.convert(lambda x: x * 2 if str(x.sum().item()) == "3.0" else x, verify=False)
    with pytest.raises(PortError, match=r"test_data_dependent.py:\d+: TPU103 a Python float"):
        ported(torch.tensor([1.0, 2.0]))


def test_the_text_of_a_number_can_be_printed(capsys: pytest.CaptureFixture[str]):
    def prints(x: torch.Tensor) -> torch.Tensor:
        print("largest:", x.argmax().item(), f"of {x.sum().item()}")  # noqa: T201
        return x * 2

    assert torch.equal(tpuport.convert(prints, verify=False)(X_OF_TEXT).torch(), X_OF_TEXT * 2)
    assert "traced int" in capsys.readouterr().out


X_OF_TEXT = torch.tensor([1.0, 2.0])


def _reductions_of_rows(x: torch.Tensor) -> Any:
    return x[x[:, 0] > 0].max() + x[x[:, 0] > 0].amax(0)


def _two_selections(x: torch.Tensor) -> torch.Tensor:
    mask = x[:, 0] > 0
    return x[mask] + x[~mask]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_reductions_of_rows, "(?i)expected (a )?reduction"),
        (_two_selections, "must match the size"),
    ],
)
def test_rows_that_eager_refuses(function: FunctionType, message: str) -> None:
    halves = torch.tensor([[1.0, 2.0], [3.0, 4.0], [-1.0, 5.0], [-2.0, 6.0]])
    ported = by_tpuport(function)
    assert_same(ported(halves), function(halves), "rows")
    with pytest.raises((RuntimeError, IndexError), match=message) as raised:
        function(-halves.abs())
    with pytest.raises(raised.type, match=message):
        ported(-halves.abs())


def _places(x: torch.Tensor, n: torch.Tensor) -> Any:
    part = x[:, :, : n.item()]
    counted = torch.where(part > 0, torch.arange(part.shape[2]), -1)
    flat = part.argmax(), part.argmin(dim=None, keepdim=True), part[:1].argmax(), counted.argmax()
    return *flat, *counted.max(2), counted.argmin(2)


def test_places_among_elements_whose_number_depends_on_data() -> None:
    ported, x = by_tpuport(_places), torch.randn(3, 2, 5)
    for n in (5, 3, 1):
        given = x, torch.tensor(n)
        pairs = zip(ported(*given), _places(*given), strict=True)
        for number, (have, want) in enumerate(pairs):
            assert_same(have, want, f"{number} of {n} columns")


def _grids(x: torch.Tensor, n: torch.Tensor) -> Any:
    part = x[:, :, : n.item()]
    weights = part * part[..., :1] + part.masked_fill(part[..., :1] > 0, 2.0)
    columns = torch.arange(part.shape[2])
    found = [part[part > 0].sum(), part[part[..., 0] > 0].sum(), weights.sum((0, 1)).sum()]
    for indexing in ("ij", "xy"):
        grids = torch.meshgrid(columns, torch.arange(3), indexing=indexing)
        found += [(grid * torch.arange(grid.shape[1])).sum() + grid.shape[0] for grid in grids]
    found.append(torch.broadcast_tensors(part, torch.ones(1))[1].sum())
    return *found, x.new_tensor(part.nbytes)


def test_masks_and_grids_whose_sizes_depend_on_data() -> None:
    ported, x = by_tpuport(_grids), torch.randn(3, 2, 5)
    for n in (5, 3, 4):
        given = x, torch.tensor(n)
        pairs = zip(ported(*given), _grids(*given), strict=True)
        for number, (have, want) in enumerate(pairs):
            assert_same(have, want, f"{number} of {n} columns")


class _Counted(nn.Module):
    """Losses of indices, beside a number that they decide."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor) -> Any:
        scores, chosen = self.linear(x), labels[labels > 0]
        hot = F.one_hot(labels, 5) * F.one_hot(rows, 5)
        taken = scores.gather(1, rows[:, None]).sum() / max(chosen.numel(), 1)
        return F.nll_loss(scores.log_softmax(1), labels) + taken + (hot * scores).sum()


@pytest.mark.parametrize("way", ["call", "apply", "jit"])
def test_indices_of_jax_beside_a_number_that_data_decides(way: str) -> None:
    torch.manual_seed(0)
    model = _Counted()
    x, labels, rows = normal(4, 3), torch.tensor([0, 3, 1, 3]), torch.tensor([4, 3, 0, 3])
    ported = tpuport.convert(model)

    def loss(params: dict[str, Any], *given: Any) -> Any:
        return ported.apply(params, ported.buffers, None, *given)[0]

    for some in (labels, labels.flip(0), torch.zeros(4, dtype=torch.int64)):
        given = [jnp.asarray(t.numpy()) for t in (x, some, rows)]
        assert given[1].dtype == jnp.int32
        want = model(x, some, rows)
        if way == "jit":
            found, gradient = jax.jit(jax.value_and_grad(loss))(ported.params, *given)
            (expected,) = torch.autograd.grad(want, model.linear.weight)
            ours = tpuport.to_torch(gradient["linear.weight"])
            torch.testing.assert_close(ours, expected)
        else:
            found = ported(*given) if way == "call" else loss(ported.params, *given)
        torch.testing.assert_close(tpuport.to_torch(found), want.detach())


def test_indices_of_int32_where_torch_wants_int64() -> None:
    model = _Counted()
    x, rows = normal(4, 3), torch.tensor([4, 3, 0, 3])
    ported = tpuport.convert(model, verify=False)
    for labels in (rows, rows.flip(0)):
        for call in (model, ported):
            with pytest.raises(RuntimeError, match="one_hot is only applicable to index tensor"):
                call(x, labels.int(), rows)
