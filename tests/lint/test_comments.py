"""Comments that ask to ignore findings: where they count, and what is wrong with them."""

import textwrap

import pytest

from tpuport.lint.check import check
from tpuport.lint.comments import find_directives
from tpuport.lint.outcome import decide
from tpuport.lint.records import Checked
from tpuport.lint.settings import Settings

HEAD = "import torch\n\n\ndef forward(x: torch.Tensor):\n"


def lint(body: str, *, name: str = "a.py", **settings) -> list[tuple[int, str]]:
    """Line in the body and code of each finding shown."""
    source = HEAD + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ") + "\n"
    return shown(source, name, **settings)


def shown(source: str, name: str = "a.py", **settings) -> list[tuple[int, str]]:
    from pathlib import Path

    answer = check(source.encode(), name, {"strict": False})
    outcome = decide(
        [Checked.from_json(answer["checked"], name)],
        Settings(root=Path("/"), **settings),
        known=["TPU001", "TPU101", "TPU102", "TPU103", "TPU104"],
    )
    return [(finding.line - 4, finding.code) for finding in outcome.shown]


def messages(comment: str, code: str = "x = x + 1", **settings) -> list[str]:
    """What is said of a comment after a statement."""
    from pathlib import Path

    source = f"{HEAD}    {code}  {comment}\n    return x\n"
    checked = Checked.from_json(
        check(source.encode(), "a.py", {"strict": False})["checked"], "a.py"
    )
    outcome = decide(
        [checked], Settings(root=Path("/"), **settings), known=["TPU001", "TPU101", "TPU103"]
    )
    return [f.message for f in outcome.shown if f.code == "TPU001"]


def test_without_a_comment_there_is_a_finding():
    assert lint("y = float(x.sum())\nreturn y") == [(1, "TPU103")]


@pytest.mark.parametrize(
    "comment",
    [
        "# tpuport: ignore",
        "#tpuport:ignore",
        "# tpuport: ignore[TPU103]",
        "# tpuport: ignore[ tpu103 , TPU101 ]",
        "# noqa: E501 # tpuport: ignore[TPU103] because it is a test",
        "# TPUPORT: IGNORE[TPU103]",
    ],
)
def test_a_comment_on_the_line_counts(comment: str):
    found = lint(f"y = float(x.sum())  {comment}\nreturn y", ignore=("TPU001",))
    assert found == []


def test_a_comment_for_another_code_does_not():
    found = lint("y = float(x.sum())  # tpuport: ignore[TPU101]\nreturn y")
    assert found == [(1, "TPU001"), (1, "TPU103")] or found == [(1, "TPU103"), (1, "TPU001")]


def test_a_comment_within_the_finding_or_at_the_end_of_its_statement_counts():
    within = """
    y = float(
        x.sum()  # tpuport: ignore
    )
    return y
    """
    at_end = """
    y = (
        x +
        float(x.sum())
    )  # tpuport: ignore[TPU103]
    return y
    """
    head = """
    if (
        x.sum() > 0
    ):  # tpuport: ignore[TPU101]
        x = x + 1
    return x
    """
    for body in (within, at_end, head):
        assert lint(body) == []


def test_a_comment_in_the_body_of_a_branch_is_not_about_the_branch():
    body = """
    if x.sum() > 0:
        x = x + 1  # tpuport: ignore
    return x
    """
    assert lint(body) == [(1, "TPU101"), (2, "TPU001")]


def test_a_comment_on_a_line_before_does_not_count():
    body = """
    # tpuport: ignore[TPU103]
    y = float(x.sum())
    return y
    """
    assert lint(body) == [(1, "TPU001"), (2, "TPU103")]


def test_a_string_is_no_comment():
    body = """
    y = float(x.sum()), "# tpuport: ignore"
    return y
    """
    assert lint(body) == [(1, "TPU103")]


def test_a_comment_for_the_whole_file_counts_wherever_it_stands():
    body = "y = float(x.sum())\nif x.sum() > 0:\n    x = x + 1\nreturn x * y"
    assert [code for _, code in lint(body)] == ["TPU103", "TPU101"]
    assert [c for _, c in lint(f"{body}\n# tpuport: ignore-file[TPU103]")] == ["TPU101"]
    assert lint(f"# tpuport: ignore-file\n{body}") == []


# What is wrong with a comment.


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        ("# tpuport: ignore", "`# tpuport: ignore` ignores nothing"),
        ("# tpuport: ignore[TPU101]", "`# tpuport: ignore[TPU101]` ignores nothing"),
        ("# tpuport: ignore-file[TPU101]", "`# tpuport: ignore-file[TPU101]` ignores nothing"),
        (
            "# tpuport: ignore[TPU1O1]",
            "`# tpuport: ignore[TPU1O1]` names TPU1O1, which is no rule's code; did you mean"
            " TPU101?",
        ),
        (
            "# tpuport: ignore[E501]",
            "`# tpuport: ignore[E501]` names E501, which is no rule's code",
        ),
        (
            "# tpuport: ingore[TPU101]",
            "`# tpuport: ingore[TPU101]` is misspelt: write `# tpuport: ignore` or `ignore-file`",
        ),
    ],
)
def test_a_comment_that_does_nothing_is_reported(comment: str, expected: str):
    assert messages(comment) == [expected]


def test_of_several_codes_only_the_idle_one_is_reported():
    said = messages("# tpuport: ignore[TPU101, TPU103]", "y = float(x.sum())")
    assert said == ["`# tpuport: ignore[TPU101, TPU103]` ignores nothing with TPU101"]


def test_a_comment_that_is_needed_is_not_reported():
    assert messages("# tpuport: ignore[TPU103]", "y = float(x.sum())") == []
    assert messages("# tpuport: ignore", "y = float(x.sum())") == []


def test_prose_is_no_misspelt_comment():
    assert messages("# tpuport: the branch is fine") == []
    assert messages("# see tpuport") == []


def test_only_codes_that_are_looked_for_can_be_idle():
    assert messages("# tpuport: ignore[TPU101]", select=("TPU103", "TPU001")) == []
    assert messages("# tpuport: ignore", select=("TPU103", "TPU001")) == []
    assert messages("# tpuport: ignore[TPU101]", ignore=("TPU001",)) == []


def test_a_hidden_finding_makes_a_comment_needed():
    from tpuport.source.rewrite.finding import Severity

    assert messages("# tpuport: ignore", "y = float(x.sum())", severity=Severity.ERROR) == []


def test_text_that_only_the_parser_understands_is_no_reason_to_fail():
    assert find_directives("x = 1  # tpuport: ignore\ny = (\n")[0].ignore.line == 1
