"""Findings, and the rules that are asked for them."""

import ast
from types import ModuleType

import pytest

from tpuport.rules._apply import find
from tpuport.rules._discovery import check_codes, find_rules, rule_in
from tpuport.rules._rule import Example, Rule
from tpuport.rules.tensor_branch import TensorBranch
from tpuport.rules.tensor_while import TensorWhile
from tpuport.source.inference.inference import StaticKinds
from tpuport.source.rewrite.finding import Finding, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.module import Module

SOURCE = """
import torch


def forward(x: torch.Tensor):
    if (x.sum() >
            0):
        x = x + 1
    while x.sum() < 10: x = float(x)
    return x
"""


def test_findings_are_sorted_and_say_where_and_what():
    found = find(SOURCE, file="model.py")
    assert found == sorted(found)
    assert [finding.code for finding in found] == ["TPU101", "TPU104", "TPU103"]
    first = found[0]
    assert first == Finding(
        file="model.py",
        line=6,
        column=4,
        end_line=7,
        end_column=13,
        code="TPU101",
        message="Python branches on `x.sum() > 0`, which has no value while the program is traced",
        severity=Severity.ERROR,
        rule="TensorBranch",
    )


def test_only_the_given_rules_are_asked():
    assert [finding.code for finding in find(SOURCE, rules=[TensorWhile])] == ["TPU104"]
    assert find(SOURCE, rules=[]) == []


def test_a_message_quotes_the_source_on_one_short_line():
    source = f"def f(x: 'Tensor'):\n    if x > {'1 + ' * 30} 1: return x\n    return 1\n"
    (finding,) = find(source)
    quoted = finding.message.split("`")[1]
    assert quoted.startswith("x > 1 + 1")
    assert quoted.endswith("...")
    assert len(quoted) == 60


def test_source_that_does_not_parse_is_a_syntax_error():
    with pytest.raises(SyntaxError, match="invalid syntax") as raised:
        find("def f(:\n", file="broken.py")
    assert raised.value.filename == "broken.py"


def test_a_rule_has_no_fix_by_default():
    module = Module("x = 1")
    context = Context(module, StaticKinds().bind(module))
    with pytest.raises(NotFixable, match="no automatic fix"):
        Rule().fix(module.tree.body[0], context)


def test_the_rules_are_found_in_the_order_of_their_codes():
    codes = [rule.CODE for rule in find_rules()]
    assert codes == sorted(set(codes))
    assert {"TPU101", "TPU102", "TPU103", "TPU104"} <= set(codes)


def test_two_rules_with_one_code_are_refused():
    class Other(TensorBranch):
        pass

    with pytest.raises(ValueError, match="got TPU101 for both TensorBranch and Other"):
        check_codes([TensorBranch, Other])


def test_a_rule_file_holds_one_rule_named_after_it():
    module = ModuleType("tpuport.rules.hard_coded_cuda")
    with pytest.raises(ValueError, match="to hold the rule HardCodedCuda, got none"):
        rule_in(module)
    wrong = type("Cuda", (Rule,), {"__module__": module.__name__})
    vars(module).update(Cuda=wrong, Rule=Rule, TensorBranch=TensorBranch)
    with pytest.raises(ValueError, match="to hold the rule HardCodedCuda, got Cuda"):
        rule_in(module)
    right = type("HardCodedCuda", (Rule,), {"__module__": module.__name__})
    vars(module).update(Cuda=None, HardCodedCuda=right)
    assert rule_in(module) is right


def test_an_example_is_dedented():
    example = Example("\n    a = 1\n    if a:\n        b\n", after="    c\n")
    assert (example.before, example.after) == ("a = 1\nif a:\n    b\n", "c\n")


def test_a_close_fix_states_its_tolerance():
    assert Safety.close(1e-6) == Safety("close", 1e-6)
    assert (Safety.EXACT.name, Safety.EXACT.rtol, Safety.UNSAFE.name) == ("exact", 0, "unsafe")
    with pytest.raises(ValueError, match="Expected a positive rtol, got 0 instead"):
        Safety.close(0)


def test_every_statement_of_a_module_has_its_block():
    module = Module(
        "if a:\n    b\nelse:\n    c\ntry:\n    d\nexcept E:\n    e\nelse:\n    f\nfinally:\n    g\n"
        "match h:\n    case 1:\n        i\n"
    )
    for statement in ast.walk(module.tree):
        if isinstance(statement, ast.stmt):
            block, index = module.block(statement)
            assert block[index] is statement
