"""Numbers to the last bit are compared of programs that are compiled as users compile them."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def _optimised() -> Iterator[None]:
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
