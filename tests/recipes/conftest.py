"""What is so in the tests of all recipes."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _one_thread_of_torch() -> Iterator[None]:
    """Compute in one thread: several wait for each other between operators of models this small.

    They do so without giving up their cores, which takes most of the time of an eager reference.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # of processes that a test starts
        yield
    torch.set_num_threads(before)
