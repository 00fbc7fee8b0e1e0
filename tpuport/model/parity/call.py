"""One call of a ported model, with all that eager PyTorch needs to repeat it."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.core
import torch

from tpuport.foundation import pytree
from tpuport.foundation.interop import backend
from tpuport.foundation.pytree.clone import clone_module
from tpuport.tracing.core import arguments
from tpuport.tracing.core.tensor import TracedTensor, wrap
from tpuport.tracing.guards import host_randomness
from tpuport.tracing.scan_layers import stacked_params
from tpuport.tracing.session.tracer import Tracer


@dataclass(frozen=True)
class Call:
    """A call as it was before it ran.

    Attributes:
        method: The method.
        args: The arguments; neither the caller nor the call changes these copies.
        kwargs: The keyword arguments, likewise.
        key: The key of its random numbers.
        state: All state of the model by name, as it was then.
        module: The module with the Python state that it had then; None for a function.
        tracer: The model's `Tracer` then, with its dtype policy.
        trainable: Whether gradients are compared.
        in_grad_mode: Whether autograd records where the call is made.
        host: The states of the host's global generators.
    """

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: jax.Array
    state: dict[str, Any]
    module: torch.nn.Module | None
    tracer: Tracer
    trainable: bool = False
    in_grad_mode: bool = False
    host: "host_randomness.States" = field(default_factory=lambda: host_randomness.States([]))

    @property
    def draws_on_host(self) -> bool:
        """Return whether Python draws its random numbers itself."""
        return self.method in self.tracer.drawing

    @classmethod
    def of(
        cls,
        ported: Any,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: jax.Array,
        *,
        trainable: bool = False,
    ) -> "Call":
        """Describe a call that a ported model is about to run."""
        master = ported._tracer.master
        module = None if master is None else clone_module(master, lambda tensor: tensor)[0]
        given, named = kept((args, kwargs))
        state, tracer = ported._values(), ported._tracer
        return cls(
            *(method, given, named, key, state, module, tracer, trainable),
            in_grad_mode=torch.is_grad_enabled(),
            host=host_randomness.States([module]),
        )

    def values(self) -> dict[str, Any]:
        """Return the state, each tensor by its own name even where blocks are stacked."""
        return stacked_params.unstack(self.state)


def kept(value: Any) -> Any:
    """Copy what a caller or a call may change; arrays of jax, which nobody can, are shared.

    Copies of tensors that require grad do: the call may differentiate with respect to them.
    """
    leaves, spec, _ = arguments.flatten_call(value)
    return pytree.unflatten(spec, [_kept(leaf) for leaf in leaves])


def _kept(leaf: Any) -> Any:
    if isinstance(leaf, TracedTensor):
        return wrap(leaf._elem, leaf.dtype)
    if isinstance(leaf, torch.Generator):
        return fork(leaf)
    if isinstance(leaf, torch.Tensor) and not isinstance(leaf, backend.TorchaxTensor):
        made = leaf.detach().clone() if leaf.device.type != "meta" else leaf.detach()
        return made.requires_grad_(leaf.requires_grad)
    return leaf


def concrete(value: Any) -> Any:
    """Return the array behind a tracer of jax, None if it has no value yet; all else as it is."""
    return value.to_concrete_value() if isinstance(value, jax.core.Tracer) else value


def fork(generator: torch.Generator) -> torch.Generator:
    """Return a generator that draws what another one is about to draw."""
    twin = type(generator)()
    twin.set_state(generator.get_state())
    return twin
