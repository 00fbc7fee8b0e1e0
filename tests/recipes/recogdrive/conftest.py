"""What several tests of the chat model begin with."""

import pytest

from tests.recipes.recogdrive.chat_data import Small


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A small chat model and its data on disk."""
    return Small(tmp_path_factory.mktemp("small"))
