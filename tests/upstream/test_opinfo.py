"""Operators of PyTorch's own test database, as `python -m benchmarks.opinfo` runs all of them."""

import functools
from typing import Any

import pytest

from benchmarks import opinfo
from tpuport.tracing.core.tensor import TracedTensor


@functools.cache
def entries() -> dict[str, Any]:
    """The database by name. To import it takes a second: each process collects all tests."""
    return {opinfo.full_name(entry): entry for entry in opinfo.database()}


@pytest.mark.parametrize(
    "name",
    [
        *("add", "index_select", "cholesky_inverse", "cumsum"),
        *("nn.functional.dropout", "nn.functional.gelu", "view_as_complex"),
    ],
)
def test_an_operator_gives_eagers_values_and_gradients(name: str):
    outcome = opinfo.run(entries()[name], most=2)
    assert outcome.kind == "passes", outcome.findings


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_a_quarter_of_the_database(part: int):
    """Every fourth entry with two samples; docs/opinfo.md has all of them with more."""
    outcomes = [opinfo.run(entries()[name], most=2) for name in sorted(entries())[part::32]]
    wrong = [o for o in outcomes if o.kind not in ("passes", "refused", "not run")]
    assert not wrong
    assert sum(o.kind == "passes" for o in outcomes) > 0.8 * len(outcomes)


def test_the_page_counts_entries_by_their_worst_sample():
    refusal = opinfo.Finding("refused", "TPU203 a size | depends on data", 1)
    fine, wrong = opinfo.Finding("passes", "", 0), opinfo.Finding("wrong value", "off by 1", 3)
    outcomes = [
        opinfo.Outcome("one", [fine, refusal], 60.0),
        opinfo.Outcome("two", [fine], 60.0),
        opinfo.Outcome("three", [fine, wrong]),
    ]
    text = opinfo.page(outcomes, 6)
    assert "Of 3 entries 2 pass or are refused with a reason." in text
    assert "It took 2 minutes." in text
    assert "| `one` | refused | 1 of 2 | refused: TPU203 a size \\| depends on data |" in text
    assert "`two`" not in text


def test_what_differs_is_found(monkeypatch: pytest.MonkeyPatch):
    entry = entries()["nn.functional.gelu"]
    right = entry.op
    monkeypatch.setattr(
        entry, "op", lambda x, **options: right(x if type(x) is not TracedTensor else 2 * x)
    )
    assert opinfo.run(entry, most=1).kind == "wrong value"
