"""The benchmark of a quantized policy measures each way that there is, and products of integers."""

import pytest

from benchmarks import quantized_policy as benchmark


@pytest.mark.slow
def test_ways_and_products_are_measured_without_the_fork():
    """All that is run here is run by tests of `tpuport.quantize` and of the recipe."""
    found = benchmark.ways(benchmark.SMALL, steps=2, checkout=None)
    assert list(found) == [*benchmark.SCHEMES, benchmark.FLOAT]
    lines = benchmark.policy_lines(found, rounds=2, seconds=0.0)
    errors = {row.split(" | ")[0].strip("| "): row.split(" | ")[-1] for row in lines[2:]}
    assert errors.keys() == found.keys()
    assert float(errors["tpuport, w8a8"].strip("| ")) < 0.05
    assert [len(line.split("|")) for line in benchmark.product_lines(2, 0.0)] == [6] * 5
