"""`tpuport rewrite`: diff, in place, copies, standard input, and the account of what was left."""

import dataclasses
import json
import os
import stat

import pytest

from tpuport.lint import fixing
from tpuport.rules._apply import rewrite
from tpuport.source.rewrite import rewriter

LEFT = """import torch


def forward(x: torch.Tensor):
    name = f"{float(x.sum()):.2f}"
    return x + len(name)
"""


def test_a_diff_is_the_default_and_changes_nothing(project, invoke, branch):
    root = project({"a.py": branch, "b.py": "x = 1\n"})
    result = invoke("rewrite")
    assert result.exit_code == 1
    assert result.stdout.startswith("--- a/a.py\n+++ b/a.py\n@@ ")
    assert "+import tpuport.ops\n" in result.stdout
    assert result.stderr == "Would rewrite 1 of 2 files with 1 fix (TPU101 1).\n"
    assert (root / "a.py").read_text() == branch
    assert invoke("rewrite", "--diff").stdout == result.stdout


def test_nothing_to_rewrite_exits_with_zero(project, invoke):
    project({"b.py": "x = 1\n"})
    result = invoke("rewrite")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "Would rewrite 0 of 1 file.\n"
    assert invoke("rewrite", ".").exit_code == 0


def test_writing_gives_what_the_rewriter_gives_and_settles(project, invoke, branch):
    root = project({"a.py": branch})
    result = invoke("rewrite", "--write")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "Rewrote 1 of 1 file with 1 fix (TPU101 1).\n"
    assert (root / "a.py").read_text() == rewrite(branch).source
    assert invoke("rewrite", "--write").stderr == "Rewrote 0 of 1 file.\n"


def test_what_is_left_is_said_with_the_reason(project, invoke):
    project({"a.py": LEFT})
    result = invoke("rewrite")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == (
        "a.py:5:15: TPU103 left: it stands inside an f-string\n"
        "Would rewrite 0 of 1 file. Left: 1 finding.\n"
    )
    assert "left:" not in invoke("rewrite", "--ignore", "TPU103").stderr


def test_a_comment_keeps_a_line_as_it_is(project, invoke, branch):
    project({"a.py": branch.replace("> 0:", "> 0:  # tpuport: ignore[TPU101]")})
    result = invoke("rewrite")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "a.py:5:5: TPU101 left: a comment asks to ignore it\n" in result.stderr


def test_an_ignored_line_is_not_moved_into_a_branch(project, invoke, branch):
    inner = "        x = x + float(x.max())  # tpuport: ignore[TPU103]"
    root = project({"a.py": branch.replace("        x = x + 1", inner)})
    result = invoke("rewrite", "--write")
    assert "a.py:5:5: TPU101 left: it encloses line 6, which cannot be rewritten" in result.stderr
    assert inner in (root / "a.py").read_text()


def test_selected_rules_and_unsafe_ones(project, invoke, branch, monkeypatch):
    from tpuport.rules.tensor_branch import TensorBranch
    from tpuport.source.rewrite.finding import Safety

    project({"a.py": branch})
    assert invoke("rewrite", "--select", "TPU103").exit_code == 0
    assert invoke("rewrite", "--ignore", "TPU1").exit_code == 0
    monkeypatch.setattr(TensorBranch, "SAFETY", Safety.UNSAFE)
    refused = invoke("rewrite", "--no-cache")
    assert "TPU101 left: its fix is unsafe and was not asked for" in refused.stderr
    assert invoke("rewrite", "--no-cache", "--unsafe").exit_code == 1


# Writing in place.


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o755])
def test_the_mode_of_a_file_stays(project, invoke, branch, mode: int):
    root = project({"a.py": branch})
    (root / "a.py").chmod(mode)
    invoke("rewrite", "--write")
    assert "tpuport.ops" in (root / "a.py").read_text()
    assert stat.S_IMODE((root / "a.py").stat().st_mode) == mode


def test_a_link_stays_a_link(project, invoke, branch):
    root = project({"real/a.py": branch})
    (root / "link.py").symlink_to("real/a.py")
    invoke("rewrite", "link.py", "--write")
    assert (root / "link.py").is_symlink()
    assert "tpuport.ops" in (root / "real/a.py").read_text()


def test_encoding_mark_and_line_breaks_stay(project, invoke, branch):
    latin = f"# coding: latin-1\n# é\n{branch}"
    root = project(
        {
            "latin.py": latin.encode("latin-1"),
            "mark.py": b"\xef\xbb\xbf# \xc3\xa9\n" + branch.encode(),
            "windows.py": branch.replace("\n", "\r\n").encode(),
        }
    )
    assert invoke("rewrite", "--write").exit_code == 0
    assert (root / "latin.py").read_bytes().startswith(b"# coding: latin-1\n# \xe9\nimport torch\n")
    assert (root / "mark.py").read_bytes().startswith(b"\xef\xbb\xbf# \xc3\xa9\nimport torch\n")
    windows = (root / "windows.py").read_bytes()
    assert b"tpuport.ops" in windows
    assert windows.count(b"\n") == windows.count(b"\r\n")


def test_a_failed_write_leaves_the_file_and_is_said(project, invoke, branch, monkeypatch):
    root = project({"a.py": branch})

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fixing, "write_atomically", fail)
    result = invoke("rewrite", "--write")
    assert result.exit_code == 1
    assert "a.py: not written: No space left on device\n" in result.stderr
    assert (root / "a.py").read_text() == branch


def test_text_that_the_encoding_lacks_is_not_written(project, invoke, branch, monkeypatch):
    real = rewriter.rewrite

    def with_a_snowman(source: str, **more):
        result = real(source, **more)
        return dataclasses.replace(result, source=result.source + "# \N{SNOWMAN}\n")

    monkeypatch.setattr(fixing, "rewrite", with_a_snowman)
    text = f"# coding: ascii\n{branch}"
    root = project({"a.py": text})
    for arguments in (["--write"], ["--out", "out"]):
        result = invoke("rewrite", "a.py", *arguments)
        assert result.exit_code == 1
        assert "a.py: not written: ordinal not in range(128) in ascii\n" in result.stderr
    assert (root / "a.py").read_text() == text
    assert not list((root / "out").rglob("*.py"))


def test_rules_that_do_not_settle_are_a_bug(project, invoke, branch, monkeypatch):
    def fail(*_: object, **__: object):
        raise rewriter.NotSettledError("a.py:5: rewriting does not settle")

    monkeypatch.setattr(fixing, "rewrite", fail)
    project({"a.py": branch})
    result = invoke("rewrite")
    assert result.exit_code == 2
    assert "a.py: a.py:5: rewriting does not settle" in result.stderr


def test_what_cannot_be_read_is_said_and_the_rest_rewritten(project, invoke, branch):
    root = project({"a.py": branch, "b.py": "def f(:\n", "c.py": b"\0"})
    result = invoke("rewrite", "--write")
    assert result.exit_code == 1
    assert "b.py: no Python 3 that can be read in line 1" in result.stderr
    assert "c.py: binary" in result.stderr
    assert "tpuport.ops" in (root / "a.py").read_text()


def test_a_file_that_changes_meanwhile_is_not_overwritten(project, invoke, branch, monkeypatch):
    root = project({"a.py": branch})
    real = rewriter.rewrite

    def and_edit(source: str, **more):
        (root / "a.py").write_text("x = 'edited'\n")
        return real(source, **more)

    monkeypatch.setattr(fixing, "rewrite", and_edit)
    result = invoke("rewrite", "--write", "--no-cache")
    assert result.exit_code == 1
    assert "a.py: not written: the file has changed meanwhile\n" in result.stderr
    assert (root / "a.py").read_text() == "x = 'edited'\n"


def test_a_bug_in_a_fix_costs_one_file(project, invoke, branch, monkeypatch):
    from tpuport.rules.tensor_to_number import TensorToNumber

    def fail(self, node, context):
        raise ZeroDivisionError("oops")

    number = branch.replace(
        "    if x.sum() > 0:\n        x = x + 1\n    return x", "    return int(x.sum())"
    )
    root = project({"a.py": number, "b.py": branch})
    invoke("lint")
    monkeypatch.setattr(TensorToNumber, "fix", fail)
    result = invoke("rewrite", "--write")
    assert result.exit_code == 2
    assert "a.py: internal error, ZeroDivisionError at " in result.stderr
    assert "tpuport.ops" in (root / "b.py").read_text()


# Copies.


def test_copies_keep_their_places_and_the_originals(project, invoke, branch):
    root = project({"pkg/a.py": branch, "pkg/sub/b.py": "x = 1\n"})
    (root / "pkg/sub/b.py").chmod(0o755)
    result = invoke("rewrite", "pkg", "--out", "out")
    assert result.exit_code == 0
    assert result.stderr == "To out: rewrote 1 of 2 files with 1 fix (TPU101 1).\n"
    assert (root / "pkg/a.py").read_text() == branch
    assert (root / "out/pkg/a.py").read_text() == rewrite(branch).source
    assert (root / "out/pkg/sub/b.py").read_text() == "x = 1\n"
    assert stat.S_IMODE((root / "out/pkg/sub/b.py").stat().st_mode) == 0o755


def test_copies_of_files_from_elsewhere_lie_by_their_own_root(project, invoke, branch):
    root = project()
    other = root.parent / "other"
    (other / "deep").mkdir(parents=True)
    (other / "a.py").write_text(branch)
    (other / "deep/b.py").write_text(branch)
    assert invoke("rewrite", str(other), "--out", "out").exit_code == 0
    assert "tpuport.ops" in (root / "out/a.py").read_text()
    assert "tpuport.ops" in (root / "out/deep/b.py").read_text()


def test_copies_do_not_go_over_their_originals(project, invoke, branch):
    root = project({"a.py": branch})
    result = invoke("rewrite", "a.py", "--out", ".")
    assert result.exit_code == 2
    assert "--out . is where the files are. Use --write to change them there." in result.stderr
    assert (root / "a.py").read_text() == branch


def test_a_folder_that_cannot_be_made_is_said(project, invoke, branch):
    project({"a.py": branch, "out": "a file"})
    result = invoke("rewrite", "a.py", "--out", "out")
    assert result.exit_code == 1
    assert "a.py: not written to " in result.stderr


# Wrong calls, standard input.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--diff", "--write"], "--diff, --write and --out exclude each other."),
        (["--write", "--out", "x"], "--diff, --write and --out exclude each other."),
        (
            ["-", "--out", "x"],
            "Standard input goes to standard output, with --write, not to --out.",
        ),
        (["nope.py"], "There is no file or folder nope.py."),
    ],
)
def test_a_wrong_call_exits_with_two(project, invoke, arguments, message: str):
    project({"a.py": "x = 1\n"})
    result = invoke("rewrite", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_standard_input_goes_to_standard_output(project, invoke, branch):
    project()
    shown = invoke("rewrite", "-", "--stdin-filename", "m.py", input=branch)
    assert shown.exit_code == 1
    assert shown.stdout.startswith("--- a/m.py\n+++ b/m.py\n")
    written = invoke("rewrite", "-", "--write", input=branch)
    assert written.exit_code == 0
    assert written.stdout == rewrite(branch).source
    broken = invoke("rewrite", "-", "--write", input="def f(:\n")
    assert (broken.exit_code, broken.stdout) == (1, "def f(:\n")
    assert "that can be read in line 1: invalid syntax" in broken.stderr


def test_a_file_without_a_last_line_break_has_a_diff_that_says_so(project, invoke, branch):
    project({"a.py": branch.rstrip("\n")})
    assert "return x\n\\ No newline at end of file\n" in invoke("rewrite").stdout


def test_the_diff_is_one_that_patch_applies(project, invoke, branch):
    import subprocess

    root = project({"a.py": branch, "sub/b.py": branch + "# é\n"})
    diff = invoke("rewrite").stdout
    done = subprocess.run(
        ["git", "apply", "-p1", "-"], input=diff.encode(), cwd=root, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert (root / "a.py").read_text() == rewrite(branch).source
    assert "tpuport.ops" in (root / "sub/b.py").read_text()


def test_the_account_of_a_notebook_names_its_cell(project, invoke):
    book = {"cells": [{"cell_type": "code", "source": "import torch"}]}
    book["cells"].append({"cell_type": "code", "source": LEFT})
    project({"n.ipynb": json.dumps(book)})
    result = invoke("rewrite")
    assert "n.ipynb:cell 2:5:15: TPU103 left: it stands inside an f-string" in result.stderr


def test_nothing_is_left_behind(project, invoke, branch):
    root = project({"a.py": branch})
    invoke("rewrite", "--write", "--no-cache")
    assert sorted(os.listdir(root)) == [".git", "a.py"]


# By itself the file says that `scale` is the script's.
HELPER = """import torch


def main():
    scale(1)


def scale(x):
    y = torch.relu(x)
    if y.max() > 0:
        y = y + 1
    return y
"""
USER = """import torch

from helper import scale


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        return scale(x)
"""


def test_a_helper_is_rewritten_when_a_step_elsewhere_calls_it(project, invoke):
    root = project({"helper.py": HELPER, "net.py": USER})
    assert invoke("rewrite", "helper.py").exit_code == 0
    assert invoke("rewrite", "--write").exit_code == 0
    assert "tpuport.ops.cond(" in (root / "helper.py").read_text()
    assert "Rewrote 0 of 2 files." in invoke("rewrite", "--write").stderr
    project({"helper.py": HELPER})
    assert invoke("lint", "--fix").exit_code == 0
    assert "tpuport.ops.cond(" in (root / "helper.py").read_text()
