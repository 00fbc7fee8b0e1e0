"""How slow tests of recipes compile."""

from collections.abc import Iterator

import jax
import pytest

_QUICKLY = "jax_disable_most_optimizations"


@pytest.fixture(scope="module")
def compiled_quickly() -> Iterator[None]:
    """Programs that run for a moment are not worth LLVM's time; processes inherit the variable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_QUICKLY.upper(), "1")
        jax.config.update(_QUICKLY, True)
        yield
        jax.config.update(_QUICKLY, False)
