"""The devices under test, the sizes of the jobs, and how a time is taken."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from tpuport.cost import CHIPS, Chip, chip_of
from tpuport.foundation.errors import UsageError
from tpuport.measurement.records import Device

# Whose figures stand beside those of a CPU, so that the same lines run; the ratios mean nothing.
_STAND_IN = "v5e"
# A run of the loop that takes less is too short for a clock.
_LEAST_SECONDS = {True: 2e-3, False: 0.1}
_REPEATS = 3
_MOST_ROUNDS = 1 << 16


@dataclass(frozen=True)
class Bench:
    """The devices under test.

    Attributes:
        devices: The devices.
        device: The same in words.
        chip: Figures of the cost model; None if nothing is known of such a device.
    """

    devices: tuple[Any, ...]
    device: Device
    chip: Chip | None

    @property
    def small(self) -> bool:
        """Return whether sizes are small, as on a CPU."""
        return self.device.small

    def size(self, full: int, small: int) -> int:
        """Return one of two sizes."""
        return small if self.small else full

    def seconds(self, step: Callable[..., Any], x: Any, *consts: Any) -> float:
        """Return the time of one `step`: of many in one program, without the cost of starting it.

        Args:
            step: Function of x and the constants that returns the next x, of the same shape.
            x: First value.
            *consts: Further arguments.
        """

        @jax.jit
        def run(rounds: Any, x: Any, *consts: Any) -> Any:
            return lax.fori_loop(0, rounds, lambda _, x: step(x, *consts), x)

        def took(rounds: int) -> float:
            start = time.perf_counter()
            jax.block_until_ready(run(rounds, x, *consts))
            return time.perf_counter() - start

        took(1)
        rounds, least = 1, _LEAST_SECONDS[self.small]
        while (spent := took(rounds)) < least and rounds < _MOST_ROUNDS:
            rounds = min(_MOST_ROUNDS, max(2 * rounds, round(1.2 * rounds * least / spent)))
        few = min(took(rounds) for _ in range(_REPEATS))
        many = min(took(3 * rounds) for _ in range(_REPEATS))
        # On a machine with other work the difference of two times may be anything.
        return (many - few) / (2 * rounds) if many > few else many / (3 * rounds)


def this_bench() -> Bench:
    """Take the devices of this process.

    Raises:
        RuntimeError: JAX cannot have them.
    """
    devices = tuple(jax.local_devices())
    first = devices[0]
    small = first.platform == "cpu"
    chip = CHIPS[_STAND_IN] if small else _known(first.device_kind)
    name = "" if chip is None else chip.name
    return Bench(
        devices,
        Device(first.platform, first.device_kind, len(devices), name, small),
        chip,
    )


def _known(kind: str) -> Chip | None:
    try:
        return chip_of(kind)
    except UsageError:
        return None


@functools.cache
def noise(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return normal numbers in float32, the same for the same seed."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)
