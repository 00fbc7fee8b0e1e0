"""What a training step keeps of the forward pass, by module: keep, compute again, move to the host.

A module with a policy is a region of `jax.checkpoint`: its values are those of the plain call, and
so are its random numbers and the state that it changes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import torch
from jax.ad_checkpoint import checkpoint_name

from tpuport.attention.sharded import OUTPUT_NAME
from tpuport.errors import UsageError
from tpuport.model import patterns, region, structure
from tpuport.model.tensor import Storage, TracedTensor
from tpuport.model.trace import Trace, no_policy

_INPUT = "tpuport.module_input"
_HOST = {"offload_src": "device", "offload_dst": "pinned_host"}

_policies = jax.checkpoint_policies


def _with_attention(products: Callable[..., Any], attention: Callable[..., Any]) -> Any:
    """A policy for products with weights and one for the result of attention.

    That is as large as such a product, and its kernel is no product to jax.
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


class Table:
    """Remat policies by module: the first pattern that matches decides.

    Args:
        policies: patterns of module fqns (`tpuport.model.patterns`) to names of policies.

    Raises:
        UsageError: a policy has another name.
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
        """The policy of a module; None where nothing is computed again."""
        for pattern, policy in self.policies.items():
            if patterns.matches(pattern, fqn):
                return None if policy == "none" else policy
        return None


def rematerialised(trace: Trace, policy: str, call: Callable[[], Any], roots: list[Any]) -> Any:
    """Run a module call as a region whose values are computed again in the backward pass.

    Args:
        trace: the running trace.
        policy: one of `POLICIES`.
        call: the module call.
        roots: the objects that the call may change: the module, its arguments.
    """
    if not torch.is_grad_enabled():
        return call()

    def inside() -> Any:
        # What is inside goes with it: a region in a region would be computed three times.
        table, trace.remat = trace.remat, no_policy
        try:
            return _with_named_inputs(trace, call, roots[1:]) if policy == "offload" else call()
        finally:
            trace.remat = table

    return region.checkpoint(trace, inside, roots, POLICIES[policy])


def _with_named_inputs(trace: Trace, call: Callable[[], Any], inputs: Any) -> Any:
    """Run a call whose inputs have the name by which "offload" knows them.

    Those are the first tensor and what looks like it (as many dims, as many channels): what blocks
    hand on. Masks and rotary tables, which all blocks get, stay on the device.
    """
    effects = trace.effects[-1]
    named: list[tuple[Storage, jax.Array, int]] = []
    first: tuple[int, tuple[int, ...]] | None = None
    for leaf in structure.flatten(inputs)[0]:
        if not isinstance(leaf, TracedTensor) or not leaf.dtype.is_floating_point:
            continue
        storage, form = leaf._storage, (leaf.dim(), tuple(leaf.bound_shape)[-1:])
        first = form if first is None else first
        if storage.trace is not trace or leaf._chain or form != first:
            continue
        named.append((storage, storage.value, storage.version))
        storage.value = checkpoint_name(storage.value, _INPUT)
        leaf._keep(storage.value)
    try:
        return call()
    finally:
        for storage, value, version in named:
            if storage.serial in effects.before:
                effects.before[storage.serial] = (storage, value, version)
            else:
                storage.value = value
