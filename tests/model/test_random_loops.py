"""Random loops that grow, write and append: each is eager PyTorch's, or refused."""

import os
from pathlib import Path

import pytest

from benchmarks.whole_programs import loops
from benchmarks.whole_programs.page import read, write
from tests.exactness.test_whole_programs import check_programs

FEW, MORE = 4, int(os.environ.get("TPUPORT_FUZZ", "200"))


def test_random_loops_are_eagers(short: None, tmp_path: Path):
    check_programs(range(FEW), tmp_path, loops.program)


# The fast sibling is the one above.
@pytest.mark.slow
def test_many_random_loops_are_eagers(short: None, tmp_path: Path):
    check_programs(range(FEW, FEW + MORE), tmp_path, loops.program)


def test_each_part_of_the_page_keeps_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page, log = tmp_path / "page.md", tmp_path / "log"
    monkeypatch.setattr("benchmarks.whole_programs.page.PAGE", page)
    page.write_text("# Old\n")
    log.write_text('{"seed": 3, "kind": "passes", "calls": 2}\n')
    write(read(log), "one", loops=True)
    write(read(log), "two", loops=False)
    assert page.read_text().startswith("# Random programs")
    assert "1 programs on two" in page.read_text()
    assert "1 loops on one; 2 calls" in page.read_text()
