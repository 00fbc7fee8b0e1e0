"""docs/diagnosis.md says what the causes say."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tpuport.diagnosis.explain import find_causes

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """The script that writes the page."""
    spec = importlib.util.spec_from_file_location(
        "generate_diagnosis", ROOT / "docs/generate_diagnosis.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_not_stale(generator: ModuleType):
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), "run `make docs`"


def test_every_cause_is_on_it_and_its_links_lead_somewhere(generator: ModuleType):
    page = generator.page()
    for name, cause in find_causes().items():
        assert f"\n## {name}\n" in page
        for code in cause.RULES:
            target = generator.link(code).partition("(")[2].rstrip(")")
            assert (ROOT / "docs" / target).exists(), target


def test_it_is_listed():
    assert "(diagnosis.md)" in (ROOT / "docs/index.md").read_text(encoding="utf-8")
