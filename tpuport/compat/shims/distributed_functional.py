"""Collectives that return new tensors, with gradients: copies, in a group of one process."""

import functools
import importlib
import sys
from typing import Any

import torch

from tpuport.compat.emulated import process_group, replicas
from tpuport.compat.emulated.settings import active
from tpuport.compat.shims import _collectives as plain
from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.patches._count import count

_NN = "torch.distributed.nn.functional"
_FUNCTIONAL = "torch.distributed._functional_collectives"

# Each has the signature of PyTorch's function of that name.


def _first(name: str, tensors: Any) -> torch.Tensor:
    return plain._only(name, tensors, "the list of tensors").clone()


def _all_gather_base(output_tensor: Any, input_tensor: Any, group: Any = None) -> Any:
    plain.all_gather_into_tensor(output_tensor, input_tensor, group)
    return input_tensor.reshape(output_tensor.shape).clone()


def _reduce_scatter(output: Any, input_list: Any, op: Any = None, group: Any = None) -> Any:
    plain.reduce_scatter(output, input_list, op, group)
    return _first("nn.functional.reduce_scatter", input_list).reshape(output.shape)


def _all_to_all(output_tensor_list: Any, input_tensor_list: Any, group: Any = None) -> Any:
    plain.all_to_all(output_tensor_list, input_tensor_list, group)
    return (_first("nn.functional.all_to_all", input_tensor_list),)


def _all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
) -> Any:
    plain.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group)
    return input.reshape(output.shape).clone()


def _broadcast(tensor: Any, src: int, group: Any = None) -> Any:
    plain.broadcast(tensor, src, group)
    return tensor.clone()


def _gather(tensor: Any, dst: int = 0, group: Any = None) -> Any:
    plain.reduce(tensor, dst, group=group)
    return (tensor.clone(),)


def _scatter(tensors: Any, src: int = 0, group: Any = None) -> Any:
    plain.broadcast(tensors, src, group)
    return _first("nn.functional.scatter", tensors)


def _reduce(tensor: Any, dst: int, op: Any = None, group: Any = None) -> Any:
    plain.reduce(tensor, dst, op, group)
    return tensor.clone()


def _all_reduce(tensor: Any, op: Any = None, group: Any = None) -> Any:
    plain.all_reduce(tensor, op, group)
    return tensor.clone()


def _all_gather(tensor: Any, group: Any = None) -> Any:
    plain.all_reduce(tensor, group=group)
    return (tensor.clone(),)


WITH_GRADIENTS = {
    "_all_gather_base": _all_gather_base,
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "broadcast": _broadcast,
    "gather": _gather,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "scatter": _scatter,
}


def _same(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a copy of the tensor: the result of any collective among one process."""
    del args, kwargs
    return self.clone()


def _each_same(self: Any, *args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    return [tensor.clone() for tensor in self]


def _waited(tensor: Any) -> Any:
    return tensor


FUNCTIONAL = {
    **dict.fromkeys(
        (
            *("all_reduce", "broadcast", "permute_tensor", "all_gather_tensor"),
            *("all_gather_tensor_autograd", "all_gather_single", "all_gather_single_autograd"),
            *("reduce_scatter_tensor", "reduce_scatter_tensor_autograd", "reduce_scatter_single"),
            *("reduce_scatter_single_autograd", "all_to_all_single", "all_to_all_single_autograd"),
        ),
        _same,
    ),
    **dict.fromkeys(
        (
            *("all_reduce_coalesced", "all_gather_into_tensor_coalesced"),
            *("all_gather_single_coalesced", "reduce_scatter_single_coalesced"),
            "reduce_scatter_tensor_coalesced",
        ),
        _each_same,
    ),
    "wait_tensor": _waited,
}


def _inside(original: Any, ours: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if active() is None or not process_group.is_ours():
            return original(*args, **kwargs)
        if replicas.size() > 1:
            raise port_error(
                f"{original.__module__}.{original.__name__} was called in one of"
                f" {replicas.size()} replicas, where tpuport does not answer it",
                remedy=f"call torch.distributed.{original.__name__}, or that of"
                " torch_xla.core.functions where gradients flow",
            )
        count(f"{original.__module__}.{original.__name__}")
        return ours(*args, **kwargs)

    return call


def _replacements(module: str, ours: dict[str, Any]) -> list[Replacement]:
    home = importlib.import_module(module)
    owners = [home]
    # The package re-exports the functions of this module.
    if module == _NN and "torch.distributed.nn" in sys.modules:
        owners.append(sys.modules["torch.distributed.nn"])
    calls = {n: _inside(getattr(home, n), f) for n, f in ours.items() if hasattr(home, n)}
    return [
        Replacement(owner, name, call)
        for name, call in calls.items()
        for owner in owners
        if vars(owner).get(name) is getattr(home, name)
    ]


class DifferentiableCollectives(Shim):
    """`torch.distributed.nn.functional`: the same data, and the gradient goes straight through."""

    TARGET = "torch.distributed.nn.functional"
    REASON = "they call the backend, which a traced program cannot"
    REFERENCE = "torch.distributed.nn.functional with gloo and a world of 1"
    MODULE = "torch.distributed.nn.functional"

    def replacements(self) -> list[Replacement]:
        return _replacements(_NN, WITH_GRADIENTS)


class FunctionalCollectives(Shim):
    """`torch.distributed._functional_collectives`: the same data, as new tensors."""

    TARGET = "torch.distributed._functional_collectives"
    REASON = "they call the backend, which a traced program cannot"
    REFERENCE = "torch.distributed._functional_collectives with gloo and a world of 1"
    MODULE = "torch.distributed._functional_collectives"

    def replacements(self) -> list[Replacement]:
        return _replacements(_FUNCTIONAL, FUNCTIONAL)
