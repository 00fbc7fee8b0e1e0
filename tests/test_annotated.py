"""The score of the linter against judged sites: the arithmetic, and the judgements' form."""

import dataclasses

import pytest

from benchmarks import annotated
from benchmarks.annotated import Site, score
from tpuport.source.rewrite.finding import Finding, Severity


def site(line: int, label: str) -> Site:
    return Site(file="a.py", line=line, label=label, pattern="p", reason="r")


def finding(line: int, severity: Severity, file: str = "a.py") -> Finding:
    return Finding(file, line, 0, line, 1, "TPU101", "m", severity, "R")


SITES = [site(1, "breaks"), site(2, "breaks"), site(3, "hazard"), site(4, "look-alike")]


def test_errors_are_held_against_the_judgements():
    found = score(
        SITES,
        [
            finding(1, Severity.ERROR),
            finding(1, Severity.SLOW),
            finding(3, Severity.ERROR),
            finding(4, Severity.NOTE),
            finding(9, Severity.SILENT),
            finding(2, Severity.ERROR, file="other.py"),
        ],
    )
    assert found.errors == {"breaks": 1, "hazard": 1}
    assert found.others == {"not judged": 1}
    assert [missed["line"] for missed in found.missed] == [2]
    assert (found.precision, found.recall, found.false_alarms) == (0.5, 0.5, 0.0)


def test_any_finding_on_a_look_alike_is_a_false_alarm():
    assert score(SITES, [finding(4, Severity.SLOW)]).false_alarms == 1.0
    empty = score([], [])
    assert (empty.precision, empty.recall, empty.false_alarms) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize("name", annotated.REPOSITORIES)
def test_the_judgements_are_well_formed(name: str):
    sites = annotated.read_sites(name)
    assert len(sites) > 150
    assert len({(one["file"], one["line"]) for one in sites}) == len(sites)
    for one in sites:
        assert one["label"] in (annotated.BREAKS, annotated.HAZARD, annotated.LOOK_ALIKE)
        assert one["reason"]
        assert one["line"] > 0
    labels = {one["label"] for one in sites}
    assert len(labels) == 3


def test_the_page_shows_scores_and_what_was_missed():
    text = annotated.page({"a/b 123": score(SITES, [finding(1, Severity.ERROR)])})
    assert "| a/b 123 | 4 | 2 | 1.000 | 0.500 | 0.00% |" in text
    assert "- `a.py:2`: r" in text


def test_scores_are_immutable():
    found = score(SITES, [])
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.missed = ()  # pyright: ignore[reportAttributeAccessIssue]
