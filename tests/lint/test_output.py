"""What each form of output says, to the letter or against its own specification."""

import html.parser
import json
import re
from dataclasses import replace

import pytest

from tpuport.lint.output import FORMATS, Style, write
from tpuport.lint.records import Outcome, Problem, Reported, Trouble
from tpuport.source.rewrite.finding import Severity

BRANCH = Reported(
    file="pkg/model.py",
    line=9,
    column=4,
    end_line=9,
    end_column=18,
    code="TPU101",
    rule="TensorBranch",
    severity=Severity.ERROR,
    message="Python branches on `x.sum() > 0`",
    safety="exact",
    function=5,
    lines=("    if x.sum() > 0:",),
)
LONG = replace(
    BRANCH,
    line=10,
    column=8,
    end_line=19,
    end_column=5,
    code="TPU103",
    rule="TensorToNumber",
    severity=Severity.SLOW,
    message="a number",
    safety="unsafe",
    function=0,
    lines=tuple(f"        line {n}" for n in range(10, 16)),
)
CELL = replace(BRANCH, file="n.ipynb", cell=3, safety="", severity=Severity.NOTE)
OUTCOME = Outcome(
    shown=(CELL, BRANCH, LONG),
    counted=(CELL, BRANCH, LONG),
    hidden={"note": 2},
    baselined=1,
    stale=4,
    problems=(Problem("bad.py", "binary"),),
    functions=4,
    files=7,
)
EMPTY = Outcome(files=2)


def text(form: str, outcome: Outcome = OUTCOME, *, color: bool = False, summary: bool = False):
    return write(outcome, form, Style(color=color, summary=summary))


# For people.


def test_full_shows_the_source_underlined():
    assert text("full", replace(OUTCOME, shown=(BRANCH, LONG, CELL))) == (
        "TPU101 [*] error: Python branches on `x.sum() > 0`\n"
        " --> pkg/model.py:9:5\n"
        "  |\n"
        "9 |     if x.sum() > 0:\n"
        "  |     ^^^^^^^^^^^^^^\n"
        "  = help: `tpuport rewrite` fixes this with the same results;"
        " `tpuport explain TPU101` says why\n"
        "\n"
        "TPU103 [unsafe fix] slow: a number\n"
        "  --> pkg/model.py:10:9\n"
        "   |\n"
        "10 |         line 10\n"
        "   |         ^^^^^^^\n"
        "11 |         line 11\n"
        "   |         ^^^^^^^\n"
        "12 |         line 12\n"
        "   |         ^^^^^^^\n"
        "13 |         line 13\n"
        "   |         ^^^^^^^\n"
        "14 |         line 14\n"
        "   |         ^^^^^^^\n"
        "15 |         line 15\n"
        "   |         ^^^^^^^\n"
        "   | ... 4 more lines\n"
        "   = help: `tpuport rewrite --unsafe` has a fix that can change results; `tpuport explain"
        " TPU103` says why\n"
        "\n"
        "TPU101 note: Python branches on `x.sum() > 0`\n"
        " --> n.ipynb:cell 3:9:5\n"
        "  |\n"
        "9 |     if x.sum() > 0:\n"
        "  |     ^^^^^^^^^^^^^^\n"
        "  = help: `tpuport explain TPU101` says why and what to do\n"
    )


def test_a_fix_within_a_tolerance_says_so():
    shown = text("full", replace(OUTCOME, shown=(replace(BRANCH, safety="close"),)))
    assert "`tpuport rewrite` fixes this within the rule's tolerance; " in shown


@pytest.mark.parametrize(
    ("line", "column", "end", "carets"),
    [
        ("\tif x > 0:", 4, 9, "       ^^^^^"),
        ("\t\tx = float(y)", 6, 14, "            ^^^^^^^^"),
        ("f('漢字', float(x))", 9, 17, "           ^^^^^^^^"),
        ("f('é', float(x))", 7, 15, "       ^^^^^^^^"),
        ("x\x1b[2J = float(x)", 8, 16, "           ^^^^^^^^"),
    ],
)
def test_carets_stand_under_what_they_mean(line: str, column: int, end: int, carets: str):
    finding = replace(BRANCH, column=column, end_column=end, lines=(line,))
    lines = text("full", replace(OUTCOME, shown=(finding,))).splitlines()
    assert lines[4] == f"  | {carets}"
    assert "\x1b" not in lines[3]


def test_concise_has_one_line_each():
    assert text("concise") == (
        "n.ipynb:cell 3:9:5: TPU101 note: Python branches on `x.sum() > 0`\n"
        "pkg/model.py:9:5: TPU101 [*] error: Python branches on `x.sum() > 0`\n"
        "pkg/model.py:10:9: TPU103 [unsafe fix] slow: a number\n"
    )


def test_statistics_count_rules_the_most_frequent_first():
    assert text("statistics") == (
        "      2  ████████████████████  TPU101  error   TensorBranch  1 fixable\n"
        "      1  ██████████            TPU103  slow    TensorToNumber\n"
    )


def test_the_end_of_a_run_sums_up():
    _, end = text("concise", summary=True).split("\n\n", 1)
    assert end == (
        "Found 3 findings in 2 of 7 files: 1 error, 1 slow, 1 note.\n"
        "2 findings of severity note not shown; --severity note shows them.\n"
        "1 finding in the baseline not shown.\n"
        "4 findings of the baseline no longer found; --write-baseline drops them.\n"
        "\n"
        "Portability\n"
        "  ██████████████████████████████░░░░░░░░░░  75 %, 3 of 4 step functions ready\n"
        "Order of work\n"
        "  1. ████████████     2  Python that needs a traced value (TPU101 1, TPU103 1)\n"
        "Fixes: `tpuport rewrite` fixes 1 of 2 findings and 1 more with --unsafe.\n"
    )


def test_nothing_found_is_said():
    for form in ("full", "concise", "statistics"):
        assert text(form, EMPTY, summary=True) == "Nothing found in 2 files.\n"
        assert text(form, EMPTY) == ""


def test_colours_are_only_added():
    for form in ("full", "concise", "statistics"):
        colored = text(form, color=True, summary=True)
        assert "\x1b[31" in colored
        assert re.sub(r"\x1b\[[\d;]*m", "", colored) == text(form, summary=True)


# For programs.


def test_json_has_everything_and_counts_from_one():
    content = json.loads(text("json"))
    assert list(content) == [
        *("format", "tool", "findings", "problems", "hidden", "baselined", "files", "summary"),
    ]
    assert content["findings"][1] == {
        "file": "pkg/model.py",
        "cell": None,
        "line": 9,
        "column": 5,
        "end_line": 9,
        "end_column": 19,
        "code": "TPU101",
        "rule": "TensorBranch",
        "severity": "error",
        "message": "Python branches on `x.sum() > 0`",
        "fix": "exact",
    }
    assert content["findings"][0]["cell"] == 3
    assert content["problems"] == [{"file": "bad.py", "reason": "binary", "kind": "unread"}]
    assert content["hidden"] == {"note": 2}
    assert content["summary"]["share"] == 0.75
    assert content["summary"]["steps"][0]["codes"] == [["TPU101", 1], ["TPU103", 1]]
    assert json.loads(text("json", EMPTY))["findings"] == []


def test_github_annotates_the_lines():
    assert text("github").splitlines() == [
        "::notice title=tpuport TPU101,file=n.ipynb::n.ipynb:cell 3:9:5: TPU101 Python branches on"
        " `x.sum() > 0`",
        "::error title=tpuport TPU101,file=pkg/model.py,line=9,col=5,endLine=9,endColumn=19::"
        "pkg/model.py:9:5: TPU101 Python branches on `x.sum() > 0`",
        "::warning title=tpuport TPU103,file=pkg/model.py,line=10,col=9,endLine=19,endColumn=6::"
        "pkg/model.py:10:9: TPU103 a number",
        "::error title=tpuport,file=bad.py::bad.py: binary",
    ]


def test_github_escapes_what_would_end_a_command():
    finding = replace(BRANCH, file="a,b:c%.py", message="50 %\r\n::error::x")
    (line,) = text("github", Outcome(shown=(finding,))).splitlines()
    assert "file=a%2Cb%3Ac%25.py," in line
    assert line.endswith("TPU101 50 %25%0D%0A::error::x")
    skipped = Problem("x", "a link", Trouble.SKIPPED)
    assert text("github", Outcome(problems=(skipped,))).startswith("::notice ")


# SARIF 2.1.0: what its schema requires of each object used here, and the values it allows.
_REQUIRED = {
    "run": {"tool"},
    "driver": {"name"},
    "rule": {"id"},
    "result": {"message"},
    "region": {"startLine", "startColumn", "endLine", "endColumn"},
    "notification": {"message"},
    "invocation": {"executionSuccessful"},
}
_LEVELS = {"none", "note", "warning", "error"}


def test_sarif_has_what_its_schema_requires():
    log = json.loads(text("sarif"))
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-schema-2.1.0.json")
    (run,) = log["runs"]
    assert set(run) >= _REQUIRED["run"]
    assert run["columnKind"] in {"utf16CodeUnits", "unicodeCodePoints"}
    driver = run["tool"]["driver"]
    assert set(driver) >= _REQUIRED["driver"]
    for rule in driver["rules"]:
        assert set(rule) >= _REQUIRED["rule"]
        assert rule["defaultConfiguration"]["level"] in _LEVELS
        for name in ("shortDescription", "fullDescription", "help"):
            assert rule[name]["text"]
    assert len({rule["id"] for rule in driver["rules"]}) == len(driver["rules"])
    for result in run["results"]:
        assert set(result) >= _REQUIRED["result"]
        assert result["message"]["text"]
        assert result["level"] in _LEVELS
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        place = result["locations"][0]["physicalLocation"]
        assert set(place["region"]) >= _REQUIRED["region"]
        assert all(place["region"][name] >= 1 for name in _REQUIRED["region"])
    (invocation,) = run["invocations"]
    assert set(invocation) >= _REQUIRED["invocation"]
    (notification,) = invocation["toolExecutionNotifications"]
    assert set(notification) >= _REQUIRED["notification"]
    assert notification["level"] in _LEVELS


def test_sarif_names_places_as_uris():
    def uri(file: str) -> str:
        log = json.loads(text("sarif", Outcome(shown=(replace(BRANCH, file=file),))))
        place = log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
        return place["artifactLocation"]["uri"]

    assert uri("a b/ü#.py") == "a%20b/%C3%BC%23.py"
    assert uri("/x y/z.py") == "file:///x%20y/z.py"


def test_sarif_names_the_cell_and_says_when_tpuport_failed():
    broken = replace(OUTCOME, problems=(Problem("a.py", "internal error", Trouble.INTERNAL),))
    run = json.loads(text("sarif", broken))["runs"][0]
    assert run["results"][0]["locations"][0]["logicalLocations"] == [
        {"name": "cell 3", "kind": "cell"}
    ]
    assert run["invocations"][0]["executionSuccessful"] is False
    assert json.loads(text("sarif"))["runs"][0]["invocations"][0]["executionSuccessful"] is True


# The page.


class Page(html.parser.HTMLParser):
    """Collects ids, links and what could load something; knows whether tags match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag not in ("meta", "wbr"):
            self.open.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if "href" in found else []
        self.loads += [tag] if tag in ("script", "link", "img", "iframe") or "src" in found else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


def test_the_page_is_whole_and_loads_nothing():
    page = Page(text("html"))
    assert page.open == []
    assert page.loads == []
    assert len(set(page.ids)) == len(page.ids)
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert len(page.links) >= 5 + 2 + 3
    assert 'content="default-src &#x27;none&#x27;' in text("html")


def test_the_page_says_what_matters():
    words = Page(text("html")).words
    for expected in (
        "75 % of the step is ready for TPU",
        "3 findings: 1 error (stops the trace), 1 slow (costs time or memory), 1 note",
        "2 of severity note not shown · 1 in the baseline",
        "Python that needs a traced value",
        "pkg/model.py",
        "if x.sum() > 0:",
        "cell 3, line 9",
        "bad.py: binary",
        "nothing found2",
    ):
        assert expected in words


def test_the_page_shows_code_as_text():
    evil = "<script>alert(1)</script>"
    finding = replace(BRANCH, file=f"{evil}.py", lines=(evil,), message=evil)
    page = Page(text("html", replace(OUTCOME, shown=(finding,), counted=(finding,))))
    assert page.loads == []
    assert page.words.count(evil) >= 3


def test_a_page_without_findings_says_so():
    words = Page(text("html", EMPTY)).words
    assert "No code of a training or sampling step here" in words
    assert "0 findings." in words
    good = Page(text("html", Outcome(functions=3, files=1))).words
    assert "100 % of the step is ready for TPU" in good


def test_the_squares_of_a_large_project_stay_few():
    page = text("html", replace(OUTCOME, functions=100_000))
    assert page.count("<i class") < 2000
    assert "Each square is 67 functions" in page


def test_every_form_is_a_module_and_a_function():
    for form in FORMATS:
        assert isinstance(text(form), str)
