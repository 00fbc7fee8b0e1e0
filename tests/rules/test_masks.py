"""Rewritten masks under plain torchax and `jax.jit`: values, gradients, and what is refused."""

import textwrap

import pytest
import torch

from tpuport.rules._apply import find, rewrite
from tpuport.testing import equivalence

# Of torchax: how it copies from the host, and that it has no 64-bit integers.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The given NumPy array is not writable", "ignore:Explicitly requested dtype int64"
)

HEAD = """
import torch
import torch.nn.functional as F


def forward(x: torch.Tensor, y: torch.Tensor, flags: torch.Tensor):
    m = flags > 0
    ids = y.argmax(-1)
    x = x.clone()
"""
INPUTS = "(torch.randn(3, 4), torch.randn(3, 4), torch.randn({shape}))"
ANY, ROWS, CELLS = ("3", "3, 4"), ("3",), ("3, 4",)
BODIES = {
    "x[m] += 1": ANY,
    "x[m] *= y[m]": ANY,
    "x[m] = x[m].clamp(0, 1) - y[m].exp()": ANY,
    "x[m] = y[m]": ANY,
    "x[m] = 2 * (1 - x[m])": ANY,
    "x[m] -= x[m].mean()": ANY,
    "x = x.sum() / x[m].shape[0] - len(y[m]) * y + x[~m].numel() * y": ANY,
    "x[m] = x[m] * y[0]": ROWS,
    "x[m, 0] = 5": ROWS,
    "x[m, 1:] += y.sum()": ROWS,
    "x = x.int()\nx[1, m[1]] = y.int()[0][m[1]]": CELLS,
    "x[..., m[0]] = -1": CELLS,
    "x[:, m[0]] *= 3": CELLS,
    "x[1, m[1]] = y[1][m[1]]": CELLS,
    "x[2][m[2]] = 7": CELLS,
    "for i in range(3):\n    x[i][m[i]] += 1": CELLS,
    "row = x[0]\nrow[m[0]] = 2": CELLS,
    "x = x[m].sum() + x[~m].mean() + x[m].amax() - x[m].prod()": ANY,
    "x = x[m].sum(0) + x[m].mean(dim=0)": ROWS,
    "x[m] = x[m].mean(-1)[:, None]": ROWS,
    "x = (x[m] > 0).any() | (y[m] > 3).all()": ANY,
    "x = F.mse_loss(x[m], y[m]) + F.smooth_l1_loss(x[m], y[m], reduction='sum')": ANY,
    "x = F.cross_entropy(x[m], y[m][:, 0].abs().long())": ROWS,
    "f = torch.nn.CrossEntropyLoss()\nr = x[m]\nx = f(r.view(-1, r.size(-1)), ids[m])": ROWS,
    "x = torch.nn.MSELoss(reduction='sum')(x[m], y[m]) * 2": ANY,
    "x = torch.where(x[m] > 0, x[m], y[m]).sum()": ANY,
    "x = torch.masked_select(x, m).sum() + y.masked_select(m).mean()": CELLS,
    "x = torch.cat([x[m], y[m], x[~m], torch.zeros_like(y[~m])], dim=0)": ANY,
    "both = torch.cat([x[m], y[m]])\nx = both.abs().sum()": ANY,
    "k = y[:, 0] > 0\nx = torch.cat([x[m], y[k], x[~m], y[~k]])": ROWS,
    "rows = x[m]\nrows = rows.reshape(-1, 2)\nx = (rows[..., 1] - rows[..., 0]).sum()": ROWS,
    "rows = y[m]\nx[m] = rows[:, :2].sum(1, keepdim=True) + rows": ROWS,
    "rows = x[m].log()\nx = rows.sum()": ANY,
    "if len(x) > 9:\n    x = y\nelse:\n    z = x[m]\n    x = z.sum()": ANY,
}
CASES = [
    pytest.param(body, shape, id=f"{body} | {shape}")
    for body, shapes in BODIES.items()
    for shape in shapes
]


def source_of(body: str) -> str:
    """A module whose `forward` runs some statements on x, y and the mask m."""
    return HEAD + textwrap.indent(body + "\nreturn x\n", "    ")


def fixed(source: str) -> str:
    """The source rewritten completely."""
    result = rewrite(source)
    assert result.left == []
    assert result.applied
    assert find(result.source) == []
    assert rewrite(result.source).source == result.source
    return result.source


@pytest.mark.parametrize(("body", "shape"), CASES)
def test_a_rewritten_mask_is_the_same_in_eager_and_traces(body: str, shape: str, tmp_path):
    before = equivalence.load(source_of(body), tmp_path)
    after = equivalence.load(fixed(source_of(body)), tmp_path)
    inputs = equivalence.make_inputs(INPUTS.format(shape=shape), seeds=2)
    equivalence.check_eager(before, after, inputs)
    for args in inputs:
        expected = equivalence.observe(before, args)
        assert expected.error is None
        got = equivalence.plain_jit(after, args)
        assert equivalence.difference(expected.value, got, rtol=1e-5) is None


def test_a_loss_that_a_class_keeps():
    source = """
import torch
from torch import nn


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.near = nn.L1Loss()
        self.far = nn.KLDivLoss()

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor):
        m = mask.bool()
        return self.near(x[m], y[m]), self.far(y[m], x)
"""
    result = rewrite(source)
    assert "tpuport.ops.rowwise(self.near)(" in result.source
    assert "self.far(y[m], x)" in result.source
    assert [left.finding.line for left in result.left] == [14]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_selected_never_takes_part(bad: float, tmp_path):
    after = equivalence.load(fixed(source_of("x[m] = x[m].log() * y[m]\nx = x[m].sum()")), tmp_path)
    flags = torch.tensor([1.0, -1.0, 1.0])
    x, y = torch.rand(3, 4) + 1, torch.randn(3, 4)
    x[1], y[1] = bad, bad
    got = equivalence.plain_jit(after, (x, y, flags))
    torch.testing.assert_close(got, after(x, y, flags))


GRADIENTS = {
    "a reduction": "x = x[m].log().mean()",
    "a write": "x[m] = x[m].sqrt() * y[m]\nx = (x[m] ** 2).sum() + (y[m] / x[m]).mean()",
    "two masks": "k = y[:, 0] > 0\nx[m] = torch.cat([x[m], y[m]])[:2] * 2\nx = x[k].sum()",
    "a permutation": "x = (torch.cat([x[m], x[~m]]) * y).sum()",
    "nothing selected": "k = y[:, 0] > 99\nx = x[m].exp().sum() + x[k].sqrt().sum()",
}


@pytest.mark.parametrize("body", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_are_those_of_eager_pytorch(body: str, tmp_path):
    """Of what is not selected, too: the logarithm of a negative number has none."""
    import jax
    import torchax
    from torchax import interop

    source = source_of(body)
    function = equivalence.load(rewrite(source).source, tmp_path)
    before = equivalence.load(source, tmp_path)
    flags = torch.tensor([1.0, -1.0, 1.0])
    x = torch.rand(3, 4) + 0.5
    x[1] = torch.tensor([-1.0, 0.0, -2.0, 0.0])
    y = torch.rand(3, 4) + 0.5
    leaves = [value.clone().requires_grad_() for value in (x, y)]
    before(*leaves, flags).backward()
    expected = [torch.zeros(3, 4) if leaf.grad is None else leaf.grad for leaf in leaves]
    with torchax.default_env():
        moved = [interop.jax_view(value.to("jax")) for value in (x, y, flags)]
        gradient = jax.grad(
            interop.jax_view(lambda a, b: function(a, b, interop.torch_view(moved[2]))), (0, 1)
        )
        got = jax.jit(gradient)(*moved[:2])
    for first, second in zip(expected, got, strict=True):
        torch.testing.assert_close(first, torch.tensor(second.tolist()))


def test_rows_that_do_not_fit_raise_in_eager_and_are_nan_in_a_program(tmp_path):
    source = source_of("k = y[:, 0] > 0\nx[m] = y[k] * 1")
    before = equivalence.load(source, tmp_path)
    after = equivalence.load(fixed(source), tmp_path)
    flags, y = torch.tensor([1.0, 1.0, 1.0]), torch.randn(3, 4)
    y[:, 0] = torch.tensor([1.0, -1.0, 1.0])
    args = (torch.zeros(3, 4), y, flags)
    for function in (before, after):
        with pytest.raises(RuntimeError, match="shape mismatch"):
            function(*args)
    assert equivalence.plain_jit(after, args).isnan().all()
    y[1, 0] = 1.0
    torch.testing.assert_close(equivalence.plain_jit(after, args), before(*args))


def test_the_number_of_rows_is_a_traced_number():
    from tpuport import ops

    def function(x):
        rows = ops.masked(x)[x[:, 0] > 0]
        count, width = rows.shape
        return rows.sum() / count, x * rows.size(0) / width, rows[: count - 1].sum()

    equivalence.check_plain(function, function, [(torch.arange(12.0).reshape(3, 4) - 4,)])
    with pytest.raises(Exception, match="Abstract tracer value"):
        equivalence.plain_jit(lambda x: x[: ops.masked(x)[x > 0].shape[0]], (torch.randn(3),))


def test_integers_that_might_not_fit_are_refused(tmp_path):
    """There is no NaN to tell of them."""
    from tpuport.foundation.errors import PortError

    source = source_of("k = y[:, 0] > 0\nx = x.int()\nx[m] = y[k].int()")
    after = equivalence.load(fixed(source), tmp_path)
    with pytest.raises(PortError, match="there is no NaN"):
        equivalence.plain_jit(after, (torch.zeros(3, 4), torch.ones(3, 4), torch.ones(3)))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("x = torch.zeros(x[m].shape[0])", "a Python number"),
        ("x = y[: len(x[m])]", "a Python number"),
        ("n = x[m].numel()\nx = y[:n]", "a Python number"),
        ("x = list(range(len(x[m])))", "a Python number"),
        ("x = F.softmax(x[m], 0).sum()", "how many rows"),
        ("x = x[m].sort()[0].sum()", "how many rows"),
        ("x = helper(x[m])", "how many rows"),
        ("rows = x[m]\nx = lambda: rows", "nested function"),
        ("rows = x[m]\nrows += 1\nx = rows.sum()", "how many rows"),
        ("x[m].fill_(0)", "how many rows"),
        ("x = x[m] @ y", "how many rows"),
        ("x = x[m][0]", "how many rows"),
        ("x = F.relu(x[m], inplace=True).sum()", "how many rows"),
        ("x = F.mse_loss(x[m], y[m], reduction='none')", "how many rows"),
        ("x = torch.cat([x[m], y[m]], dim=1).sum()", "how many rows"),
        ("x = x[m].reshape(2, -1).sum()", "how many rows"),
        ("x = x[:, m].sum() + x[m, m].sum()", "other parts of the index"),
        ("x = torch.where(x[m] > 0)", "how many rows"),
        ("x = [r for r in x[m]]", "how many rows"),
        ("try:\n    x[m] = y[x[:, 0] > 0]\nexcept RuntimeError:\n    x = y", "except clause"),
    ],
)
def test_what_is_not_proved_stays(body: str, reason: str):
    result = rewrite(source_of(body))
    assert any(reason in left.reason for left in result.left), result.left
