"""Stretches of a trace that become the body of a jax primitive (checkpoint, cond) though they write
state.

Inside the body every storage it created or wrote holds inner tracers. Afterwards the ones still
alive get the primitive's outputs as their values, so whatever Python objects refer to them are
right without being looked at.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from tpuport.model.tensor import Storage
from tpuport.model.trace import Trace


@dataclass
class Body:
    """A traced stretch.

    Call `run` inside a jax primitive, then `settle` with that primitive's outputs.
    """

    trace: Trace
    thunk: Callable[[], Any]
    result: Any = None
    alive: list[Storage] = field(default_factory=list)
    written: list[tuple[Storage, jax.Array, int]] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def run(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Run the stretch.

        Gives the values of escaping storages and of written ones (restored before returning).
        """
        with self.trace.recording() as effects:
            self.result = self.thunk()
        created = [ref() for ref in effects.created.values()]
        self.alive = [storage for storage in created if storage is not None]
        self.positions = [i for i, storage in enumerate(created) if storage is not None]
        self.written = list(effects.before.values())
        values = [s.value for s in self.alive]
        after = [s.value for s, _, _ in self.written]
        for storage, value, _ in self.written:
            storage.value, storage.version = value, storage.version + 1
        return values, after

    def run_like(self, first: "Body") -> list[jax.Array]:
        """Run the stretch another time; the values of the storages that escaped the first time.

        Equal runs create equal storages in the same order.
        """
        with self.trace.recording(hold=True) as effects:
            self.result = self.thunk()
        made = [ref() for ref in effects.created.values()]
        escaped = [made[position] for position in first.positions]
        return [storage.value for storage in escaped if storage is not None]

    def settle(self, values: list[jax.Array], after: list[jax.Array]) -> Any:
        """Give the storages their values outside; returns what the stretch returned."""
        for storage, value in zip(self.alive, values, strict=True):
            storage.value = value
            storage.version += 1
        for (storage, _, _), value in zip(self.written, after, strict=True):
            storage.set(value)
        return self.result


def checkpoint(trace: Trace, thunk: Callable[[], Any], policy: Any = None) -> Any:
    """Run `thunk` under jax.checkpoint.

    Its intermediate values are computed again in the backward pass.
    """
    body = Body(trace, thunk)
    values, after = jax.checkpoint(body.run, policy=policy)()
    return body.settle(values, after)
