"""Keys of random ops: for one op outside a program, and for a call of one."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.foundation.interop import backend
from tpuport.tracing.core.context import KeyStream, Trace

_STREAM: ContextVar[KeyStream | None] = ContextVar("stream", default=None)
# The eager run that draws a program's numbers, whose `keys` `torch.manual_seed` sets in its place.
STAND_IN: ContextVar[Any] = ContextVar("stand_in", default=None)


@contextlib.contextmanager
def keyed(stream: KeyStream) -> Iterator[None]:
    """Take the keys of random ops from `stream` inside the block."""
    token = _STREAM.set(stream)
    try:
        yield
    finally:
        _STREAM.reset(token)


def op_key(trace: Trace | None, kwargs: dict[str, Any]) -> jax.Array:
    """Return the key of a random op: from the active stream, else the trace, else torch's
    generator.
    """
    generator = kwargs.get("generator")
    stream = _STREAM.get()
    if stream is not None:
        return stream.next()
    if trace is None:
        seed = torch.empty((), dtype=torch.int64).random_(generator=generator).item()
        return jax.random.key(int(seed) % (1 << 63))
    return trace.next_key(generator)


def fresh_key() -> jax.Array:
    """Return a key from torch's default generator.

    `torch.manual_seed` makes the sequence of calls reproducible.
    """
    return backend.key_of(int(torch.randint(0, 2**62, (), dtype=torch.int64).item()))


def next_key() -> jax.Array:
    """Return the key that `fresh_key` returns next, without drawing it."""
    state = torch.get_rng_state()
    try:
        return fresh_key()
    finally:
        torch.set_rng_state(state)


_KEYS: list[jax.Array] = []


def unused_key() -> jax.Array:
    """Return a constant key for a program that draws no random numbers."""
    if not _KEYS:
        with jax.ensure_compile_time_eval():  # inside a jit of the user it would be a tracer
            _KEYS.append(jax.random.key(0))
    return _KEYS[0]


def as_key(rng: Any) -> jax.Array:
    """Return a typed key for a typed or a raw one."""
    if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        return rng
    return jax.random.wrap_key_data(rng)
