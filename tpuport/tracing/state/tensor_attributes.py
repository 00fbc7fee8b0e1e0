"""Attributes that a script has set on tensors: `weight.scale = 2`, mup's `weight.infshape`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch

from tpuport.foundation import pytree
from tpuport.foundation.pytree.children import ATOMIC
from tpuport.foundation.pytree.tensor_classes import (
    OfClass,
    attributes_beside,
    class_seen,
    is_class_of_tensors,
)
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.core.tensor_classes import OWN


def attributes_set_on(tensor: torch.Tensor) -> Mapping[str, Any]:
    """Return the attributes that code has set on a tensor, by name."""
    held = tensor.__dict__
    if isinstance(tensor, OfClass) or "_class_seen" in held:
        return {}  # They are those of a tensor of a class, or of one that this is the plain one of.
    if is_class_of_tensors(type(tensor)):
        return attributes_beside(tensor)
    if type(tensor) is TracedTensor:
        return {name: value for name, value in held.items() if name not in OWN}
    if type(tensor) in _PLAIN:
        return held
    # A subclass of Tensor has its own parts there.
    return {name: value for name, value in held.items() if not name.startswith("_")}


def attribute_keys(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """Return a key for each attribute set on a tensor; the key changes with the value.

    The class of a tensor is one, if it is a class of the user's.
    """
    if is_class_of_tensors(type(tensor)):
        yield f"{name}.__class__", class_seen(tensor)
    for attribute, value in attributes_set_on(tensor).items():
        if type(value) in ATOMIC:
            key = pytree.hashable(value, [])
        else:
            leaves, spec = pytree.flatten(value, objects=True)
            key = (spec.key, tuple(pytree.hashable(one, []) for one in leaves))
        yield f"{name}.{attribute}", (type(value), key)


def refuse_set_attributes(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Refuse a call that sets attributes of tensors of the module.

    Args:
        before: The keys of the attributes before the call, by name.
        after: Those after it.

    Raises:
        PortError: it did: the attribute would be set once, while tracing.
    """
    changed = [n for n in {**before, **after} if before.get(n, ...) != after.get(n, ...)]
    if changed:
        raise port_error(
            f"the call sets {', '.join(changed[:3])}: an attribute of a tensor of the module",
            code="TPU402",
            remedy="keep the value in an attribute of the module, or set it before the call",
        )


def refuse_class(name: str, value: Any) -> None:
    """Refuse an attribute that is a tensor of a class of the user's: calls would not see another.

    Raises:
        PortError: it is.
    """
    if is_class_of_tensors(type(value)):
        kind = class_seen(value).__name__
        raise port_error(
            f"{name} is a {kind}, a class of tensors of its own, in an attribute: a program"
            " keeps the values of the tensor only",
            code="TPU106",
            remedy=(
                "make it a buffer, or keep the plain tensor (`.as_subclass(torch.Tensor)`), and"
                f" make it a {kind} in forward; if the class of the module is not yours, leave it"
                " to eager PyTorch: `tpuport run --eager NAME`"
            ),
        )


def refuse_wrapper(name: str, tensor: torch.Tensor, error: Exception) -> None:
    """Refuse state whose class keeps the values in other tensors, as quantized weights do.

    Args:
        name: its name in the module.
        tensor: a tensor of which numpy cannot have the values.
        error: what it raised.

    Raises:
        PortError: The class takes torch's operations, as of `torch.Tensor._make_wrapper_subclass`.
    """
    plain: Any = torch.Tensor
    if getattr(type(tensor), "__torch_dispatch__", None) is not plain.__torch_dispatch__:
        kind = type(tensor).__name__
        raise port_error(
            f"{name} is a {kind}, which has no values of its own but in other tensors",
            code="TPU106",
            remedy="port the module before its weights become this (tpuport.quantize has schemes of"
            " its own), or with plain weights: weight.dequantize(); or leave the class of the"
            " module to eager PyTorch: `tpuport run --eager NAME`",
        ) from error


def refuse_closed_parameters(module: torch.nn.Module) -> None:
    """Refuse parameters of a class that lets no function of torch at its tensor.

    Raises:
        PortError: There is one.
    """
    for name, tensor in torch.nn.Module.named_parameters(module):
        if type(tensor) is torch.nn.Parameter:
            continue
        try:
            tensor.numel()
        except (TypeError, AttributeError) as error:
            kind = type(tensor).__name__
            raise port_error(
                f"{name} is a {kind}, a class of tensors that refuses torch's functions: {error}",
                code="TPU106",
                remedy="keep the plain tensor as the parameter, and make this of it in forward; if"
                " the class of the module is not yours, leave it to eager PyTorch:"
                " `tpuport run --eager NAME`",
            ) from error


class Reads(Protocol):
    """What code reads, by name (`tracing/guards/code_reads.py`)."""

    def reads(self, attribute: str) -> bool:
        """Return whether the code may read an attribute of this name."""
        ...


def _given(tensor: torch.Tensor) -> list[str]:
    """Return the names of the attributes on an argument or result that a script has set."""
    if type(tensor) not in _PLAIN or tensor.__dict__.keys() <= OWN:
        return []
    return [n for n in attributes_set_on(tensor) if not n.startswith(_OF_TORCH)]


def refuse_given_attributes(arguments: Any, code: Callable[[], Reads]) -> None:
    """Refuse arguments that have an attribute which the code may read: a program takes arrays.

    Raises:
        PortError: a tensor has one. A subclass of Tensor may keep its own.
    """
    for leaf in pytree.flatten(arguments)[0]:
        for name in _given(leaf):
            if code().reads(name):
                raise port_error(
                    f"the attribute {name!r} is set on a tensor that is an argument: a program"
                    " gets the values of the tensor only",
                    code="TPU402",
                    remedy=_PASS,
                )


def refuse_left_attributes(result: Any, arguments: Iterable[Any]) -> None:
    """Refuse a call that sets attributes of its arguments or result, which would be lost.

    Those of parameters and buffers are seen with the module's state.

    Raises:
        PortError: it did.
    """
    made = [leaf for leaf in pytree.flatten(result)[0] if not getattr(leaf, "_is_given", False)]
    for leaf in (*made, *arguments):
        if names := _given(leaf):
            raise port_error(
                f"the call sets the attribute {names[0]!r} on a tensor that it returns or was"
                " given: a program gives the values of the tensor only",
                code="TPU402",
                remedy=_PASS,
            )


# Set by `torch.nn.Buffer`, and by torch.compile, whose marks are about sizes.
_OF_TORCH = ("_is_buffer", "persistent", "_dynamo", "_has_dynamo", "_specialize_on")
_PLAIN = (torch.Tensor, torch.nn.Parameter, TracedTensor)
_PASS = "pass it beside the tensor, as an argument or result of its own"
