"""What several tests of the chat model begin with, and how slow ones compile."""

from collections.abc import Iterator

import jax
import pytest

from tests.recipes.recogdrive.chat_data import Small

_QUICKLY = "jax_disable_most_optimizations"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A small chat model and its data on disk."""
    return Small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def compiled_quickly() -> Iterator[None]:
    """Programs that run for a moment are not worth LLVM's time; processes inherit the variable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_QUICKLY.upper(), "1")
        jax.config.update(_QUICKLY, True)
        yield
        jax.config.update(_QUICKLY, False)
