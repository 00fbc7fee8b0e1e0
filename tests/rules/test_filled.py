"""New tensors of traced numbers: their dtypes, and numbers that `.item()` read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tpuport import ops
from tpuport.rules._apply import rewrite
from tpuport.testing import equivalence

X = torch.arange(12.0).reshape(3, 4)

CASES: dict[str, Callable[[Any], Any]] = {
    "float": lambda x: ops.filled(torch.full)((2, 3), ops.item(x.max())),
    "int": lambda x: ops.filled(torch.full)((2, 3), ops.item(x.argmax())),
    "bool": lambda x: ops.filled(torch.full)([2], ops.to_bool(x.max())),
    "double": lambda x: ops.filled(torch.full)((2,), ops.item(x.double().max())),
    "no dimension": lambda x: ops.filled(torch.full)((), x[0, 1] + 1),
    "dtype": lambda x: ops.filled(torch.full)((2,), x.max(), dtype=torch.int32),
    "like": lambda x: ops.filled(torch.full_like)(x.long(), x.mean()),
    "like with dtype": lambda x: ops.filled(torch.full_like)(x, x.mean(), dtype=torch.bfloat16),
    "named": lambda x: ops.filled(torch.full_like)(x, fill_value=x.sum()),
    "known": lambda x: ops.filled(torch.full_like)(x, 3) + ops.filled(torch.full)((4,), 2).sum(),
}


@pytest.mark.parametrize("function", CASES.values(), ids=CASES)
def test_a_program_fills_as_pytorch_does(function: Callable[[Any], Any]):
    expected = function(X)
    got = equivalence.plain_jit(function, (X,))
    assert got.shape == expected.shape
    assert (got.dtype, expected.dtype) in WIDTHS or got.dtype is expected.dtype
    assert torch.equal(got.to(expected.dtype), expected)


# torchax knows no 64 bits.
WIDTHS = {(torch.int32, torch.int64), (torch.float32, torch.float64)}


def test_a_tensor_with_dimensions_is_refused_as_in_pytorch():
    def function(x: torch.Tensor):
        return ops.filled(torch.full)((2,), x)

    with pytest.raises(TypeError, match="must be Number, not Tensor"):
        function(X)
    with pytest.raises(TypeError, match="must be Number, not Tensor"):
        equivalence.plain_jit(function, (X,))


def test_a_number_read_from_a_tensor_fills_one_in_a_program(tmp_path):
    source = """\
import torch


def forward(x: torch.Tensor):
    scale = x.abs().max()
    return torch.full((len(x), 1), scale.item()).to(x.device) * x
"""
    after = rewrite(source).source
    assert "tpuport.ops.filled(torch.full)((len(x), 1), tpuport.ops.item(scale))" in after
    before, function = (equivalence.load(text, tmp_path) for text in (source, after))
    equivalence.check_eager(before, function, [(X,), (X.long(),)])
    equivalence.check_plain(before, function, [(X,), (X.long(),)])
    equivalence.check_ported(before, function, [(X,), (-X,)])


def test_filling_with_another_dtype_would_be_noticed(tmp_path):
    source = (
        "import torch\n\n\ndef forward(x: torch.Tensor):\n    return torch.full((2,), x.max())\n"
    )
    wrong = source.replace("x.max())", "x.max(), dtype=x.dtype)")
    before, after = (equivalence.load(text, tmp_path) for text in (source, wrong))
    with pytest.raises(equivalence.DifferenceError):
        equivalence.check_eager(before, after, [(X.long(),), (X.bfloat16(),)])
