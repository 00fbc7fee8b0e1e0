"""The porting summary counts what it says."""

from dataclasses import replace

from tpuport.lint.records import Outcome, Reported
from tpuport.lint.summary import STEPS, summarise
from tpuport.source.rewrite.finding import Severity

ONE = Reported("a.py", 1, 0, 1, 1, "TPU101", "R", Severity.ERROR, "no", function=1, safety="exact")


def of(*findings: Reported, functions: int = 10):
    return summarise(Outcome(shown=(), counted=findings, functions=functions, files=1))


def test_a_function_with_several_errors_is_blocked_once():
    other = replace(ONE, function=9, severity=Severity.SILENT)
    summary = of(ONE, replace(ONE, line=2), other, replace(ONE, file="b.py"))
    assert (summary.functions, summary.ready, summary.share) == (10, 7, 0.7)


def test_what_is_only_slow_blocks_nothing():
    summary = of(replace(ONE, severity=Severity.SLOW), replace(ONE, severity=Severity.NOTE))
    assert summary.ready == 10


def test_errors_outside_of_functions_are_counted_apart():
    summary = of(replace(ONE, function=0), replace(ONE, function=0, severity=Severity.SLOW))
    assert (summary.ready, summary.setup) == (10, 1)


def test_without_functions_all_is_ready():
    assert of(functions=0).share == 1.0


def test_fixes_are_counted_by_safety():
    summary = of(ONE, replace(ONE, safety="unsafe"), replace(ONE, safety=""), ONE)
    assert summary.safeties == {"exact": 2, "unsafe": 1}
    assert summary.steps[0].fixable == 2


def test_devices_come_before_branches_and_speed_last():
    found = [replace(ONE, code=code) for code in ("TPU601", "TPU101", "TPU201", "TPU501", "TPU401")]
    starts = [step.start for step in of(*found, replace(ONE, code="TPU102")).steps]
    assert starts == ["TPU5", "TPU1", "TPU2", "TPU4", "TPU6"]
    assert [start for start in STEPS if start in starts] == starts
    assert of(*found).total == 5


def test_every_rule_belongs_to_a_step():
    from tpuport.rules._discovery import find_rules

    assert all(rule.CODE[:4] in STEPS for rule in find_rules())
