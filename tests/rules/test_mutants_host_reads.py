"""The checks of rules notice a wrong fix of a value read on the host."""

from pathlib import Path

import pytest

from tpuport.rules.item_call import ItemCall
from tpuport.rules.numpy_round_trip import NumpyRoundTrip
from tpuport.rules.tensor_to_number import TensorToNumber
from tpuport.rules.truth_in_call import TruthInCall
from tpuport.testing import equivalence

RULES = {rule.CODE: rule for rule in (TensorToNumber, ItemCall, NumpyRoundTrip, TruthInCall)}
# The rule, and what a wrong fix would write in place of what.
MUTANTS = {
    "a tensor for a number": (
        "TPU110",
        "tpuport.ops.item(x.detach().abs().max())",
        "x.abs().max()",
    ),
    "the list of rows": ("TPU110", "tpuport.ops.to_list(x.flatten())", "list(x.flatten())"),
    "a list that is not flat": ("TPU110", "x.flatten()", "x"),
    "a method before the read": ("TPU110", ".abs()", ""),
    "another kind of number": ("TPU103", "tpuport.ops.to_int(", "tpuport.ops.to_float("),
    "a truth for a number": ("TPU103", "tpuport.ops.to_bool(", "tpuport.ops.to_int("),
    "the other extreme": ("TPU119", "tpuport.ops.largest(", "tpuport.ops.smallest("),
    "a candidate lost": ("TPU119", ", 0.5, x.std()", ", 0.5"),
    "torch's own for tensors": ("TPU119", "tpuport.ops.smallest(", "torch.minimum("),
    "a factor lost": ("TPU310", ") * 2", ")"),
    "an operand lost": ("TPU310", "(x + 1)", "x"),
}


@pytest.mark.parametrize("change", MUTANTS.values(), ids=MUTANTS)
def test_a_wrong_fix_is_noticed(change: tuple[str, str, str], tmp_path: Path):
    code, right, wrong = change
    example = RULES[code].EXAMPLES[0]
    assert example.after is not None
    assert right in example.after
    before = equivalence.load(example.before, tmp_path)
    mutant = equivalence.load(example.after.replace(right, wrong), tmp_path)
    with pytest.raises(equivalence.DifferenceError):
        equivalence.check_eager(before, mutant, equivalence.make_inputs(example.inputs))


def test_a_read_that_leaves_the_program_is_noticed(tmp_path: Path):
    """Eager PyTorch cannot tell a fix that reads the value from one that does not."""
    example = ItemCall.EXAMPLES[0]
    assert example.after is not None
    before = equivalence.load(example.before, tmp_path)
    mutant = equivalence.load(
        example.after.replace("tpuport.ops.item(x.detach().abs().max())", "(x * 0).sum().item()"),
        tmp_path,
    )
    inputs = equivalence.make_inputs(example.inputs, seeds=2)
    with pytest.raises(Exception, match="concrete value"):
        equivalence.check_plain(before, mutant, inputs)


@pytest.mark.parametrize("wrong", ["x.flatten() * 2", "x.flatten() + 1e-4"])
def test_another_result_under_plain_torchax_is_noticed(wrong: str, tmp_path: Path):
    example = ItemCall.EXAMPLES[0]
    assert example.after is not None
    before = equivalence.load(example.before, tmp_path)
    mutant = equivalence.load(example.after.replace("x.flatten()", wrong), tmp_path)
    with pytest.raises(equivalence.DifferenceError):
        equivalence.check_plain(before, mutant, equivalence.make_inputs(example.inputs))
