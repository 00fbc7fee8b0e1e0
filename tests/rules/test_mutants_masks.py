"""The suite notices wrong fixes of masks: in the text that they write, and in what that calls."""

import textwrap

import jax.numpy as jnp
import pytest
import torch

from tpuport.ops import masks
from tpuport.ops.torchax import masked_access, masked_functions, masked_rows
from tpuport.rules._apply import rewrite
from tpuport.rules.boolean_mask_read import BooleanMaskRead
from tpuport.rules.boolean_mask_write import BooleanMaskWrite
from tpuport.rules.data_dependent_shape import DataDependentShape
from tpuport.testing import equivalence

# Of torchax: how it copies from the host, and that it has no 64-bit integers.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The given NumPy array is not writable", "ignore:Explicitly requested dtype int64"
)

TEXTS = {
    "other rows": (BooleanMaskRead, 0, "masked(y)[m]", "masked(y)[~m]"),
    "write dropped": (BooleanMaskRead, 0, "tpuport.ops.masked(x)[m] = ", "_ = "),
    "write to a copy": (BooleanMaskRead, 0, "masked(x)[m] = ", "masked(x.clone())[m] = "),
    "everything reduced": (BooleanMaskRead, 0, "masked(y)[~m].mean()", "masked(y).mean()"),
    "multiplied by the mask": (BooleanMaskRead, 0, "masked(y)[~m].mean()", "masked(y * ~m).mean()"),
    "one side twice": (BooleanMaskRead, 1, "tpuport.ops.inverse(keep)", "keep"),
    "sides swapped": (BooleanMaskRead, 1, "masked(x)[keep], rest", "masked(rest)[:], x[keep]"),
    "write to a copy of a view": (BooleanMaskWrite, 1, "masked(x[i])", "masked(x[i].clone())"),
    "all columns": (BooleanMaskWrite, 1, "[pad, 1:]", "[pad]"),
    "other axis": (BooleanMaskWrite, 1, "[..., pad]", "[pad]"),
    "out of place": (BooleanMaskWrite, 0, "masked(x)[x > 0] -=", "masked(x + 0)[x > 0] -="),
    "other bound": (DataDependentShape, 0, "x < 0", "x < 0.1"),
    "a sum for a mean": (DataDependentShape, 0, ".mean()", ".sum()"),
}


@pytest.mark.parametrize("mutant", TEXTS.values(), ids=TEXTS)
def test_a_wrong_text_is_noticed_in_eager(mutant, tmp_path):
    rule, number, old, new = mutant
    example = rule.EXAMPLES[number]
    assert old in example.after
    before = equivalence.load(example.before, tmp_path)
    after = equivalence.load(example.after.replace(old, new), tmp_path)
    inputs = equivalence.make_inputs(example.inputs)
    equivalence.check_eager(before, equivalence.load(example.after, tmp_path), inputs)
    with pytest.raises(equivalence.DifferenceError):
        equivalence.check_eager(before, after, inputs)


HEAD = """
import torch
import torch.nn.functional as F


def forward(x: torch.Tensor, y: torch.Tensor, flags: torch.Tensor):
    m = flags > 0
    k = y[:, 0] > 0
    x = x.clone()
"""


def check_in_a_program(body: str, folder) -> None:
    """Make sure that a rewritten mask gives in a program what the original gives in eager."""
    source = HEAD + textwrap.indent(body + "\nreturn x\n", "    ")
    before = equivalence.load(source, folder)
    result = rewrite(source)
    assert result.applied
    after = equivalence.load(result.source, folder)
    x = torch.tensor([[-1.0, -2.0], [3.0, -4.0], [-5.0, -6.0], [7.0, 8.0]])
    y = torch.tensor([[1.0, 2.0], [-3.0, 4.0], [5.0, -6.0], [-7.0, -8.0]])
    args = (x, y, torch.tensor([1.0, -1.0, 1.0, -1.0]))
    expected = equivalence.observe(before, args)
    got = equivalence.plain_jit(after, args)
    wanted = expected.value if expected.error is None else torch.full_like(x, torch.nan)
    found = equivalence.difference(wanted, got, rtol=1e-5)
    if expected.error is not None:
        found = None if bool(got[torch.tensor([0, 2])].isnan().all()) else "no NaN"
    if found is not None:
        raise equivalence.DifferenceError(found)


def always(value):
    return lambda *_: value


def reversed_order(rows, bound):
    moved = compact(rows, bound)
    return (
        moved if moved.bound != 4 else masked_rows.MaskedRows(moved.values.flip(0), moved.keep, 2)
    )


compact = masked_rows.compact
in_place = masked_access._in_place
ZEROS = dict.fromkeys(masked_functions.IDENTITY, always(0.0))
CODE = {
    "order lost": (masked_access, "compact", reversed_order, "x[m] = y[k]"),
    "order lost between": (masked_rows, "compact", reversed_order, "x[m] = x[m] * 0 + y[k]"),
    "next row": (
        masked_access,
        "_in_place",
        lambda value, target: (jnp.roll(in_place(value, target)[0], 1, axis=0), None),
        "x[m] = y[k]",
    ),
    "wrong fill": (masked_functions, "IDENTITY", ZEROS, "x = x[m].max()"),
    "wrong fill of a minimum": (masked_functions, "IDENTITY", ZEROS, "x = (-x[m]).min()"),
    "every mask the same": (
        masked_rows,
        "is_same_selection",
        always(True),
        "x = (x[m] + y[~m]).sum()",
    ),
    "every write the same": (masked_access, "is_same_selection", always(True), "x[m] = y[~m]"),
    "not fitting unnoticed": (
        masked_access,
        "poisoned",
        lambda array, wrong: array,
        "x[m] = y[y[:, 1] < 3]",
    ),
    "nothing selected": (masks, "is_plain_torchax", always(False), "x[m] += 1"),
}


@pytest.mark.parametrize("mutant", CODE.values(), ids=CODE)
def test_wrong_code_is_noticed_in_a_program(mutant, tmp_path, monkeypatch):
    module, name, replacement, body = mutant
    check_in_a_program(body, tmp_path)
    monkeypatch.setattr(module, name, replacement)
    with pytest.raises(Exception, match=r"differs|NaN|finite|boolean indices"):
        check_in_a_program(body, tmp_path)
