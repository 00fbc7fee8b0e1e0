"""Pages in a real browser: nothing overflows, nothing runs, and the keyboard works.

Needs `playwright` (tpuport[browser]) and a Chromium that is installed: Debian's, or one that the
environment variable CHROMIUM names.
"""

import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tpuport.demo.page import to_page
from tpuport.reports.report import PortReport
from tpuport.repository.report import QUESTIONS, RepositoryReport
from tpuport.repository.stages import StageRecord

CHROMIUM = (
    os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
)
HOSTILE = (
    "<img src=x onerror=document.title='run'>\"'><script>document.title='run'</script>" + "w" * 300
)
SIZES = {"phone": (360, 740), "laptop": (1280, 800)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs tpuport[browser]")
    if CHROMIUM is None:
        pytest.skip("needs a Chromium: apt-get install chromium, or CHROMIUM=/path/to/it")
    with api.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


def port_page() -> str:
    """A report of `tpuport port` with hostile names, long lines and 200 findings."""
    item = {"place": f"{HOSTILE}.py:1:1", "code": "TPU101", "what": HOSTILE, "fix": "by hand"}
    stages = {
        name: StageRecord(name, "failed", "run", HOSTILE, HOSTILE) for name in QUESTIONS.values()
    }
    made = [{"what": HOSTILE, "instead": HOSTILE}]
    check = {"what": HOSTILE, "count": 1, "error": 1.0, "worst": HOSTILE, "limit": 1e-4}
    results: dict[str, dict[str, Any]] = {
        "read": {"todo": [{**item, "line": HOSTILE}] * 200},
        "entry": {
            "candidates": [
                {"path": HOSTILE, "reasons": [HOSTILE], "required": [HOSTILE]}
                | {"launches": [{"place": HOSTILE, "launcher": HOSTILE, "arguments": [HOSTILE]}]}
            ],
            "arguments": {
                "full": [],
                "small": [HOSTILE],
                "changed": [HOSTILE],
                "invented": [HOSTILE],
            },
        },
        "verify": {
            "command": HOSTILE,
            "log": HOSTILE,
            "seen": {"made up": made},
            "verification": {"stages": [{"name": HOSTILE, "checks": [{**check, "passed": False}]}]},
        },
    }
    stages = {name: replace(one, result=results.get(name, {})) for name, one in stages.items()}
    return RepositoryReport(HOSTILE, HOSTILE, stages, {HOSTILE: HOSTILE}).to_html()


def lint_page(tmp_path: Path) -> str:
    """A page of `tpuport lint` with 500 findings and hostile code."""
    from typer.testing import CliRunner

    from tpuport.cli.app import app

    body = "".join(
        f"        if x.sum() > {n}:  # {HOSTILE if n < 3 else ''}\n            x = x + {n}\n"
        for n in range(500)
    )
    source = f"import torch\n\nclass Net(torch.nn.Module):\n    def forward(self, x):\n{body}"
    path = tmp_path / "<img src=x onerror=document.title='run'>.py"
    path.write_text(source)
    out = tmp_path / "lint.html"
    CliRunner().invoke(app, ["lint", "--no-cache", "--format", "html", "-o", str(out), str(path)])
    return out.read_text()


def runs_page(tmp_path: Path) -> str:
    """A page of MAE-DiT's runs with hostile names, wide pictures and curves of many numbers."""
    import json

    import numpy as np

    from recipes.mae_dit.page import write_page
    from recipes.mae_dit.watching import write_grid

    run = tmp_path / HOSTILE.replace("/", "")[:200]
    names = ("loss", "evaluate/FID", HOSTILE, "w" * 300)
    lines = [{"step": n, **dict.fromkeys(names, 1.0 / n)} for n in range(1, 400)]
    for number in (1, 399):
        write_grid(run / "grids" / f"step-{number:06d}.png", np.zeros((32, 64, 256, 3), np.uint8))
    (run / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    measures = tmp_path / "measures.json"
    measures.write_text(json.dumps(dict.fromkeys(names, 1e30)))
    out = tmp_path / "runs.html"
    write_page(out, [run], pictures=[run / "grids" / "step-000001.png"], measures=[measures])
    return out.read_text(encoding="utf-8")


def measurement_page() -> str:
    """A page of `tpuport doctor --measure` with hostile messages and all kinds of rows."""
    from tests.measurement.results import HEALTHY, error, links, outcome
    from tpuport.doctor.versions import TESTED
    from tpuport.measurement.records import FailedJob
    from tpuport.measurement.report import make_report

    failed = (FailedJob(HOSTILE, HOSTILE, HOSTILE), FailedJob("kernel splash", HOSTILE, ""))
    found = outcome(*HEALTHY, *links(8e10, 8e10, 1e9), error(HOSTILE, math.inf), troubles=failed)
    versions = {**TESTED, "libtpu": "w" * 300}
    return make_report(found, versions, has_tpu=True, measured_at=HOSTILE).to_html()


PAGES: dict[str, Callable[[Path], str]] = {
    "port": lambda _: port_page(),
    "lint": lint_page,
    "demo": lambda _: to_page([PortReport(HOSTILE), PortReport("Other")]),
    "runs": runs_page,
    "measurement": lambda _: measurement_page(),
    "report": lambda _: PortReport(HOSTILE).to_html(),
}


@pytest.fixture(scope="module", params=PAGES)
def page_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    file = folder / "page.html"
    file.write_text(PAGES[request.param](folder), encoding="utf-8")
    return file


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows_and_nothing_runs(
    browser: Any, page_file: Path, size: str, scheme: str
) -> None:
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: asked.append(dialog.message))
    page.goto(page_file.as_uri())
    # All that can be opened is open.
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.title() != "run"
    for frame in page.frames:
        assert frame.evaluate("document.querySelectorAll('script').length") == 0
        assert frame.evaluate("document.querySelectorAll('img[src=x]').length") == 0
    # It loads nothing besides itself.
    assert [
        url for url in asked if not url.startswith((page_file.as_uri(), "about:", "data:"))
    ] == []
    text, ground = page.evaluate(
        "(() => { const s = getComputedStyle(document.body); return [s.color, "
        "getComputedStyle(document.documentElement).backgroundColor + s.backgroundColor]; })()"
    )
    assert text not in ground
    page.close()


def test_the_keyboard_reaches_what_can_be_opened(browser: Any, page_file: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(page_file.as_uri())
    wanted = page.evaluate("document.querySelectorAll('summary, a[href], input').length")
    if wanted:
        page.keyboard.press("Tab")
        tag = page.evaluate("document.activeElement.tagName")
        assert tag in ("SUMMARY", "A", "INPUT", "IFRAME")
        if tag == "SUMMARY":
            before = page.evaluate("document.activeElement.parentElement.open")
            page.keyboard.press("Enter")
            assert page.evaluate("document.activeElement.parentElement.open") is not before
    page.close()


def test_it_prints(browser: Any, page_file: Path) -> None:
    page = browser.new_page()
    page.goto(page_file.as_uri())
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.close()


def test_the_test_notices_code_that_runs(browser: Any) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 740})
    page.set_content(f"<p>{HOSTILE}</p>")
    page.wait_for_function("document.title == 'run'")
    assert page.evaluate("document.documentElement.scrollWidth") > 360
    page.close()
