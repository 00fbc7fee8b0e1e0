"""Where the keys of random ops come from."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import torch

from tpuport.model.trace import KeyStream, Trace

_STREAM: ContextVar[KeyStream | None] = ContextVar("stream", default=None)


@contextlib.contextmanager
def keyed(stream: KeyStream) -> Iterator[None]:
    """Random ops outside a trace take their keys from `stream` inside the block."""
    token = _STREAM.set(stream)
    try:
        yield
    finally:
        _STREAM.reset(token)


def op_key(trace: Trace | None, kwargs: dict[str, Any]) -> jax.Array:
    """The key of a random op: from the stream in force, else the trace, else torch's generator."""
    generator = kwargs.get("generator")
    stream = _STREAM.get()
    if stream is not None:
        return stream.next()
    if trace is None:
        seed = torch.empty((), dtype=torch.int64).random_(generator=generator).item()
        return jax.random.key(int(seed) % (1 << 63))
    return trace.next_key(generator)
