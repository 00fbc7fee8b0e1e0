"""The baseline: what it knows, what moves past it, what it refuses."""

import json
from pathlib import Path

import pytest

from tpuport.foundation.errors import UsageError
from tpuport.lint.baseline import Baseline
from tpuport.lint.records import Reported
from tpuport.source.rewrite.finding import Severity


def finding(line: int, text: str = "if x:", code: str = "TPU101", file: str = "a.py") -> Reported:
    return Reported(*(file, line, 0, line, 5, code, "Rule", Severity.ERROR, "no"), lines=(text,))


def test_a_finding_stays_known_when_code_above_it_or_its_indentation_moves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "known.json"
    Baseline.of(path, [finding(3)]).write()
    compared = Baseline.read(path).compare([finding(90, "   if  x:")], ["a.py"])
    assert (compared.new, compared.known, compared.gone) == ((), 1, 0)


def test_another_line_rule_or_file_is_new(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    baseline = Baseline.of(tmp_path / "known.json", [finding(3)])
    new = [finding(3, "if y:"), finding(3, code="TPU102"), finding(3, file="b.py")]
    compared = baseline.compare(new, ["a.py", "b.py"])
    assert (list(compared.new), compared.known, compared.gone) == (new, 0, 1)


def test_of_equal_lines_as_many_are_known_as_there_were(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    baseline = Baseline.of(tmp_path / "known.json", [finding(3), finding(4)])
    found = [finding(3), finding(4), finding(5)]
    assert baseline.compare(found, ["a.py"]).new == (finding(5),)
    assert baseline.compare(found[:1], ["a.py"]).gone == 1


def test_what_was_not_looked_at_is_not_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    baseline = Baseline.of(tmp_path / "known.json", [finding(3)])
    assert baseline.compare([], ["b.py"]).gone == 0


def test_the_file_is_ordered_and_free_of_line_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "known.json"
    Baseline.of(path, [finding(9, file="b.py"), finding(7), finding(8)]).write()
    assert json.loads(path.read_text()) == {
        "tpuport-baseline": 1,
        "files": {
            "a.py": [{"code": "TPU101", "rule": "Rule", "line": "if x:", "count": 2}],
            "b.py": [{"code": "TPU101", "rule": "Rule", "line": "if x:", "count": 1}],
        },
    }
    again = path.read_bytes()
    Baseline.of(path, [finding(80), finding(70), finding(9, file="b.py")]).write()
    assert path.read_bytes() == again


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"tpuport-baseline": 2, "files": {}}', '{"tpuport-baseline": 1}',
     '{"tpuport-baseline": 1, "files": {"a.py": [{"code": "TPU101"}]}}'],
)  # fmt: skip
def test_what_is_no_baseline_is_refused(tmp_path: Path, content: str):
    path = tmp_path / "known.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"known\.json is no baseline of tpuport\. What to do: "):
        Baseline.read(path)


def test_a_baseline_that_is_not_there_or_cannot_be_written_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match=r"There is no baseline .*What to do: write one with --wr"):
        Baseline.read(tmp_path / "none.json")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        Baseline.read(tmp_path)
    with pytest.raises(UsageError, match="cannot be written: No such file or directory"):
        Baseline.of(tmp_path / "no/such/folder.json", []).write()
