"""What the tests of recordings share."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def only_new_objects() -> Iterator[None]:
    """Hide the objects of all earlier tests, through which a recorder looks for modules."""
    gc.freeze()
    yield
    gc.unfreeze()
