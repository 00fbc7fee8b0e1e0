"""`tpuport rules` and `tpuport explain` beyond what the public surface promises."""

import json

import pytest

from tpuport.lint.catalogue import NO_FIX, catalogue, entry_named
from tpuport.lint.pseudo import UnusedIgnore


def test_the_rule_about_comments_is_listed_and_explained(invoke):
    assert "TPU001" in invoke("rules").stdout
    page = invoke("explain", "unused-ignore").stdout
    assert page.startswith("TPU001 UnusedIgnore (severity: note, fix: none)\n`{comment}` ignores")
    assert "## Why is this bad?" in page


def test_explain_shows_an_example_what_becomes_of_it_and_a_look_alike(invoke):
    page = invoke("explain", "TPU103").stdout
    assert page.startswith("TPU103 TensorToNumber (severity: error, fix: exact)\n")
    parts = [page.index(word) for word in ("\nExample\n", "\nbecomes\n", "\nLooks alike and is")]
    assert parts == sorted(parts)
    assert "    half = int(x.shape[0] * float(ratio))" in page


def test_json_is_for_programs(invoke):
    listed = json.loads(invoke("rules", "--format", "json").stdout)
    assert [entry["code"] for entry in listed] == [entry.code for entry in catalogue()]
    assert listed[0] == {
        "code": "TPU001",
        "name": "UnusedIgnore",
        "severity": "note",
        "fix": "none",
        "message": UnusedIgnore.MESSAGE,
    }
    assert json.loads(invoke("explain", "TPU101", "--format", "json").stdout)["page"].startswith(
        "A branch that Python decides"
    )


def test_an_example_without_a_fix_says_why(invoke, monkeypatch):
    from tpuport.lint import catalogue as module

    entry = entry_named("TPU103")
    from dataclasses import replace

    left = replace(entry, examples=entry.examples[1:2])
    monkeypatch.setattr(module, "entry_named", lambda code: left)
    assert "\nhas no automatic fix: inside an f-string\n" in invoke("explain", "TPU103").stdout


def test_a_rule_whose_examples_all_stay_has_no_fix():
    from tpuport.lint.catalogue import _fix
    from tpuport.rules.tensor_to_number import TensorToNumber
    from tpuport.source.rewrite.finding import Safety

    assert _fix(TensorToNumber, TensorToNumber.EXAMPLES[1:]) == NO_FIX
    assert _fix(TensorToNumber, TensorToNumber.EXAMPLES) == "exact"

    class Close(TensorToNumber):
        SAFETY = Safety.close(1e-6)

    assert _fix(Close, Close.EXAMPLES) == "close (rtol 1e-06)"


@pytest.mark.parametrize("code", ["TPU1000", "nope"])
def test_an_unknown_rule_is_a_wrong_call(invoke, code: str):
    result = invoke("explain", code)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"There is no rule {code}.")
