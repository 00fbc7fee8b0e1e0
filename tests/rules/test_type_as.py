"""`type_as`: a fault only where its own tensor is read again; written as `to` everywhere."""

import pytest
import torch

from tpuport.rules._apply import find, rewrite
from tpuport.rules.type_as_call import TypeAsCall
from tpuport.source.rewrite.finding import Severity
from tpuport.testing import equivalence
from tpuport.testing.harms import HARMS

EXAMPLE = TypeAsCall.EXAMPLES[0]


def severities(body: str) -> list[Severity]:
    source = f"import torch\n\n\ndef forward(x: torch.Tensor, y: torch.Tensor):\n    {body}\n"
    return [finding.severity for finding in find(source, rules=[TypeAsCall])]


@pytest.mark.parametrize(
    "body",
    ["z = x.type_as(y)\n    return z + x", "if len(x):\n        y = x.type_as(y)\n    return x"],
)
def test_a_tensor_that_is_read_again_is_a_silent_fault(body: str):
    assert severities(body) == [Severity.SILENT]


@pytest.mark.parametrize(
    "body",
    [
        "return (x * 2).type_as(y)",
        "x = x.type_as(y)\n    return x",
        "z = x.type_as(y)\n    return z",
        "z = self.layer(x).type_as(y)\n    return z + x",
    ],
)
def test_a_tensor_that_is_not_read_again_is_only_worth_knowing(body: str):
    assert set(severities(body)) <= {Severity.NOTE}


def test_a_name_for_the_argument_is_left(tmp_path):
    source = EXAMPLE.before.replace("type_as(steps)", "type_as(other=steps)")
    result = rewrite(source, rules=[TypeAsCall])
    assert result.source == source
    assert [left.reason for left in result.left] == ["`to` has another name for its argument"]


def test_a_fix_that_casts_the_tensor_itself_is_noticed(tmp_path):
    assert EXAMPLE.after is not None
    wrong = EXAMPLE.after.replace("rounded = y.to(steps)", "y = rounded = y.to(steps)")
    assert wrong != EXAMPLE.after
    before, after = (equivalence.load(text, tmp_path) for text in (EXAMPLE.before, wrong))
    with pytest.raises(equivalence.DifferenceError):
        equivalence.check_eager(before, after, equivalence.make_inputs(EXAMPLE.inputs))


def test_the_fix_removes_the_fault_under_plain_torchax(tmp_path):
    inputs = equivalence.make_inputs(EXAMPLE.inputs, seeds=2)
    before, after = (
        equivalence.load(text, tmp_path) for text in (EXAMPLE.before, EXAMPLE.after or "")
    )
    assert HARMS["differs"](before, inputs) is None
    assert HARMS["differs"](after, inputs) is not None


def test_to_gives_the_tensor_itself_where_type_as_does():
    x = torch.ones(2)
    assert x.type_as(x) is x.to(x) is x
