"""What the tests of loops share."""

from collections.abc import Iterator

import pytest

from benchmarks.whole_programs import loops


@pytest.fixture
def short() -> Iterator[None]:
    """Make loops of few rounds one program, too."""
    with loops.rolled():
        yield
