"""The same model under plain torchax, ported the way its documentation says.

Weights become JAX arrays (`interop.extract_all_buffers`), the forward is a functional call, and all
of it runs under one `jax.jit`. Buffers that the call replaced or wrote are handed back as well,
which is more than torchax does by itself.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torchax
from torchax import interop

Arrays = dict[str, jax.Array]


@contextlib.contextmanager
def environment(seed: int = 0) -> Iterator[Any]:
    """The default torchax environment.

    Its key is set again, as an earlier trace may have left a tracer there.
    """
    env = torchax.default_env()
    env.manual_seed(seed)
    with env:
        yield env


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """A CPU tensor as a JAX array of the matching type (64-bit types become 32-bit)."""
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        return jnp.asarray(tensor.float().numpy()).astype(jnp.bfloat16)
    return jnp.asarray(tensor.numpy().copy())


def to_torch(value: jax.Array) -> torch.Tensor:
    """A JAX array as a CPU tensor."""
    if value.dtype == jnp.bfloat16:
        return torch.tensor(jax.device_get(value.astype(jnp.float32))).bfloat16()
    return torch.tensor(jax.device_get(value))


class PlainTorchax:
    """A module or function as one `jax.jit` of torchax calls."""

    def __init__(self, target: torch.nn.Module | Callable[..., Any]) -> None:
        self.target = target
        self.params: Arrays = {}
        self.buffers: Arrays = {}
        if isinstance(target, torch.nn.Module):
            with environment() as env:
                params, buffers = interop.extract_all_buffers(target)
                self.params = {k: env.to_xla(v.detach()).jax() for k, v in params.items()}
                self.buffers = {k: env.to_xla(v.detach()).jax() for k, v in buffers.items()}
        self._jitted = jax.jit(self.pure)

    def pure(self, params: Arrays, buffers: Arrays, *args: Any) -> tuple[Any, Arrays]:
        """The output (JAX arrays, alone or in containers) and the buffers after the call."""
        view = interop.torch_view
        args = jax.tree.map(view, args)
        if not isinstance(self.target, torch.nn.Module):
            return interop.jax_view(self.target(*args)), {}
        state = {k: view(v) for k, v in {**params, **buffers}.items()}
        out = torch.func.functional_call(self.target, state, args)
        after = {k: state[k] for k in buffers}
        return interop.jax_view(out), interop.jax_view(after)

    def __call__(self, *args: Any) -> Any:
        """One call, moving the buffers; JAX arrays out."""
        arrays = jax.tree.map(lambda x: to_jax(x) if isinstance(x, torch.Tensor) else x, args)
        with torchax.default_env():
            out, after = self._jitted(self.params, self.buffers, *arrays)
        self.buffers = {**self.buffers, **after}
        return out
