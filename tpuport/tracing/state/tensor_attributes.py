"""Attributes that a script has set on tensors: `weight.scale = 2`, mup's `weight.infshape`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch

from tpuport.foundation import pytree
from tpuport.foundation.pytree.children import ATOMIC
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.tensor import TracedTensor

# What a traced tensor keeps for itself: in its class, and from its construction on.
OWN = frozenset(vars(TracedTensor)) | frozenset(
    "_storage _chain _cached _cached_version _cached_region _own_flow _detached _is_leaf _is_given"
    " _stopped _env _is_param _left_grad _hooks _hooked _unhooked _stream".split()
)


def attributes_set_on(tensor: torch.Tensor) -> Mapping[str, Any]:
    """Return the attributes that code has set on a tensor, by name."""
    held = tensor.__dict__
    if type(tensor) is TracedTensor:
        return {name: value for name, value in held.items() if name not in OWN}
    if type(tensor) in _PLAIN:
        return held
    # A subclass of Tensor has its own parts there.
    return {name: value for name, value in held.items() if not name.startswith("_")}


def attribute_keys(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """Return a key for each attribute set on a tensor; the key changes with the value."""
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
