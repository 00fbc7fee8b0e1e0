"""`tpuport lint`: options, exit codes, configuration, standard input, in the project's folder."""

import json
import os
import stat
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tpuport.cli.app import app

BROKEN = "def f(:\n"


def codes(result) -> list[str]:
    """The codes in a concise output."""
    return [line.split(": ")[1].split()[0] for line in result.stdout.splitlines()]


@pytest.fixture
def lint(invoke):
    """Runs `lint` with concise output and no summary."""
    return lambda *arguments, **more: invoke(
        "lint", "--format", "concise", "-q", *arguments, **more
    )


def test_findings_exit_with_one_and_none_with_zero(project, lint, branch):
    project({"a.py": branch, "b.py": "x = 1\n"})
    result = lint()
    assert (result.exit_code, result.stderr) == (1, "")
    assert result.stdout == (
        "a.py:5:5: TPU101 [*] error: Python branches on `x.sum() > 0`, which has no value while"
        " the program is traced\n"
    )
    assert lint("b.py").exit_code == 0
    assert lint("--exit-zero").exit_code == 0
    assert codes(lint("--exit-zero")) == ["TPU101"]


def test_an_empty_folder_is_said_and_no_error(project, lint):
    project()
    result = lint()
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "No Python files or notebooks there.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope.py"], "There is no file or folder nope.py."),
        (["--select", "TPU1O1"], "There is no rule TPU1O1. Did you mean TPU1"),
        (["--ignore", "E5"], "There is no rule E5."),
        (["--config", "no.toml"], "There is no configuration file no.toml."),
        (["--config", "no.toml", "--isolated"], "--config and --isolated exclude each other."),
        (["--baseline", "no.json"], "There is no baseline no.json."),
        (["--statistics", "--format", "sarif"], "does not go with sarif."),
        (["-", "a.py"], "`-` is standard input and goes with no other path."),
        (["-", "--fix"], "For standard input: tpuport rewrite - --write"),
        (["-o", "no/such/file"], "no/such/file cannot be written: No such file or directory."),
        (["--severity", "loud"], "loud"),
        (["--format", "xml"], "xml"),
    ],
)
def test_a_wrong_call_exits_with_two_and_says_why(project, invoke, arguments, message):
    project({"a.py": "x = 1\n"})
    result = invoke("lint", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_bug_in_a_rule_exits_with_two_even_with_exit_zero(project, lint, monkeypatch):
    from tpuport.rules.tensor_branch import TensorBranch

    def fail(self, node, context):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(TensorBranch, "visit_If", fail)
    project({"a.py": "if x:\n    pass\n", "b.py": BROKEN})
    result = lint("--exit-zero", "--no-cache")
    assert result.exit_code == 2
    first, second = result.stderr.splitlines()
    assert first.startswith("a.py: internal error, ZeroDivisionError at test_lint_command.py:")
    assert second.startswith("b.py: no Python 3 that can be read in line 1")


def test_no_processes_are_a_wrong_call(project):
    project({"a.py": "x = 1\n"})
    result = CliRunner().invoke(app, ["lint", "--jobs", "0"])
    assert result.exit_code == 2
    assert "'--jobs'" in result.stderr


# What is shown.


def test_select_and_ignore(project, lint, branch):
    project({"a.py": branch.replace("return x", "return float(x.sum())")})
    assert codes(lint()) == ["TPU101", "TPU103"]
    assert codes(lint("--select", "TPU103")) == ["TPU103"]
    assert codes(lint("--ignore", "TPU103")) == ["TPU101"]
    assert codes(lint("--select", "tpu1", "--ignore", "TPU10,TPU2")) == []


def test_a_mild_finding_is_counted_and_shown_when_asked_for(project, invoke, branch, monkeypatch):
    from tpuport.rules.tensor_branch import TensorBranch
    from tpuport.source.rewrite.finding import Severity

    monkeypatch.setattr(TensorBranch, "SEVERITY", Severity.NOTE)
    project({"a.py": branch})
    quiet = invoke("lint", "--no-cache")
    assert quiet.exit_code == 0
    assert "Nothing found in 1 file.\n1 finding of severity note not shown" in quiet.stdout
    loud = invoke("lint", "--no-cache", "--severity", "note")
    assert loud.exit_code == 1
    assert "TPU101 [*] note: " in loud.stdout


def test_an_unused_comment_is_shown_and_counts(project, lint):
    project({"a.py": "x = 1  # tpuport: ignore\n"})
    result = lint("--severity", "error")
    assert result.exit_code == 1
    assert codes(result) == ["TPU001"]
    assert lint("--ignore", "TPU001").exit_code == 0


def test_strict_finds_more(project, lint):
    project(
        {"a.py": "def forward(self, x):\n    if helper(x):\n        pass\n    return x.sum()\n"}
    )
    assert codes(lint()) == []
    assert codes(lint("--strict")) == ["TPU101"]
    assert codes(lint()) == []


def test_statistics_and_the_other_forms_reach_the_output(project, invoke, branch):
    project({"a.py": branch})
    assert "TPU101  error   TensorBranch  1 fixable" in invoke("lint", "--statistics").stdout
    assert json.loads(invoke("lint", "--format", "json").stdout)["files"] == 1
    assert json.loads(invoke("lint", "--format", "sarif").stdout)["version"] == "2.1.0"
    assert invoke("lint", "--format", "github").stdout.startswith("::error title=tpuport TPU101,")
    assert invoke("lint", "--format", "html").stdout.startswith("<!doctype html>")


def test_output_goes_to_a_file_without_colour(project, invoke, branch, monkeypatch):
    root = project({"a.py": branch})
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = invoke("lint", "--output-file", "out.txt")
    assert (result.exit_code, result.stdout) == (1, "")
    text = (root / "out.txt").read_text(encoding="utf-8")
    assert text.startswith("TPU101 [*] error: ")
    assert "\x1b" not in text


def test_colour_follows_the_environment(project, invoke, branch, monkeypatch):
    project({"a.py": branch})
    assert "\x1b" not in invoke("lint").stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[31" in invoke("lint").stdout


# Configuration.


def test_the_configuration_counts_and_the_command_line_wins(project, lint, branch):
    project({"a.py": branch, "pyproject.toml": '[tool.tpuport]\nignore = ["TPU101"]\n'})
    assert codes(lint()) == []
    assert codes(lint("--select", "TPU101")) == ["TPU101"]
    assert codes(lint("--isolated")) == ["TPU101"]


def test_the_configuration_is_that_of_the_files(project, lint, branch):
    project(
        {
            "other/pyproject.toml": '[tool.tpuport]\nignore = ["TPU101"]\n',
            "other/a.py": branch,
            "b.py": branch,
        }
    )
    assert codes(lint("other")) == []
    assert codes(lint("other/a.py", "b.py")) == ["TPU101", "TPU101"]


def test_a_named_configuration_counts(project, lint, branch):
    project({"a.py": branch, "ci.toml": '[tool.tpuport]\nper-file-ignores = {"a.py" = ["TPU1"]}\n'})
    assert codes(lint("--config", "ci.toml")) == []
    assert codes(lint()) == ["TPU101"]


def test_a_wrong_configuration_is_a_wrong_call(project, lint):
    project({"pyproject.toml": "[tool.tpuport]\nselct = []\n"})
    result = lint()
    assert result.exit_code == 2
    assert "has no option `selct`. Did you mean select?" in result.stderr


# Standard input.


def test_standard_input_goes_by_its_name(project, lint, branch):
    project({"pyproject.toml": '[tool.tpuport]\nper-file-ignores = {"gen/*" = ["ALL"]}\n'})
    result = lint("-", input=branch)
    assert result.exit_code == 1
    assert result.stdout.startswith("stdin.py:5:5: TPU101")
    named = lint("-", "--stdin-filename", "pkg/m.py", input=branch)
    assert named.stdout.startswith("pkg/m.py:5:5: TPU101")
    assert lint("-", "--stdin-filename", "gen/m.py", input=branch).exit_code == 0
    assert lint("-", input=BROKEN).stderr.startswith("stdin.py: no Python 3 that can be read")
    book = json.dumps({"cells": [{"cell_type": "code", "source": branch}]})
    cell = lint("-", "--stdin-filename", "n.ipynb", input=book)
    assert cell.stdout.startswith("n.ipynb:cell 1:5:5: TPU101")


def test_standard_input_of_an_excluded_path_is_left_out_if_forced(project, lint, invoke, branch):
    project()
    given = ("-", "--stdin-filename", "build/a.py")
    assert lint(*given, input=branch).exit_code == 1
    assert lint(*given, "--force-exclude", input=branch).exit_code == 0
    assert invoke("rewrite", *given, "--force-exclude", input=branch).stdout == ""
    kept = invoke("rewrite", *given, "--force-exclude", "--write", input=branch)
    assert (kept.exit_code, kept.stdout) == (0, branch)


# The baseline.


def test_a_baseline_hides_what_it_knows_and_nothing_new(project, lint, invoke, branch):
    root = project({"a.py": branch})
    written = lint("--write-baseline", "--baseline", "known.json")
    assert (written.exit_code, written.stdout) == (0, "")
    assert written.stderr == "Wrote 1 finding to known.json.\n"
    assert lint("--baseline", "known.json").exit_code == 0
    (root / "a.py").write_text(branch.replace("return x", "return float(x.sum())"))
    assert codes(lint("--baseline", "known.json")) == ["TPU103"]
    (root / "a.py").write_text("x = 1\n")
    end = invoke("lint", "--baseline", "known.json").stdout
    assert "1 finding of the baseline no longer found; --write-baseline drops them." in end


def test_the_baseline_of_the_configuration_is_used_and_written(project, lint, branch):
    root = project({"a.py": branch, "pyproject.toml": '[tool.tpuport]\nbaseline = "k.json"\n'})
    assert lint().exit_code == 2
    assert lint("--write-baseline").exit_code == 0
    assert (root / "k.json").exists()
    assert lint().exit_code == 0


def test_a_baseline_without_a_name_goes_beside_the_configuration(project, lint, branch):
    root = project({"a.py": branch})
    assert "tpuport-baseline.json" in lint("--write-baseline").stderr
    assert (root / "tpuport-baseline.json").exists()


# Fixing.


def test_fix_rewrites_and_reports_what_is_left(project, lint, branch):
    left = "def step(x: torch.Tensor):\n    return f'{float(x.sum())}'\n"
    root = project({"a.py": branch, "b.py": f"import torch\n\n\n{left}", "c.py": "x = 1\n"})
    before = (root / "b.py").read_text()
    result = lint("--fix")
    assert "tpuport.ops.cond(" in (root / "a.py").read_text()
    assert (root / "b.py").read_text() == before
    assert codes(result) == ["TPU103"]
    assert result.exit_code == 1


def test_fix_keeps_to_selected_rules_and_comments(project, lint, branch):
    ignored = branch.replace("> 0:", "> 0:  # tpuport: ignore[TPU101]")
    root = project({"a.py": branch, "b.py": ignored})
    assert lint("--fix", "--select", "TPU103").exit_code == 0
    assert (root / "a.py").read_text() == branch
    assert lint("--fix", "b.py").exit_code == 0
    assert (root / "b.py").read_text() == ignored


def test_fix_says_what_could_not_be_written(project, lint, branch, monkeypatch):
    root = project({"a.py": branch})
    (root / "a.py").chmod(0o444)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    result = lint("--fix")
    assert result.stderr == "a.py: not written: the file is read-only\n"
    assert result.exit_code == 1
    assert stat.S_IMODE((root / "a.py").stat().st_mode) == 0o444


# As a command of its own.


def test_the_cache_lies_beside_the_configuration_and_is_used(project, lint, branch):
    root = project({"pyproject.toml": "[tool.tpuport]\n", "sub/a.py": branch})
    lint("sub", "--no-cache")
    assert not (root / ".tpuport_cache").exists()
    first = lint("sub")
    assert len(list(root.glob(".tpuport_cache/*/*/*.json"))) == 2  # the file and the list of codes
    assert lint("sub").stdout == first.stdout


def test_a_kept_answer_needs_no_rules(project, branch):
    """What makes a warm run fast: neither rules nor inference are even imported."""
    project({"a.py": branch})
    code = """
import sys
from tpuport.cli.app import app
try:
    app(["lint", "--format", "concise"])
except SystemExit as end:
    loaded = [name for name in sys.modules if name.startswith("tpuport.rules.")]
    print(end.code, *loaded)
"""
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert "tpuport.rules.tensor_branch" in runs[0].stdout
    assert runs[1].stdout.splitlines()[-1] == "1"


def test_many_files_are_linted_by_several_processes(project, branch):
    padding = "# a long comment\n" * 1000
    project({f"m{number:02}.py": f"{branch}# {number}\n{padding}" for number in range(40)})
    start = [sys.executable, "-c", "from tpuport.cli.app import app; app()"]
    command = [*start, "lint", "--format", "concise", "-q"]
    results = [
        subprocess.run([*command, "--no-cache", "--jobs", jobs], capture_output=True, text=True)
        for jobs in ("1", "2")
    ]
    assert results[0].stdout == results[1].stdout
    assert results[0].returncode == results[1].returncode == 1
    assert results[0].stdout.count("\n") == 40


def test_file_names_that_are_no_text_are_shown(project, lint, branch):
    root = project()
    name = os.fsencode(root) + b"/\xff.py"
    try:
        with open(name, "w") as file:
            file.write(branch)
    except OSError:
        pytest.skip("this file system has text for names only")
    result = lint()
    assert result.exit_code == 1
    assert result.stdout.startswith("\\udcff.py:5:5: TPU101")


def test_a_package_for_cuda_may_import_itself(project, invoke):
    files = {
        "mamba_ssm/__init__.py": "",
        "tools/a/b/use.py": "import mamba_ssm\nimport flash_attn\n",
    }
    project(files)
    shown = invoke("lint", "--no-cache", "--format", "concise", ".")
    assert "`flash_attn` needs CUDA" in shown.stdout
    assert "`mamba_ssm` needs CUDA" not in shown.stdout


def test_host_code_for_cuda_is_in_the_summary(project, invoke):
    script = (
        "import argparse\n\nparser = argparse.ArgumentParser()\n"
        'parser.add_argument("--device", default="cuda")\n'
        'parser.add_argument("--backend", default="nccl")\n'
    )
    project({"train.py": script})
    shown = invoke("lint", "--no-cache")
    assert shown.exit_code == 0
    assert "Host code for CUDA: 2 lines in 1 file; `tpuport run` answers" in shown.stdout
    assert "  train.py: 4, 5\n" in shown.stdout
    listed = invoke("lint", "--no-cache", "--severity", "device", "--format", "concise")
    assert listed.exit_code == 1
    assert 'train.py:4:33: TPU519 device: `default="cuda"`: a device that' in listed.stdout
