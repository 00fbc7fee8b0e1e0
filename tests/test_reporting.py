"""The JSON of every report, to the letter as users' programs read it, and what writes it."""

import json
import math
import re
from dataclasses import dataclass, field
from enum import StrEnum

import jinja2
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import tpuport
from tpuport.aot.records import Memory, Seconds
from tpuport.aot.report import CompileReport
from tpuport.aot.search import SearchReport, Trial
from tpuport.compat.emulated.report import Descended, RunReport
from tpuport.compat.imports import rewritten
from tpuport.compat.imports.import_hook import Imported
from tpuport.foundation.reporting import templates
from tpuport.foundation.reporting.json_codec import decoded, encoded
from tpuport.foundation.reporting.markup import Markup
from tpuport.lint.records import Checked, Ignore, Problem, Reported, Trouble
from tpuport.model.precision_audit import AuditPlace, PrecisionAudit
from tpuport.sharding.checks import NoteKind, ShardingNote
from tpuport.sharding.plan import ShardingPlan
from tpuport.sharding.plan_data import Row
from tpuport.source.rewrite.finding import Severity


def test_the_json_of_a_precision_audit():
    places = AuditPlace("product", ("float32", "float32"), "blocks.*", "a.py:3", 2, 64, 32)
    assert PrecisionAudit("step", (places,)).to_json() == (
        '{\n "name": "step",\n "places": [\n  {\n   "kind": "product",\n   "dtypes": [\n'
        '    "float32",\n    "float32"\n   ],\n   "module": "blocks.*",\n   "line": "a.py:3",\n'
        '   "count": 2,\n   "flops": 64,\n   "bytes": 32,\n   "flag": "float32 product"\n  }\n ]\n}'
    )


def test_the_json_of_a_sharding_plan():
    row = Row("w", (8, 4, 2), "float32", P("fsdp", ("a", "b"), None), 256, 64, "linear", "*", "why")
    note = ShardingNote(NoteKind.UNMATCHED, "gone", "the pattern matches nothing")
    plan = ShardingPlan("M", "mine", {"fsdp": 4}, "", (row,), ("line",), (note,))
    parameter = {
        "name": "w",
        "shape": [8, 4, 2],
        "dtype": "float32",
        "spec": ["fsdp", ["a", "b"], None],
        "num_bytes": 256,
        "bytes_a_chip": 64,
        "category": "linear",
        "rule": "*",
        "reason": "why",
    }
    expected = {
        "model": "M",
        "rules": "mine",
        "mesh": {"fsdp": 4},
        "device": "",
        "bytes": 256,
        "bytes_a_chip": 64,
        "categories": {"linear": {"bytes": 256, "bytes_a_chip": 64}},
        "parameters": [parameter],
        "activations": ["line"],
        "findings": [
            {
                "kind": str(NoteKind.UNMATCHED),
                "name": "gone",
                "message": "the pattern matches nothing",
            }
        ],
    }
    assert plan.to_json() == json.dumps(expected, indent=1)


def test_the_json_of_a_run():
    program = tpuport.PortReport("Model")
    module = Imported("a", "/a.py", (("TPU101", 3),), (("TPU102", 4, "why"),))
    report = RunReport([program], [Descended("Model.f", "a loop")], [module])
    expected = {
        "ok": False,
        "programs": [program.to_dict()],
        "descended": [{"what": "Model.f", "reason": "a loop"}],
        "imported": [
            {
                "name": "a",
                "file": "/a.py",
                "applied": [["TPU101", 3]],
                "left": [["TPU102", 4, "why"]],
                "reason": "",
            }
        ],
        "caught": [],
        "step_marks": 0,
    }
    assert report.to_json() == json.dumps(expected, indent=2) + "\n"


def test_the_json_of_a_search():
    memory = Memory(16, 1, 2, 3, 4)
    report = CompileReport("M", "forward", "v6e-8", "TPU", {"a": 8}, "r", memory, Seconds(1, 2, 3))
    found = SearchReport("v6e-8", (Trial({"a": 8}, "r", report), Trial({}, "s", error="no")), 2)
    read = json.loads(found.to_json())
    assert list(read) == ["topology", "trials", "left"]
    own = json.loads(report.to_json())
    assert read["trials"][0]["report"] == {k: own[k] for k in own if k not in ("fits", "peak")}
    assert read["trials"][1] == {
        "mesh": {},
        "rules": "s",
        "report": None,
        "error": "no",
        "sequence_parallel": "",
        "blocks": [],
    }


CHECKED = Checked(
    "a.py",
    (
        Reported(
            *("a.py", 1, 2, 3, 4, "TPU101", "TensorBranch", Severity.SILENT, "é"),
            lines=("x", "y"),
            ignored=(0,),
        ),
    ),
    (Ignore(3, 4, "# tpuport: ignore[TPU101]", ("TPU101",)),),
    (Problem("a.py", "no", Trouble.SKIPPED),),
    functions=3,
    reached=("f",),
)


def test_the_json_of_a_linted_file_leaves_its_path_out():
    finding = {
        "line": 1,
        "column": 2,
        "end_line": 3,
        "end_column": 4,
        "code": "TPU101",
        "rule": "TensorBranch",
        "severity": "silent",
        "message": "é",
        "cell": 0,
        "safety": "",
        "function": 0,
        "lines": ["x", "y"],
        "ignored": [0],
    }
    ignore = {
        "line": 3,
        "column": 4,
        "text": "# tpuport: ignore[TPU101]",
        "codes": ["TPU101"],
        "whole_file": False,
        "cell": 0,
        "source": "",
        "unknown": "",
    }
    expected = {
        "findings": [finding],
        "ignores": [ignore],
        "problems": [{"reason": "no", "trouble": "skipped"}],
        "functions": 3,
        "reached": ["f"],
    }
    text = json.dumps(CHECKED.to_json())
    assert text == json.dumps(expected)
    read = Checked.from_json(json.loads(text), "a.py")
    assert read == CHECKED
    assert type(read.findings[0].severity) is Severity


@pytest.mark.parametrize("found", [{}, {"findings": [{}]}, {"findings": 3}, []])
def test_json_of_another_kind_is_no_linted_file(found: object):
    with pytest.raises((KeyError, TypeError, ValueError)):
        Checked.from_json(found, "a.py")  # type: ignore[arg-type]


def test_a_rewritten_file_survives_json():
    made = rewritten.Rewritten(
        compile("x = 1", "a.py", "exec"), "x = 1", (1,), (("TPU101", 3),), (("TPU102", 4, "why"),)
    )
    kept = json.loads(json.dumps(rewritten._to_json(made)))
    assert list(kept) == ["code", "text", "origins", "applied", "left", "reason"]
    assert rewritten._from_json(kept) == made
    assert rewritten._from_json({}) is None
    assert rewritten._from_json({**kept, "applied": [["TPU101"]]}) is None
    assert rewritten._from_json({**kept, "code": "?"}) is None


@dataclass(frozen=True)
class Inner:
    severity: Severity
    share: float = 0.0


@dataclass
class Outer:
    pair: tuple[str, int]
    items: list[Inner]
    by_name: dict[str, Inner] = field(default_factory=dict)
    one: Inner | None = None
    shape: tuple[int, ...] = ()


def test_a_value_survives_json():
    inner = Inner(Severity.SLOW, -math.inf)
    value = Outer(("a", 1), [inner, Inner(Severity.NOTE)], {"b": inner}, inner, (1, 2))
    text = json.dumps(encoded(value), allow_nan=False)
    assert decoded(Outer, json.loads(text)) == value
    assert decoded(Outer, {"pair": ["a", 1], "items": []}) == Outer(("a", 1), [])


def test_what_json_does_not_know_is_written_as_what_it_knows():
    class Level(StrEnum):
        LOW = "low"

    values = {1: Level.LOW, "nan": math.nan, "f": np.float32(0.5), "d": np.float64(math.inf)}
    assert encoded(values) == {"1": "low", "nan": "nan", "f": 0.5, "d": "inf"}
    assert type(encoded(Level.LOW)) is str
    assert type(encoded(np.float64(2))) is float
    assert encoded((np.bool_(True), np.int64(3), [()])) == [True, 3, [[]]]


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"pair": ["a"], "items": []},
        {"pair": ["a", 1], "items": [{"severity": "dire"}]},
        {"pair": ["a", 1], "items": [{"severity": "note", "share": "much"}]},
    ],
)
def test_json_that_does_not_fit_its_type_is_refused(wrong: object):
    with pytest.raises((KeyError, TypeError, ValueError)):
        decoded(Outer, wrong)


def test_a_template_shows_what_a_browser_would_obey():
    evil = "<b>'\x1b\u202e"
    shown = "{{ a }}|{{ b }}|{{ 3 | plural('branch') }}"
    written = templates._environment("tpuport").from_string(shown)
    assert written.render(a=evil, b=Markup("<i>")) == ("&lt;b&gt;&#39;\\x1b\\u202e|<i>|3 branches")


def test_a_value_that_a_template_lacks_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="'reports' is undefined"):
        templates.render("demo/templates/page.html.j2")


def test_the_page_of_a_run_has_its_programs_and_escapes_their_names():
    report = RunReport(
        [tpuport.PortReport("<b>Model")],
        [Descended("Model.f", "a <i>loop</i>")],
        [Imported("a", "/a.py", (("TPU101", 3),))],
    )
    page = report.to_html()
    assert page.count("<td><code>&lt;b&gt;Model</code></td>") == 1
    assert "<li>Model.f is not one program: a &lt;i&gt;loop&lt;/i&gt;</li>" in page
    assert "TPU101 line 3</li>" in page
    assert page.count("<details>") == page.count("</details>") == 1
    assert not {"<b>", "<i>"} & set(re.findall(r"<\w>", page.partition("</style>")[2]))
    assert "<table>" not in RunReport().to_html()
