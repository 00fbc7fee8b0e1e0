"""Notebooks: which lines are Python, where findings are, and writing them back."""

import json
from typing import Any

import pytest

from tpuport.foundation.errors import UsageError
from tpuport.lint.check import check
from tpuport.lint.notebooks import marked, marked_place, read_notebook, write_notebook
from tpuport.lint.records import Checked

STEP = "def forward(x: torch.Tensor):\n    if x.sum() > 0:\n        x = x + 1\n    return x"


def notebook(*cells: str | tuple[str, str], language: str = "python", **form: Any) -> str:
    """The JSON of a notebook; a cell is code, or a pair of type and source."""
    made = []
    for cell in cells:
        kind, source = cell if isinstance(cell, tuple) else ("code", cell)
        made.append({"cell_type": kind, "source": source.splitlines(keepends=True)})
    content = {"cells": made, "metadata": {"language_info": {"name": language}}, "nbformat": 4}
    return json.dumps(content, **{"indent": 1, "ensure_ascii": False, **form}) + "\n"


def lint(text: str) -> Checked:
    return Checked.from_json(
        check(text.encode(), "n.ipynb", {"strict": False})["checked"], "n.ipynb"
    )


def test_findings_name_cell_and_line():
    checked = lint(notebook("import torch\n", ("markdown", "# Title"), f"y = 1\n\n{STEP}"))
    (finding,) = checked.findings
    assert finding.place == "n.ipynb:cell 3:4:5"
    assert finding.lines == ("    if x.sum() > 0:",)
    assert finding.end_line == 4


def test_a_comment_in_a_cell_counts_and_an_idle_one_has_its_place():
    ignored = STEP.replace("> 0:", "> 0:  # tpuport: ignore")
    checked = lint(notebook("import torch", ignored, "y = 1  # tpuport: ignore"))
    assert [finding.ignored for finding in checked.findings] == [(0,)]
    assert [(ignore.cell, ignore.line) for ignore in checked.ignores] == [(2, 2), (3, 1)]


@pytest.mark.parametrize(
    "line",
    [
        "%matplotlib inline",
        "!pip install torch",
        "?torch.nn",
        "torch.nn?",
        "torch.nn??",
        "    !ls",
        "files = !ls",
        "out = %timeit f()",
        "!echo a \\\n  b",
        "%%time",
    ],
)
def test_lines_that_ipython_reads_are_no_python(line: str):
    indented = line.startswith(" ")
    head = "if True:\n    pass\n" if indented else ""
    checked = lint(notebook("import torch", f"{head}{line}\n{'' if indented else STEP}"))
    assert checked.problems == ()
    assert len(checked.findings) == (0 if indented else 1)


def test_python_that_looks_like_a_magic_stays():
    book = read_notebook(notebook("x = (7\n% 2)\ny = '''\n!no\n'''"))
    assert book.text == "x = (7\n% 2)\ny = '''\n!no\n'''\n"


def test_cells_of_another_language_are_left_out():
    checked = lint(notebook("import torch", "%%bash\nif [ -f x ]; then ls; fi", STEP))
    assert checked.problems == ()
    assert [finding.cell for finding in checked.findings] == [3]


def test_a_cell_that_does_not_parse_is_reported_and_the_others_linted():
    checked = lint(notebook("import torch", "def f(:", STEP))
    assert [finding.cell for finding in checked.findings] == [3]
    (problem,) = checked.problems
    assert str(problem).startswith("n.ipynb: cell 2 is no Python that can be read, line 1: ")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "no notebook: its JSON is broken in line 1"),
        ("[]", "no notebook of format 4: it has no list of cells"),
        ('{"worksheets": []}', "no notebook of format 4: it has no list of cells"),
        ('{"cells": [1]}', "no notebook of format 4: a cell is no object"),
        ("[" * 100_000, "no notebook: its JSON is nested too deeply"),
        (notebook("x <- 1", language="R"), "a notebook in r, not in Python"),
    ],
)
def test_what_is_no_notebook_is_reported_in_one_line(text: str, reason: str):
    (problem,) = lint(text).problems
    assert problem.reason == reason


def test_a_notebook_with_nothing_in_it_has_no_findings():
    assert lint('{"cells": []}').findings == ()
    assert lint(notebook(("markdown", "hi"), "")).findings == ()


# Writing.


def rewritten(project, invoke, text: str) -> tuple[Any, str]:
    root = project({"n.ipynb": text})
    result = invoke("rewrite", "n.ipynb", "--write")
    return result, (root / "n.ipynb").read_text(encoding="utf-8")


@pytest.mark.parametrize("form", [{}, {"indent": 2}, {"indent": "\t"}, {"ensure_ascii": True}])
def test_only_the_lines_that_change_change(project, invoke, form):
    cells = ("%pip install x\nimport torch", ("markdown", "# Tïtle"), f"!ls\n{STEP}\n", "print(1)")
    before = notebook(*cells, **form)
    result, after = rewritten(project, invoke, before)
    assert result.exit_code == 0, result.output
    old, new = json.loads(before), json.loads(after)
    sources = ["".join(cell["source"]) for cell in new["cells"]]
    assert sources[0] == "%pip install x\nimport torch\nimport tpuport.ops"
    assert sources[2].startswith("!ls\ndef forward(x: torch.Tensor):\n    def if_true(x):\n")
    assert [cell for i, cell in enumerate(new["cells"]) if i in (1, 3)] == [
        cell for i, cell in enumerate(old["cells"]) if i in (1, 3)
    ]
    kept = set(before.splitlines()) - set(after.splitlines())
    assert all("torch" in line or "x" in line for line in kept)
    again = invoke("rewrite", "n.ipynb", "--write")
    assert "Rewrote 0 of 1 file." in again.stderr


def test_a_notebook_with_a_string_for_a_cell_keeps_it(project, invoke):
    content = json.loads(notebook(f"import torch\n{STEP}"))
    content["cells"][0]["source"] = "".join(content["cells"][0]["source"])
    _, after = rewritten(project, invoke, json.dumps(content, indent=1) + "\n")
    source = json.loads(after)["cells"][0]["source"]
    assert isinstance(source, str)
    assert "tpuport.ops.cond" in source


def test_json_that_would_come_back_otherwise_is_refused(project, invoke):
    before = notebook(f"import torch\n{STEP}").replace('"nbformat": 4', '"nbformat":  4')
    result, after = rewritten(project, invoke, before)
    assert after == before
    assert result.exit_code == 1
    assert (
        "n.ipynb: not rewritten: its JSON is laid out in a way that writing would change"
        in result.stderr
    )


BOOK = notebook("%pip install x\nimport torch\n!ls", "", ("markdown", "hi"), f"{STEP}\n\n", "x = 1")


def test_a_module_that_did_not_change_gives_the_same_notebook():
    book = read_notebook(BOOK)
    assert write_notebook(BOOK, book, marked(book)) == BOOK


def test_places_in_the_marked_module_are_places_in_cells():
    book = read_notebook(BOOK)
    lines = marked(book).split("\n")
    assert marked_place(book, lines.index("    if x.sum() > 0:") + 1) == (4, 2)
    assert marked_place(book, lines.index("x = 1") + 1) == (5, 1)
    assert book.place(book.text.split("\n").index("x = 1") + 1) == (5, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("# tpuport: start of cell 5\n", ""), "the fixes move code from one cell of it into anot"),
        (("  # tpuport: kept line 1.2", ""), "a fix removes a line of cell 1 that IPython reads"),
    ],
)
def test_what_would_lose_a_cell_or_a_line_is_refused(change: tuple[str, str], message: str):
    book = read_notebook(BOOK)
    text = marked(book)
    assert change[0] in text
    with pytest.raises(UsageError, match=f"not rewritten: {message}"):
        write_notebook(BOOK, book, text.replace(*change))
