"""The decode program of a large model reads its weights and its cache, and little more."""

import pytest

from tests.program.small import needs_libtpu


# The faster tests are in cost/test_hlo.py, on programs of a few lines.
@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("batch", [1, 32])
def test_a_token_of_a_large_llama_is_near_the_bound_of_memory(batch):
    from benchmarks import generation_ahead

    found = generation_ahead.row(1, "v6e-1", batch, "tensor_parallel")
    assert 1 <= float(found.rpartition("|")[2]) < 1.3, found
