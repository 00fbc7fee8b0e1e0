"""Files that cannot be linted: one line each, and the rest still linted."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpuport.lint.check import check
from tpuport.lint.records import Checked
from tpuport.lint.sources import MAX_MEGABYTES


def reason(data: bytes) -> str:
    """Why a file with these bytes is not linted."""
    checked = Checked.from_json(check(data, "a.py", {"strict": False})["checked"], "a.py")
    assert checked.findings == ()
    (problem,) = checked.problems
    assert "\n" not in str(problem)
    return problem.reason


BROKEN = {
    "syntax": (b"def f(:\n", "no Python 3 that can be read in line 1: invalid syntax"),
    "python 2": (b"x = 1\nprint 'x'\n", "no Python 3 that can be read in line 2: Missing paren"),
    "indentation": (b"if x:\ny\n", "no Python 3 that can be read in line 2: expected an indented"),
    "null bytes": (b"x = 1\0\n", "binary: it has null bytes, which Python source cannot have"),
    "binary": (b"\x7fELF\x02\x01\x01\0\0", "binary: it has null bytes"),
    "utf-8": (b"x = 1\ny = '\xff'\n", "not utf-8: line 2 has bytes that it does not allow"),
    "utf-8 late": (b"x = 1\n" * 9 + b"# \xe9\n", "not utf-8: line 10 has bytes"),
    "cookie": (b"# coding: ascii\n# \xe9\n", "not ascii: line 2 has bytes that it does not allow"),
    "no codec": (b"# coding: klingon\n", "unknown encoding: klingon"),
    "no text codec": (b"# coding: hex\nx\n", "its encoding hex is no encoding of text"),
    "bom and cookie": (b"\xef\xbb\xbf# coding: latin-1\n", "encoding problem: utf-8"),
    "utf-16": ("x = 1".encode("utf-16"), "binary: it has null bytes"),
    "huge": (b"#" * (MAX_MEGABYTES * 1024 * 1024 + 1), f"larger than {MAX_MEGABYTES} MB"),
    "deep": (b"x = " + b"-" * 50_000 + b"1\n", "nested too deeply"),
    "parentheses": (b"(" * 500 + b")" * 500, "no Python 3 that can be read in line 1: too many"),
    "deep attribute": (b"x" + b".y" * 30_000 + b"\n", "nested too deeply"),
}


@pytest.mark.parametrize(("data", "expected"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_cannot_be_linted_has_a_reason(data: bytes, expected: str):
    assert reason(data).startswith(expected)


STEP = "def forward(x):\n    return x  # é\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n\n",
        STEP.encode(),
        b"\xef\xbb\xbf" + STEP.encode(),
        b"# coding: latin-1\n" + STEP.encode("latin-1"),
        b"#!/usr/bin/python\n# -*- coding: cp1252 -*-\n" + STEP.encode("cp1252"),
        STEP.replace("\n", "\r\n").encode(),
        STEP.replace("\n", "\r").encode(),
        b"\x0cx = 1\n",
        b'x = "\\d"  # an invalid escape warns\n',
        b"x = 1",
    ],
)
def test_a_file_that_python_reads_is_linted(data: bytes):
    checked = Checked.from_json(check(data, "a.py", {"strict": False})["checked"], "a.py")
    assert checked.problems == ()


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
@settings(max_examples=200)
def test_any_bytes_have_an_answer(data: bytes):
    for name in ("a.py", "n.ipynb"):
        answer = json.loads(json.dumps(check(data, name, {"strict": False})))
        Checked.from_json(answer["checked"], name)


def test_one_file_does_not_cost_the_others(project, invoke, branch):
    files = {f"bad_{i}.py": data for i, (data, _) in enumerate(BROKEN.values())}
    project(
        {
            **files,
            "z.py": "import torch\n\ndef forward(x: torch.Tensor):\n    return float(x.sum())\n",
        }
    )
    result = invoke("lint", "--format", "concise", "-q")
    assert result.exit_code == 1
    assert result.stdout.count("\n") == 1
    assert result.stdout.startswith("z.py:4:12: TPU103")
    said = result.stderr.splitlines()
    assert len(said) == len(BROKEN)
    assert all(line.startswith("bad_") for line in said)


def test_a_file_that_cannot_be_linted_fails_the_run_by_itself(project, invoke):
    project({"a.py": "def f(:\n"})
    assert invoke("lint").exit_code == 1
    assert invoke("lint", "--exit-zero").exit_code == 0
