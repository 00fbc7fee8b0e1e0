"""The score of the linter against judged sites: the arithmetic, and the judgements' form."""

import dataclasses

import pytest

from benchmarks import annotated, porter
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
    text = annotated.page({"a/b 123": score(SITES, [finding(1, Severity.ERROR)])}, {})
    assert "| a/b 123 | 4 | 2 | 1.000 | 0.500 | 0.00% |" in text
    assert "- `a.py:2`: r" in text


def test_scores_are_immutable():
    found = score(SITES, [])
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.missed = ()  # pyright: ignore[reportAttributeAccessIssue]


# What a porter must touch.


@pytest.mark.parametrize("name", porter.LISTS)
def test_the_porters_lists_are_well_formed(name: str):
    sites = porter.read_list(name)
    assert len({(one["file"], one["line"]) for one in sites}) == len(sites) > 300
    for one in sites:
        assert one["label"] in (annotated.BREAKS, annotated.HAZARD, annotated.LOOK_ALIKE)
        assert one["reason"]
        assert one["first_sight"] in (None, *(severity.value for severity in porter.ORDER))


def test_what_was_drawn_is_judged():
    drawn = porter.read_drawn()
    for number in porter.SAMPLES:
        found = [one for one in drawn if one["sample"] == number and one["code"] is not None]
        assert len(found) == 60
        assert all(one.get("reason") for one in found if one["label"] == annotated.LOOK_ALIKE)


def test_any_severity_finds_a_line_for_a_porter():
    def touched(line: int, label: str, first: str | None, file: str = "a.py") -> porter.PorterSite:
        return porter.PorterSite(
            file=file, line=line, label=label, pattern="p", reason="r", first_sight=first
        )

    sites = [
        touched(1, "breaks", "error"),
        touched(2, "breaks", None),
        touched(3, "look-alike", None),
        touched(4, "breaks", None, file="run.sh"),
    ]
    found = [
        finding(1, Severity.DEVICE),
        finding(1, Severity.SLOW),
        finding(2, Severity.NOTE),
        finding(3, Severity.DEVICE),
    ]
    now = porter.tally(sites, porter.said(found))
    assert now.breaking == {"slow": 1, None: 1}
    assert (now.recall, [one["line"] for one in now.false]) == (0.5, [3])
    before = porter.tally(sites, lambda site: site["first_sight"])
    assert before.row("a") == "| a | 2 | 1 | 0 | 1 | 0.500 | 0 of 1 |"
