"""The documentation: links, tutorials as pages and notebooks, the reference, the site."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "recipes").glob("*/README.md")]
_LINK = re.compile(r"\]\((?!\w+:)(?P<target>[^)\s#]*)(?:#(?P<place>[^)\s]*))?\)")
_CODE = re.compile(r"^(```|~~~).*?^\1[ ]*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def anchors(page: Path) -> set[str]:
    """The places of a page, as GitHub and mkdocs name them."""
    text = _CODE.sub(lambda m: m[0].strip("`") if "\n" not in m[0] else "", page.read_text())
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\]\([^)]*\)", "", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in plain}


def dead_links(page: Path) -> list[str]:
    dead = []
    for match in _LINK.finditer(_CODE.sub("", page.read_text(encoding="utf-8"))):
        target = page.parent / match["target"] if match["target"] else page
        if not target.exists():
            dead.append(f"{page.name}: {match['target']}")
        elif match["place"] and target.suffix == ".md" and match["place"] not in anchors(target):
            dead.append(f"{page.name}: {match['target']}#{match['place']}")
    return dead


def test_links_lead_somewhere(tmp_path: Path) -> None:
    assert [link for page in PAGES for link in dead_links(page)] == []
    page = tmp_path / "page.md"
    page.write_text("# A `b`\n[x](#a-b) [y](#c) [z](none.md) `[w](none)`\n```\n[v](none)\n```\n")
    assert dead_links(page) == ["page.md: #c", "page.md: none.md"]


def test_every_page_of_the_navigation_is_there() -> None:
    def names(node: Any) -> list[str]:
        if isinstance(node, str):
            return [node]
        return [
            n for one in (node.values() if isinstance(node, dict) else node) for n in names(one)
        ]

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    pages = [name for name in names(config["nav"]) if not name.startswith("more/")]
    assert [name for name in pages if not (DOCS / name).is_file()] == []
    assert {"Tutorials", "How-to", "Reference", "Explanations", "Recipes", "Glossary"} <= {
        key for one in config["nav"] if isinstance(one, dict) for key in one
    }


def test_the_readme_has_the_promise_and_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "(docs/promises.md)" in text
    promises = (DOCS / "promises.md").read_text()
    assert "Known exceptions, without an error today" in promises
    assert "## What it will not do" in promises
    setup = text.split("## Set-up")[1].split("## ")[0]
    assert re.findall(r"^```\n(.*?)```", setup, re.MULTILINE | re.DOTALL) == [
        "make demo\nmake test\n"
    ]
    assert len(text.splitlines()) < 150


# Generated pages.


def test_generated_pages_are_what_their_scripts_write() -> None:
    notebooks, reference = module("generate_notebooks"), module("generate_reference")
    for name in notebooks.PAGES:
        page = (DOCS / "tutorials" / f"{name}.md").read_text(encoding="utf-8")
        written = (DOCS / "tutorials" / f"{name}.ipynb").read_text(encoding="utf-8")
        assert written == notebooks.notebook(page), f"{name}.ipynb is stale: make docs"
        cells = json.loads(written)["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        assert code == [block.rstrip("\n") for block in notebooks.blocks(page)]
    assert (DOCS / "reference.md").read_text() == reference.page(), "make docs"


def test_the_reference_has_every_public_name() -> None:
    import tpuport

    text = (DOCS / "reference.md").read_text()
    rooms = {"ops"}  # packages of their own
    missing = [name for name in tpuport.__all__ if f"### tpuport.{name}\n" not in text]
    assert set(missing) == rooms


# The tutorials run.


@pytest.mark.parametrize(
    "name",
    [
        "first_port",
        # Tests of tests/training and tests/program run the same lines.
        pytest.param("training_step", marks=pytest.mark.slow),
        pytest.param("fitting_a_slice", marks=pytest.mark.slow),
    ],
)
def test_a_tutorial_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    notebooks = module("generate_notebooks")
    page = (DOCS / "tutorials" / f"{name}.md").read_text(encoding="utf-8")
    place: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(notebooks.blocks(page)):
        exec(compile(block, f"{name} block {number}", "exec"), place)
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first_port", "training_step", "fitting_a_slice"])
def test_a_notebook_runs(name: str) -> None:
    """`test_a_tutorial_runs` has the same code without a kernel."""
    nbformat = pytest.importorskip("nbformat", reason="needs tpuport[site]")
    client = pytest.importorskip("nbclient", reason="needs tpuport[site]")
    notebook = nbformat.read(DOCS / "tutorials" / f"{name}.ipynb", as_version=4)
    client.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    assert any(cell.get("outputs") for cell in notebook.cells)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """`test_links_lead_somewhere` and the tests of generated pages see most of what breaks it."""
    pytest.importorskip("mkdocs", reason="needs tpuport[site]")
    pytest.importorskip("mkdocstrings", reason="needs tpuport[site]")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert (tmp_path / "tutorials/first_port.html").is_file()
    assert "doc-contents" in (tmp_path / "reference.html").read_text()
