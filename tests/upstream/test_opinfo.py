"""Operators of PyTorch's own test database, as `python -m benchmarks.opinfo` runs all of them."""

import pytest

from benchmarks import opinfo
from tpuport.tracing.core.tensor import TracedTensor

ENTRIES = {opinfo.full_name(entry): entry for entry in opinfo.database()}


@pytest.mark.parametrize(
    "name",
    [
        *("add", "index_select", "cholesky_inverse", "cumsum"),
        *("nn.functional.dropout", "nn.functional.gelu", "view_as_complex"),
    ],
)
def test_an_operator_gives_eagers_values_and_gradients(name: str):
    outcome = opinfo.run(ENTRIES[name], most=2)
    assert outcome.kind == "passes", outcome.findings


def test_what_differs_is_found(monkeypatch: pytest.MonkeyPatch):
    entry = ENTRIES["nn.functional.gelu"]
    right = entry.op
    monkeypatch.setattr(
        entry, "op", lambda x, **options: right(x if type(x) is not TracedTensor else 2 * x)
    )
    assert opinfo.run(entry, most=1).kind == "wrong value"
