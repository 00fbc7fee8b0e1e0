"""Random numbers: torch_xla's state is one integer, and one generator serves host and device."""

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from tpuport.tracing.core.context import current
from tpuport.tracing.core.errors import port_error

# The seed that was given last, and the generator's state after it.
_LAST: dict[str, Any] = {"seed": None, "state": None}


def set_rng_state(seed: int, device: Any = None) -> None:
    """Restart the random numbers from a seed, or from what `get_rng_state` returned."""
    del device
    torch.cuda.manual_seed(int(seed))
    if current() is None:
        _LAST.update(seed=int(seed), state=torch.default_generator.get_state())


def get_rng_state(device: Any = None) -> int:
    """Return an integer from which the numbers go on, also in another process.

    The generator's state does not fit in an integer, so that it is seeded again, by one made of
    its state, unless it is as a seed left it.
    """
    del device
    if current() is not None:
        raise port_error(
            "xm.get_rng_state was called in a program, whose random numbers have no state",
            remedy="call it outside of the module",
        )
    state = torch.default_generator.get_state()
    if _LAST["state"] is None or not torch.equal(state, _LAST["state"]):
        digest = hashlib.sha256(state.numpy().tobytes()).digest()
        set_rng_state(int.from_bytes(digest[:7], "little"))
    return _LAST["seed"]


@contextlib.contextmanager
def fork_rng(device: Any = None, enabled: bool = True) -> Iterator[None]:
    """Put the random numbers back afterwards to where they were."""
    del device
    before = torch.default_generator.get_state() if enabled else None
    try:
        yield
    finally:
        if before is not None:
            torch.default_generator.set_state(before)
