"""The pages of the rules are what their generator writes, and links on them lead somewhere."""

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from tpuport.lint import settings
from tpuport.lint.catalogue import NO_FIX, CatalogueEntry, catalogue
from tpuport.lint.summary import STEPS
from tpuport.rules._rule import Example
from tpuport.source.rewrite.finding import Severity

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    path = ROOT / "docs/generate_rules.py"
    spec = importlib.util.spec_from_file_location("generate_rules", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_not_stale(generator):
    made = generator.pages()
    for path, text in made.items():
        assert path.exists(), f"{path.name} is missing: run `make docs`"
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is stale: run `make docs`"
    assert set(generator.FOLDER.glob("*.md")) <= set(made), "pages of old rules: run `make docs`"


def test_writing_makes_what_is_checked_and_removes_old_pages(generator, tmp_path, monkeypatch):
    monkeypatch.setattr(generator, "DOCS", tmp_path)
    monkeypatch.setattr(generator, "FOLDER", tmp_path / "rules")
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules/gone.md").touch()
    generator.write()
    made = generator.pages()
    assert {path: path.read_text() for path in tmp_path.rglob("*.md")} == made


def test_links_lead_somewhere(generator):
    handwritten = [ROOT / "docs/lint.md", ROOT / "docs/index.md", ROOT / "README.md"]
    for path in [*generator.pages(), *handwritten]:
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


ENTRY = CatalogueEntry(
    code="TPU999",
    name="SomeThing",
    message="`{call}` in {place} is bad",
    severity=Severity.SILENT,
    fix="close (rtol 1e-06)",
    page="A thing.\n\n## What it does\nFinds.\n\n## References\nhttps://a\nhttps://b",
    examples=(
        Example(before="x = 1", after="x = 2", jit_error="TypeError"),
        Example(before="y = 1", harm="differs", jit_error=None, left="it cannot be"),
    ),
    clean=("z = 1",),
)


def test_a_page_shows_all_that_the_rule_says(generator):
    page = generator.rule_page(ENTRY)
    for expected in (
        "# TPU999 SomeThing\n",
        "| reports | `<call>` in <place> is bad |",
        "| severity | **silent**: gives a wrong result without a word |",
        "| fix | **close (rtol 1e-06)**: the same results within that tolerance |",
        "```python\nx = 1\n```\n\nUnder plain torchax and `jax.jit`: `TypeError`.",
        "`tpuport rewrite` makes of it\n\n```python\nx = 2\n```",
        "Under plain torchax and `jax.jit`: a silently wrong result: it differs from eager",
        "There is no automatic fix: it cannot be.",
        "## What looks alike and stays\n\nNothing is reported here.\n\n```python\nz = 1\n```",
        "# tpuport: ignore[TPU999]",
        "## References\n\n- <https://a>\n- <https://b>\n",
    ):
        assert expected in page
    assert generator.slug(ENTRY) == "some-thing"


def test_every_kind_of_fix_has_words(generator):
    from dataclasses import replace

    for fix, words in ((NO_FIX, "none"), ("exact", "bit for bit"), ("unsafe", "--unsafe")):
        assert words in generator.fix(replace(ENTRY, fix=fix))


def test_the_checklist_has_every_rule_once_in_order(generator):
    page = generator.checklist_page()
    codes = [entry.code for entry in catalogue() if entry.code[:4] in STEPS]
    listed = re.findall(r"- \[ \] \[(TPU\d+)\]", page)
    assert sorted(listed) == codes
    order = [list(STEPS).index(code[:4]) for code in listed]
    assert order == sorted(order)


def test_the_page_about_linting_names_every_option_of_the_configuration():
    text = (ROOT / "docs/lint.md").read_text(encoding="utf-8")
    table = tomllib.loads(re.search(r"```toml\n(.*?)```", text, re.DOTALL)[1])["tool"]["tpuport"]
    assert list(table) == list(settings.KEYS)


def test_the_configuration_shown_is_one_that_works(tmp_path):
    text = (ROOT / "docs/lint.md").read_text(encoding="utf-8")
    config = tmp_path / "pyproject.toml"
    config.write_text(re.search(r"```toml\n(.*?)```", text, re.DOTALL)[1])
    assert settings.load_settings(config, start=tmp_path).exclude == ("third_party",)


def test_the_hooks_call_options_that_exist():
    from typer.testing import CliRunner

    from tpuport.cli.app import app

    text = (ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
    entries = re.findall(r"entry: tpuport (\w+) (.*)", text)
    assert [command for command, _ in entries] == ["lint", "rewrite"]
    for command, options in entries:
        shown = CliRunner().invoke(app, [command, "--help"]).stdout
        assert all(option in shown for option in options.split())
