"""Gradients of a program's outputs that scripts ask for: hooks, retain_grad, autograd.grad."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from tpuport.compat.emulated.device import beside, handles, settled
from tpuport.compat.emulated.gradients import Through
from tpuport.compat.emulated.inner_outputs import (
    add_hook,
    caught,
    inner_output,
    retain_gradient,
)
from tpuport.foundation.errors import PortError

_GRAD = inspect.signature(torch.autograd.grad)


def hook_of_output(tensor: torch.Tensor, hook: Any) -> RemovableHandle | None:
    """Add a hook to a result of a program that others are computed from; None for other tensors."""
    place = inner_output(tensor, Through)
    return None if place is None else add_hook(*place, hook)


@handles(torch.Tensor.retain_grad)
def _retain_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del func, kwargs
    retain_gradient(args[0], Through)


@handles(torch.autograd.grad)
def _grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = _GRAD.bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    inputs = given["inputs"]
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    places = {i: place for i, one in enumerate(inputs) if (place := inner_output(one, Through))}
    if not places:
        return _beside(func(*args, **kwargs), inputs, args, kwargs)
    materialize, allow = given["materialize_grads"], given["allow_unused"]
    probes = {id(one): one for inner, _ in places.values() for one in inner.probes()}
    given |= {"inputs": (*inputs, *probes.values()), "allow_unused": True}
    given["materialize_grads"] = False
    with caught(list(places.values())) as lists:
        found = list(func(**given))[: len(inputs)]
    for index, made in zip(places, lists, strict=True):
        # The whole gradient, if the node ran: torch has what flows into the output from outside.
        found[index] = next((one for one in made if one is not None), found[index])
    for index, one in enumerate(found):
        if one is None and materialize:
            found[index] = torch.zeros_like(inputs[index], requires_grad=given["create_graph"])
        elif one is None and not allow:
            raise RuntimeError(
                f"The differentiated Tensor at index {index} appears to not have been used in the"
                " graph. Set allow_unused=True if this is the desired behavior."
            )
    return _beside(found, inputs, args, kwargs)


def _beside(found: Sequence[Any], inputs: Sequence[Any], args: Any, kwargs: Any) -> Any:
    """Return gradients where their inputs are, which may not be where the outputs are."""
    if not all(isinstance(one, torch.Tensor) for one in inputs):  # an edge of the graph
        return settled(tuple(found), args, kwargs)
    pairs = zip(found, inputs, strict=True)
    return tuple(g if g is None else beside(g, tensor) for g, tensor in pairs)


@handles(torch.autograd.backward, torch.Tensor.backward)
def _backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inputs = kwargs.get("inputs") or ()
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    if any(inner_output(one, Through) is not None for one in inputs):
        raise PortError(
            "backward(inputs=...) with a result that other results of the same call are computed"
            " from",
            code="TPU403",
            remedy="call retain_grad() on it and backward() without inputs, or use"
            " torch.autograd.grad",
        )
    return func(*args, **kwargs)
