"""Random numbers of eager PyTorch that are those of a port."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tpuport.foundation import pytree
from tpuport.foundation.patching.shim import installed
from tpuport.tracing.core import int64
from tpuport.tracing.core.context import KeyStream
from tpuport.tracing.core.keys import STAND_IN, keyed
from tpuport.tracing.core.precision_seen import draws
from tpuport.tracing.core.tensor import TracedTensor, to_cpu, wrap
from tpuport.tracing.core.values import map_tensors
from tpuport.tracing.dispatch.dispatch import dispatch
from tpuport.tracing.patches.manual_seed import ManualSeed


class DrewInBackward(Exception):
    """Signal that eager's backward draws random numbers that a port cannot be compared with."""


class _Unknown(KeyStream):
    def next(self) -> jax.Array:
        raise DrewInBackward


class SameNumbers(TorchDispatchMode):
    """A mode in which eager torch draws the random numbers that a port draws from `key`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def of(cls, call: Any) -> "SameNumbers":
        """Return the mode for a run of a `Call` in eager PyTorch."""
        made = cls(call.key)
        made.draws_on_host = call.draws_on_host
        return made

    def __init__(self, key: jax.Array) -> None:
        super().__init__()
        self.keys = KeyStream(key)
        self.generators: dict[int, KeyStream] = {}
        # Whether Python draws its own numbers itself, as the code has set the state of them.
        self.draws_on_host = False
        self._outer: list[Any] = []

    def __enter__(self) -> "SameNumbers":
        self._outer.append(STAND_IN.set(self))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        STAND_IN.reset(self._outer.pop())

    @contextlib.contextmanager
    def of_backward(self) -> Iterator[None]:
        """Supply what a custom backward draws from a state of the generator that forward kept.

        Raises:
            DrewInBackward: (inside) other numbers are drawn, which a port draws in its own way.
        """
        before, self.keys = self.keys, _Unknown(self.keys.base)
        try:
            with installed((ManualSeed,)), self:
                yield
        finally:
            self.keys = before

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        generator = kwargs.get("generator")
        own = generator is not None and generator._cdata not in self.generators
        if own or not draws(func):
            return func(*args, **kwargs)
        return self._draw(func, args, kwargs)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        generator = kwargs.get("generator")
        if "generator" in kwargs:
            kwargs["generator"] = None
        stream = self.keys if generator is None else self.generators[generator._cdata]
        tensors: list[tuple[torch.Tensor, TracedTensor]] = []

        def lift(tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor):
                return tensor
            lifted = wrap(int64.of_host(tensor), tensor.dtype)
            tensors.append((tensor, lifted))
            return lifted

        lifted = [map_tensors(lift, a) for a in args]
        with keyed(stream):
            result = dispatch(func, tuple(lifted), kwargs)
        for plain, one in tensors:
            if one._storage.version:
                plain.copy_(to_cpu(one))
                if result is one:
                    result = plain
        return pytree.map_tensors(lambda t: to_cpu(t) if isinstance(t, TracedTensor) else t, result)
