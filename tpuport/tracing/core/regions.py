"""Parts of a trace that become the body of a jax primitive (checkpoint, cond) and may write state.

Inside the body every storage and traced number that it created, and every storage that it wrote,
holds inner tracers. Afterwards those still alive get the primitive's outputs as their values.
Python objects that refer to them are then right without being found and updated.
"""

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from tpuport.foundation import pytree
from tpuport.tracing.core.context import Effects, KeyStream, Trace
from tpuport.tracing.core.storage import Storage
from tpuport.tracing.core.tensor import TracedTensor


@dataclass
class Body:
    """The part of a trace that becomes a body.

    Call `run` inside a jax primitive, then `settle` with that primitive's outputs.
    """

    trace: Trace
    thunk: Callable[[], Any]
    result: Any = None
    alive: list[Storage] = field(default_factory=list)
    written: list[tuple[Storage, jax.Array, int]] = field(default_factory=list)
    rebound: list[TracedTensor] = field(default_factory=list)
    numbers: list[Any] = field(default_factory=list)
    counts: dict[int, Any] = field(default_factory=dict)
    streams: list[KeyStream] = field(default_factory=list)

    def run(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Run the thunk.

        Garbage is collected if more is alive after it than the result holds: reference cycles,
        such as tracebacks of explored branches, keep values that nobody can read any more.

        Returns:
            The values that escape (of storages, then of numbers) and the values of written
            storages and rebound tensors, which are restored before returning.
        """
        with self.trace.recording() as effects:
            self.result = self.thunk()
            narrow(storage for storage, _, _ in list(effects.before.values()))
            # Counts of masks are kept, so that sizes inside and outside are known to be equal.
            self.counts = dict(self.trace.mask_counts)
        storages, nodes = _made(effects)
        num_alive = sum(storage is not None for storage in storages)
        del storages, nodes
        if num_alive > len(pytree.flatten(self.result)[0]):
            # Automatic collection is off while a trace runs.
            gc.collect(0)
        storages, nodes = _made(effects)
        self.alive = [storage for storage in storages if storage is not None]
        self.numbers = [node for node in nodes if node is not None]
        self.written = list(effects.before.values())
        self.rebound = [tensor for tensor, _, _ in effects.rebound.values()]
        values = [storage.held for storage in self.alive]
        values += [number.held for number in self.numbers]
        self.streams = [s for s in self.trace.streams if isinstance(s.count, jax.core.Tracer)]
        values += [jnp.asarray(stream.count) for stream in self.streams]
        after = [s.value for s, _, _ in self.written] + [t._elem for t in self.rebound]
        # Written storages outlive the body, and its tracers must not leak through them.
        effects.undo()
        return values, after

    def settle(self, values: list[jax.Array], after: list[jax.Array]) -> Any:
        """Set the values that escaped to their outer ones, and return the thunk's result."""
        count = len(self.alive)
        for storage, value in zip(self.alive, values[:count], strict=True):
            storage.value = value
            storage.version += 1
        rest = iter(values[count:])
        for node in self.numbers:
            node.held = next(rest)
        for stream in self.streams:
            stream.count = next(rest)
        written, rebound = after[: len(self.written)], after[len(self.written) :]
        for (storage, _, _), value in zip(self.written, written, strict=True):
            storage.set(value)
        for tensor, value in zip(self.rebound, rebound, strict=True):
            rebind(self.trace, tensor, value)
        self.trace.mask_counts.update(self.counts)
        return self.result


def rebind(trace: Trace, tensor: TracedTensor, value: jax.Array) -> None:
    """Give a tensor the value that a body left in it by `x.data = y`, in a storage of its own."""
    for effects in trace.effects:
        effects.rebinding(tensor)
    tensor.rebind(Storage(value, trace))


def narrow(storages: Iterable[Storage]) -> None:
    """Narrow written storages, whose dtype is fixed outside; the checks are writes themselves."""
    for storage in storages:
        if storage.wide:
            storage.set(storage.value)


def _made(effects: Effects) -> tuple[list[Any], list[Any]]:
    """Return the storages and traced numbers that were created, None for those that are gone."""
    return [ref() for ref in effects.created.values()], [ref() for ref in effects.numbers]


def checkpoint(trace: Trace, thunk: Callable[[], Any], roots: list[Any], policy: Any = None) -> Any:
    """Run `thunk` under jax.checkpoint.

    Its intermediate values are computed again in the backward pass.

    Args:
        trace: The running trace.
        thunk: The call.
        roots: The objects that the call may change.
        policy: What to keep, as `jax.checkpoint` takes it.
    """

    explorer = trace.explorer

    def explored() -> Any:
        # A branch on a value made in here is an inner tracer, so it is explored in here.
        return thunk() if explorer is None else explorer.run_inside("checkpoint", thunk, roots)

    body = Body(trace, explored)
    values, after = jax.checkpoint(body.run, policy=policy)()
    return body.settle(values, after)
