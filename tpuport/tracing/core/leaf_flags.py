"""Traced tensors that become leaves with a gradient, and leaves that end to have one."""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from tpuport.tracing.core.errors import refuse_flag_in_branch
from tpuport.tracing.core.storage import Flow, detaching, differentiable

# What a leaf has that ends; its cached value is that with its name, if code inside made it one.
_AS_A_LEAF = ("_storage", "_chain", "_detached", "_cached", "_cached_version", "_cached_region")


def set_flag(tensor: Any, wanted: bool) -> None:
    """Make a traced tensor a leaf with a gradient, or stop gradients through it from here on.

    Raises:
        RuntimeError: as in eager, the dtype has no gradients, or a computed tensor is to lose
            its own.
        PortError: data decides whether this happens to a parameter.
    """
    if wanted and not differentiable(tensor.dtype):
        raise RuntimeError("only Tensors of floating point and complex dtype can require gradients")
    if not wanted and not tensor.is_leaf:
        raise RuntimeError(
            "you can only change requires_grad flags of leaf variables. If you want to use a"
            " computed variable in a subgraph that doesn't require differentiation use"
            " var_no_grad = var.detach()."
        )
    trace = tensor._storage.trace
    if wanted != tensor.requires_grad and getattr(tensor, "_is_param", False):
        refuse_flag_in_branch(trace)
    if wanted and not tensor.requires_grad:
        _begin(tensor, trace)
    elif not wanted and not tensor._frozen:
        set_ended(tensor)


def _begin(tensor: Any, trace: Any) -> None:
    ended, tensor._own_flow, tensor._is_leaf = tensor._ended_leaf, Flow.SEEN, True
    if ended is not None and ended["_storage"] is tensor._storage:
        # The same leaf as before: what was computed from it until it ended has its gradient, too.
        tensor._ended_leaf = None
        for name, value in ended.items():
            setattr(tensor, name, value)
        return
    if trace is not None:
        tensor._leaf_name = trace.add_leaf(tensor)
    # What was computed from it before does not depend on the leaf.
    tensor._keep(checkpoint_name(tensor._elem, tensor._leaf_name or "leaf"))


def set_ended(tensor: Any) -> None:
    """Stop gradients through a leaf until it begins again, but not through earlier views of it."""
    ended = {name: getattr(tensor, name) for name in _AS_A_LEAF}
    detach(tensor)
    tensor._ended_leaf = ended


def detach(tensor: Any) -> None:
    """Stop gradients through a tensor, which goes on to share its memory."""
    value = tensor._held
    tensor._chain = (*tensor._chain, detaching(value, tensor._storage.trace))
    tensor._keep(jax.lax.stop_gradient(value))
    tensor._own_flow, tensor._detached, tensor._is_leaf = Flow.STOPPED, True, False
