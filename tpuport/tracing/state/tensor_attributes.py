"""Attributes that a script has set on tensors: `weight.scale = 2`, mup's `weight.infshape`."""

from collections.abc import Iterator, Mapping
from typing import Any

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
    return held


def attribute_keys(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """Return a key for each attribute set on a tensor; it is another one if the value changes."""
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
