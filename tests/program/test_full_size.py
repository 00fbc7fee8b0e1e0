"""The benchmark of full-size models: a small one goes through it, and its page is up to date."""

import json
import re
from typing import Any

import pytest

from benchmarks import full_size
from benchmarks.full_size_models import Case
from tests.program.small import BATCH, batch, needs_libtpu, on_meta, squared


def small() -> Case:
    """A case that compiles in seconds."""
    options = {"inputs": batch(), "train": squared}
    return Case("Small", f"batch {BATCH}", "v5e-4", lambda: (on_meta(), options), {"fsdp": -1})


@needs_libtpu
def test_a_case_becomes_a_row_and_the_row_a_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(full_size.CASES, "small", small())
    said: list[str] = []
    rows: dict[str, Any] = {}
    full_size.add("small", rows, said.append, quick=True)
    assert said.pop().startswith("small has no row yet")
    full_size.add("small", rows, said.append, quick=False)
    assert said[0].startswith("✔ Small, training step: fits v5e-4")
    row = rows["small"]
    assert json.loads(json.dumps(row)) == row
    assert row["mesh"] == {"fsdp": 4}
    assert sum(row["memory"].values()) == row["peak"] < row["available"]
    assert row["chip_flops"] * row["chips"] == row["product_flops"]
    page = full_size.page(rows.values())
    assert f"| Small | batch {BATCH} | v5e-4, fsdp=4 | yes |" in page
    assert "% | 1 s | ? |" in re.sub(r"\d+ s", "1 s", page)
    assert "| Small, v5e-4 | 0.00 | 1.00 |" in page


@needs_libtpu
def test_what_comes_of_less_effort_is_a_column(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(full_size.CASES, "small", small())
    rows: dict[str, Any] = {}
    full_size.add("small", rows, print, quick=False)
    before = json.dumps(rows)
    full_size.add("small", rows, print, quick=True)
    quick = rows["small"].pop("quick")
    assert json.dumps(rows) == before
    assert quick["peak"] > 0
    rows["small"]["quick"] = quick
    assert re.search(r"s \| \d+ s: 0.0 GiB, \S+ s a step \|", full_size.page(rows.values()))


def test_the_page_shows_what_was_compiled_last():
    rows = json.loads(full_size.RESULTS.read_text(encoding="utf-8"))
    assert list(rows) == [name for name in full_size.CASES if name in rows]
    shown = (full_size.DOCS / "full_size.md").read_text(encoding="utf-8")
    # Versions may be others by now.
    end = "Taken with "
    assert shown.partition(end)[0] == full_size.page(rows.values()).partition(end)[0]
    assert all(row["fits"] and "full scores" not in row["attention"] for row in rows.values())
