"""What `tpuport` without a command says, and `--json` on the commands that have it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tpuport.cli.app import app

TRAINS = "import net\nfor step in range(3):\n    net.loss().backward()\n"
MODULE = "import torch\n\nclass Net(torch.nn.Module):\n    pass\n"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "No Python file is here"),
        ({"a.py": "x = 1"}, "no module of PyTorch"),
        ({"a.py": "x = 1", "sub/net.py": MODULE}, "Net in sub/net.py is a module"),
        ({"net.py": MODULE, "go.py": TRAINS}, "go.py looks like the script that trains"),
        ({"x/report.json": "{", "go.py": TRAINS}, "go.py looks like the script that trains"),
        (
            {
                "x/report.json": json.dumps(
                    {"outcome": "needs you", "repository": "r", "next_steps": ["entry: \udcffdo"]}
                )
            },
            "entry: \\udcffdo",
        ),
        (
            {"x/report.json": json.dumps({"outcome": "done", "repository": "r", "next_steps": []})},
            "sh x/run.sh",
        ),
    ],
)
def test_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], said: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [])
    assert done.exit_code == 0
    assert said in done.stdout
    assert "tpuport --help" in done.stdout
    assert len(done.stdout.splitlines()) < 8


def test_json_of_commands(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\n\nclass Net(torch.nn.Module):\n    def forward(self, x):\n"
        "        if x.sum() > 0:\n            x = x * 2\n        return x\n"
    )
    before = path.read_text()

    def found(*args: str) -> tuple[int, object]:
        done = CliRunner().invoke(app, [*args, "--json"])
        return done.exit_code, json.loads(done.stdout)

    code, report = found("lint", "--no-cache", str(path))
    assert code == 1
    assert report
    code, report = found("rewrite", "--no-cache", str(path))
    assert code == 1
    assert isinstance(report, dict)
    (file,) = report["files"]
    assert file["changed"]
    assert "-        if x.sum() > 0" in file["diff"]
    assert path.read_text() == before
    code, report = found("rewrite", "--no-cache", "--write", str(path))
    assert code == 0
    assert path.read_text() != before
    assert found("rules")[0] == found("explain", "TPU101")[0] == 0
    done = CliRunner().invoke(app, ["rewrite", "-", "--json"], input=before)
    assert done.exit_code == 2
