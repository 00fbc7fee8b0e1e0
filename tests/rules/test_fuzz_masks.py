"""Random programs with masks: rewriting changes no eager result, and what it writes traces."""

import random
import textwrap

import pytest

from tpuport.rules._apply import rewrite
from tpuport.testing import equivalence

# Of torchax: how it copies from the host, and that it has no 64-bit integers.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The given NumPy array is not writable", "ignore:Explicitly requested dtype int64"
)

HEAD = """
import torch
import torch.nn.functional as F


def forward(x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor):
    m = a > 0
    k = b > 0
    s = a.sum()
    x, y = x.clone(), y.clone()
"""
ROWWISE = ("{}.abs()", "{}.sigmoid()", "{}.clamp(-1, 1)", "torch.tanh({})", "torch.zeros_like({})")
MIXED = ("({} + {})", "({} * 2 - {})", "torch.maximum({}, {})", "torch.where({} > 0, {}, s)")
REDUCED = ("{}.sum()", "{}.mean()", "{}.amax()", "{}.prod()", "F.mse_loss({}, {})")
ROWS_ONLY = (
    "x[{0}, 1] = s",
    "x[{0}, 1:] *= 2",
    "y = y + x[{0}].sum(0)",
    "x[{0}] = y[{0}, :1] * x[{0}]",
)


class Programs:
    """Makes programs; masks select rows, or single elements."""

    def __init__(self, seed: int, *, rows: bool) -> None:
        self.choose = random.Random(seed)
        self.rows = rows

    def source(self) -> str:
        """A module with a function of a few statements."""
        lines = [self.statement() for _ in range(self.choose.randrange(1, 5))]
        return HEAD + textwrap.indent("\n".join([*lines, "return x, y", ""]), "    ")

    def statement(self) -> str:
        """A read, a write, or both."""
        mask = self.choose.choice(["m", "~m", "k"])
        kinds = ["write", "update", "reduce", "name", "order", *(["part"] if self.rows else [])]
        match self.choose.choice(kinds):
            case "write":
                return f"x[{mask}] = {self.value([mask], 2)}"
            case "update":
                return f"y[{mask}] {self.choose.choice('+-*')}= {self.value([mask], 1)}"
            case "reduce":
                return f"y = y * {self.filled(REDUCED, [mask], 1)}"
            case "name":
                return f"r = {self.value([mask], 1)}\nx[{mask}] = r * 2\ny = y + r.mean()"
            case "order":
                return "x = torch.cat([x[m], y[k], y[~k], x[~m]])[: len(x)].reshape(x.shape)"
            case _:
                return self.choose.choice(ROWS_ONLY).format(mask)

    def value(self, masks: list[str], depth: int) -> str:
        """An expression with the rows of one of the masks."""
        if depth == 0:
            return f"{self.choose.choice('xy')}[{self.choose.choice(masks)}]"
        return self.filled(self.choose.choice([ROWWISE, MIXED]), masks, depth)

    def filled(self, forms: tuple[str, ...], masks: list[str], depth: int) -> str:
        """One of some forms, with values in its gaps."""
        form = self.choose.choice(forms)
        return form.format(*(self.value(masks, depth - 1) for _ in range(form.count("{}"))))


def check(seed: int, folder, *, traced: bool) -> None:
    rows = seed % 2 == 0
    source = Programs(seed, rows=rows).source()
    result = rewrite(source)
    assert rewrite(result.source).source == result.source
    before, after = (equivalence.load(text, folder) for text in (source, result.source))
    shape = "3" if rows else "3, 4"
    inputs = equivalence.make_inputs(
        f"(*torch.randn(2, 3, 4), torch.randn({shape}), torch.randn({shape}))", seeds=1
    )
    equivalence.check_eager(before, after, inputs)
    expected = equivalence.observe(before, inputs[0])
    if traced and expected.error is None:
        assert result.left == [], source
        got = equivalence.plain_jit(after, inputs[0])
        assert equivalence.difference(expected.value, got, rtol=1e-4) is None, source


@pytest.mark.parametrize("start", range(0, 60, 20))
def test_rewriting_changes_no_eager_result(start: int, tmp_path):
    for seed in range(start, start + 20):
        check(seed, tmp_path, traced=False)


@pytest.mark.parametrize("seed", range(1000, 1016))
def test_what_is_rewritten_traces_under_plain_torchax(seed: int, tmp_path):
    check(seed, tmp_path, traced=True)
