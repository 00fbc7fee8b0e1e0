"""Every rule proves itself: six checks for each example, and silence on what looks alike."""

import ast
import inspect
import itertools
import re
import warnings
from pathlib import Path

import pytest

from tpuport.rules._apply import find, rewrite
from tpuport.rules._discovery import find_rules
from tpuport.rules._rule import HEADINGS, Example, Rule
from tpuport.source.rewrite.finding import Finding, Safety, Severity
from tpuport.testing import equivalence
from tpuport.testing.harms import HARMS

RULES = find_rules()
EXAMPLES = [
    pytest.param(rule, example, id=f"{rule.CODE}-{number}")
    for rule in RULES
    for number, example in enumerate(rule.EXAMPLES)
]
FIXED = [case for case in EXAMPLES if case.values[1].after is not None]
LEFT = [case for case in EXAMPLES if case.values[1].after is None]
CLEAN = [
    pytest.param(source, id=f"{rule.CODE}-{number}")
    for rule in RULES
    for number, source in enumerate(rule.CLEAN)
]


def functions(example: Example, folder: Path):
    """`forward` before and after the rewrite."""
    assert example.after is not None
    before = example.reference or example.before
    return (equivalence.load(source, folder) for source in (before, example.after))


def loud(found: list[Finding]) -> list[Finding]:
    """The findings that are shown unless asked for more: notes and host code are not."""
    quiet = (Severity.DEVICE, Severity.NOTE)
    return [finding for finding in found if finding.severity not in quiet]


# What a rule declares.


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.CODE)
def test_a_rule_declares_everything(rule: type[Rule]):
    assert re.fullmatch(r"TPU[1-7]\d\d", rule.CODE)
    positions = [(rule.__doc__ or "").find(f"## {heading}") for heading in HEADINGS]
    assert -1 not in positions
    assert positions == sorted(positions)
    assert len(rule.EXAMPLES) + len(rule.CLEAN) >= 3
    assert rule.CLEAN


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.CODE)
def test_every_visit_method_is_for_a_node_class(rule: type[Rule]):
    visits = [name for name in dir(rule) if name.startswith("visit_")]
    assert visits
    for name in visits:
        assert issubclass(getattr(ast, name.removeprefix("visit_")), ast.AST)


# The six checks.


@pytest.mark.parametrize(("rule", "example"), EXAMPLES)
def test_1_the_rule_finds_the_example(rule: type[Rule], example: Example):
    found = find(example.before, rules=[rule])
    assert {finding.code for finding in found} == {rule.CODE}
    assert found == sorted(found)


@pytest.mark.parametrize(("rule", "example"), FIXED)
def test_2_it_is_rewritten_to_the_letter(rule: type[Rule], example: Example):
    result = rewrite(example.before, unsafe=rule.SAFETY is Safety.UNSAFE)
    assert result.source == example.after
    assert loud([left.finding for left in result.left]) == []
    assert rule.CODE in {applied.code for applied in result.applied}


@pytest.mark.parametrize(("rule", "example"), FIXED)
def test_3_no_rule_finds_the_result(rule: type[Rule], example: Example):
    assert loud(find(example.after or "")) == []
    again = rewrite(example.after or "")
    assert (again.source, again.applied) == (example.after, [])


@pytest.mark.parametrize(("rule", "example"), FIXED)
def test_4_the_result_does_the_same_in_eager_pytorch(
    rule: type[Rule], example: Example, tmp_path: Path
):
    before, after = functions(example, tmp_path)
    inputs = equivalence.make_inputs(example.inputs)
    equivalence.check_eager(before, after, inputs, rtol=rule.SAFETY.rtol)


@pytest.mark.parametrize(("rule", "example"), FIXED)
def test_5_the_result_ports_with_one_trace(rule: type[Rule], example: Example, tmp_path: Path):
    before, after = functions(example, tmp_path)
    inputs = equivalence.make_inputs(example.inputs)
    passing = [args for args in inputs if equivalence.observe(before, args).error is None]
    assert len(passing) > 1
    equivalence.check_ported(before, after, passing)


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Distributions check their parameters, as in a new process: dynamo, once any test has used it,
    turns that off.
    """
    from torch.distributions import Distribution

    monkeypatch.setattr(Distribution, "_validate_args", True)


@pytest.mark.usefixtures("validated")
@pytest.mark.parametrize(("rule", "example"), EXAMPLES)
def test_6_the_original_still_fails_under_plain_torchax(
    rule: type[Rule], example: Example, tmp_path: Path
):
    del rule
    if example.jit_error is not None:
        assert error_under_plain_torchax(example.before, example, tmp_path) == example.jit_error
        return
    assert example.harm is not None
    before = equivalence.load(example.before, tmp_path)
    inputs = equivalence.make_inputs(example.inputs, seeds=2)
    assert HARMS[example.harm](before, inputs) is None


def error_under_plain_torchax(source: str, example: Example, folder: Path) -> str:
    """The name of the exception's class, or that there was none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            function = equivalence.load(source, folder)
            (args,) = equivalence.make_inputs(example.inputs, seeds=1)
            equivalence.plain_jit(function, args)
        except Exception as error:
            return type(error).__name__
    return "no error"


# Beyond the six.


@pytest.mark.parametrize(("rule", "example"), FIXED)
def test_the_result_runs_under_plain_torchax_too(
    rule: type[Rule], example: Example, tmp_path: Path
):
    if example.plain_error is not None:
        assert example.after is not None
        error = error_under_plain_torchax(example.after, example, tmp_path)
        assert error == example.plain_error
        return
    before, after = functions(example, tmp_path)
    inputs = equivalence.make_inputs(example.inputs)
    if example.plain_harm is not None:
        assert HARMS[example.plain_harm](after, inputs) is None
        return
    passing = [args for args in inputs if equivalence.observe(before, args).error is None]
    assert len(passing) > 1
    equivalence.check_plain(before, after, passing, rtol=max(rule.SAFETY.rtol, 1e-5))


@pytest.mark.parametrize(("rule", "example"), [case for case in FIXED if case.values[0].LIVE])
def test_the_original_ports_by_live_rewriting(rule: type[Rule], example: Example, tmp_path: Path):
    before, reference = (equivalence.load(example.before, tmp_path) for _ in range(2))
    code = before.__code__
    inputs = equivalence.make_inputs(example.inputs)
    passing = [args for args in inputs if equivalence.observe(reference, args).error is None]
    equivalence.check_ported(reference, before, passing)
    assert before.__code__ is code


@pytest.mark.parametrize(("rule", "example"), LEFT)
def test_what_cannot_be_fixed_is_left_with_a_reason(rule: type[Rule], example: Example):
    result = rewrite(example.before, unsafe=rule.SAFETY is Safety.UNSAFE)
    reasons = [left.reason for left in result.left if left.finding.code == rule.CODE]
    assert example.left is not None
    assert any(example.left in reason for reason in reasons), reasons
    assert rule.CODE not in {applied.code for applied in result.applied}


@pytest.mark.parametrize("source", CLEAN)
def test_look_alikes_stay(source: str):
    text = inspect.cleandoc(source)
    assert loud(find(text)) == []
    assert rewrite(text).source == text


def test_examples_take_both_outcomes(tmp_path: Path):
    """An example whose inputs always go one way would prove half of a fix."""
    rule = next(rule for rule in RULES if rule.CODE == "TPU101")
    for example in rule.EXAMPLES[:3]:
        before = equivalence.load(example.before, tmp_path)
        lines = executed_lines(before, equivalence.make_inputs(example.inputs))
        code_lines = {line for _, _, line in before.__code__.co_lines() if line is not None}
        assert code_lines - lines <= {before.__code__.co_firstlineno}


def executed_lines(function, inputs) -> set[int]:
    """The lines of a function that run for these inputs, the adversarial ones included."""
    import sys

    seen: set[int] = set()

    def trace(frame, event, _):
        if frame.f_code is not function.__code__:
            return None
        seen.add(frame.f_lineno)
        return trace

    bent = (args for _, args in equivalence.adversarial(inputs[0]))
    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        for args in itertools.chain(inputs, bent):
            equivalence.observe(function, args)
    finally:
        sys.settrace(previous)
    return seen


# The suite notices a wrong fix.

MUTANTS = {
    "one branch dropped": ("x = x / limit", "x = x"),
    "sides swapped": ("if_true,\n        if_false", "if_false,\n        if_true"),
    "short circuit lost": ("tpuport.ops.both(limit is not None, lambda: ", "("),
    "wrong constant": ("torch.zeros(())", "torch.zeros(()) + 1e-7"),
    "wrong dtype": ("torch.zeros(())", "torch.zeros((), dtype=torch.float64)"),
}


@pytest.mark.parametrize("change", MUTANTS.values(), ids=MUTANTS)
def test_a_wrong_fix_is_noticed(change: tuple[str, str], tmp_path: Path):
    rule = next(rule for rule in RULES if rule.CODE == "TPU101")
    example = rule.EXAMPLES[0]
    assert example.after is not None
    assert change[0] in example.after
    before = equivalence.load(example.before, tmp_path)
    mutant = equivalence.load(example.after.replace(*change), tmp_path)
    inputs = equivalence.make_inputs("(torch.randn(3, 4), None)", seeds=2)
    inputs += equivalence.make_inputs(example.inputs)
    with pytest.raises(equivalence.DifferenceError):
        equivalence.check_eager(before, mutant, inputs)
