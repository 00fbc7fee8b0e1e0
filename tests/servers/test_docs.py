"""docs/agents.md and docs/editors.md name what there is."""

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tpuport.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("agents.md", "editors.md", "verify_port.md")]


def snippets(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [t for t in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in t]
    assert [t for t in targets if not (page.parent / t).exists()] == []
    assert f"({page.name})" in (ROOT / "docs/index.md").read_text(encoding="utf-8")


def test_the_pattern_of_the_task_reads_what_lint_writes(tmp_path: Path):
    (task,) = snippets(PAGES[1], "json")
    (entry,) = json.loads(task)["tasks"]
    pattern = entry["problemMatcher"]["pattern"]
    source = (
        "import torch\n\n\ndef forward(x: torch.Tensor):\n    if x.sum() > 0:\n        x = -x\n"
    )
    (tmp_path / "model.py").write_text(f"{source}    return x.cuda()\n")
    command = entry["command"].split()[1:]
    lines = CliRunner().invoke(app, [*command, str(tmp_path / "model.py")]).stdout.splitlines()
    found = [re.match(pattern["regexp"], line) for line in lines]
    assert found
    assert all(found), lines
    first = found[0]
    assert first is not None
    assert (first[pattern["line"]], first[pattern["code"]]) == ("5", "TPU101")


def test_the_hooks_exist():
    (config,) = snippets(PAGES[1], "yaml")
    wanted = {hook["id"] for hook in yaml.safe_load(config)["repos"][0]["hooks"]}
    there = {hook["id"] for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    assert wanted <= there


def test_the_entry_for_an_agent_calls_the_command():
    (entry,) = snippets(PAGES[0], "json")
    called = json.loads(entry)["mcpServers"]["tpuport"]
    assert [called["command"], called["args"][0]] == ["tpuport", "mcp"]
    for command in ("mcp", "lsp", "verify-port"):
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
