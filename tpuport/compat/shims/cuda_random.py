"""The random numbers of `torch.cuda`, drawn from the CPU's generator on the emulated device."""

from collections.abc import Iterable
from typing import Any

import torch

from tpuport.compat.emulated.accelerator import index_of
from tpuport.compat.shims._inside import functions
from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core.context import current


def _manual_seed(seed: Any) -> None:
    if current() is not None:
        torch.manual_seed(seed)  # the shim of a trace: the program's keys
    else:
        # Not torch.manual_seed, which calls this.
        torch.default_generator.manual_seed(int(seed))


def _seed() -> None:
    torch.default_generator.seed()


def _get_state(device: Any = "cuda") -> torch.Tensor:
    index_of(device)
    return torch.default_generator.get_state()


def _set_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    index_of(device)
    torch.default_generator.set_state(new_state)


def _set_states(new_states: Iterable[torch.Tensor]) -> None:
    for state in new_states:
        _set_state(state)


_TABLE = {
    "manual_seed": _manual_seed,
    "manual_seed_all": _manual_seed,
    "seed": _seed,
    "seed_all": _seed,
    "initial_seed": lambda: torch.default_generator.initial_seed(),
    "get_rng_state": _get_state,
    "get_rng_state_all": lambda: [_get_state()],
    "set_rng_state": _set_state,
    "set_rng_state_all": _set_states,
}


class CudaRandom(Shim):
    """One stream of numbers for host and accelerator: seeding either restarts it. Ported
    programs take their keys from it, so it makes their calls reproducible too.
    """

    TARGET = "torch.cuda.manual_seed"
    REASON = "there is no generator on a GPU"
    REFERENCE = "torch.default_generator"

    def replacements(self) -> list[Replacement]:
        return [
            *functions(torch.cuda, _TABLE),
            *functions(torch.cuda.random, _TABLE),
            Replacement(torch.cuda, "default_generators", (torch.default_generator,)),
        ]
