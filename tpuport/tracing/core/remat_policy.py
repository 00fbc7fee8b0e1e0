"""Remat policies: which forward values are kept, recomputed or offloaded, by module.

A module with a policy runs under `jax.checkpoint`: its values, its random numbers and the state
that it changes are those of a plain call.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import torch
from jax.ad_checkpoint import checkpoint_name

from tpuport.foundation import pytree
from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop import name_patterns
from tpuport.kernels.attention.sharded import OUTPUT_NAME
from tpuport.tracing.core import regions
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.storage import Storage
from tpuport.tracing.core.tensor import TracedTensor

_INPUT = "tpuport.module_input"
_HOST = {"offload_src": "device", "offload_dst": "pinned_host"}

_policies = jax.checkpoint_policies


def _with_attention(products: Callable[..., Any], attention: Callable[..., Any]) -> Any:
    """Return a policy for products with weights and another one for the result of attention.

    That result is as large as such a product, but its kernel is not a product to jax.
    """

    def policy(primitive: Any, *args: Any, **params: Any) -> Any:
        chosen = attention if primitive.name == "name" else products
        return chosen(primitive, *args, **params)

    return policy


POLICIES: dict[str, Any] = {
    "full": _policies.nothing_saveable,
    "dots": _with_attention(
        _policies.dots_with_no_batch_dims_saveable,
        _policies.save_only_these_names(OUTPUT_NAME),
    ),
    "offload": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[_INPUT], **_HOST
    ),
    "dots_offload": _with_attention(
        _policies.offload_dot_with_no_batch_dims(*_HOST.values()),
        _policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[], names_which_can_be_offloaded=[OUTPUT_NAME], **_HOST
        ),
    ),
}
NAMES = ("none", *POLICIES)


class PolicyTable:
    """Remat policies by module: the first pattern that matches decides.

    Args:
        policies: Patterns of module fqns (`interop.name_patterns`), with names of policies.

    Raises:
        UsageError: A policy has an unknown name.
    """

    def __init__(self, policies: Mapping[str, str]) -> None:
        for pattern, policy in policies.items():
            if policy not in NAMES:
                raise UsageError(
                    f"the remat policy of {pattern!r} is {policy!r}; expected one of"
                    f" {', '.join(map(repr, NAMES))}"
                )
        self.policies = dict(policies)

    def __call__(self, fqn: str) -> str | None:
        """Return the policy of a module, or None where nothing is computed again."""
        for pattern, policy in self.policies.items():
            if name_patterns.matches(pattern, fqn):
                return None if policy == "none" else policy
        return None


def rematerialised(trace: Trace, policy: str, call: Callable[[], Any], roots: list[Any]) -> Any:
    """Run a module call as a region whose values are computed again in the backward pass.

    Args:
        trace: The running trace.
        policy: One of `POLICIES`.
        call: The module call.
        roots: The objects that the call may change: the module, its arguments.
    """
    if not torch.is_grad_enabled():
        return call()

    def inside() -> Any:
        # Submodules get no region of their own: nested regions would be computed three times.
        trace.in_remat = True
        try:
            return _with_named_inputs(trace, call, roots[1:]) if policy == "offload" else call()
        finally:
            trace.in_remat = False

    return regions.checkpoint(trace, inside, roots, POLICIES[policy])


def _with_named_inputs(trace: Trace, call: Callable[[], Any], inputs: Any) -> Any:
    """Run a call whose inputs carry the name by which "offload" selects them.

    These are the first tensor and those like it (as many dims, as many channels), which blocks pass
    on. Masks and rotary tables, which all blocks get, stay on the device.
    """
    effects = trace.effects[-1]
    named: list[tuple[Storage, jax.Array, int]] = []
    first: tuple[int, tuple[int, ...]] | None = None
    for leaf in pytree.flatten(inputs)[0]:
        if not isinstance(leaf, TracedTensor) or not leaf.dtype.is_floating_point:
            continue
        storage, form = leaf._storage, (leaf.dim(), tuple(leaf.bound_shape)[-1:])
        first = form if first is None else first
        if storage.trace is not trace or leaf._chain or form != first:
            continue
        named.append((storage, storage.held, storage.version))
        storage.value = checkpoint_name(storage.held, _INPUT)
        leaf._keep(storage.held)
    try:
        return call()
    finally:
        for storage, value, version in named:
            if storage.serial in effects.before:
                effects.before[storage.serial] = (storage, value, version)
            else:
                storage.value = value
