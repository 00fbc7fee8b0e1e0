"""Tensors of a class of the user's: a plain tensor, and what Python keeps beside it."""

import functools
from typing import Any

import torch


class OfClass:
    """A base class of traced tensors that are of a class of the user's.

    It is no `abc.ABC`: tensors have a metaclass of their own.
    """

    def _class_seen_by_code(self) -> type[torch.Tensor]:
        """Return the class that user code sees."""
        raise NotImplementedError

    def _plain_tensor(self) -> torch.Tensor:
        """Return the plain tensor with the same memory, the same one at each call."""
        raise NotImplementedError

    def _attributes_set(self) -> dict[str, Any]:
        """Return the attributes that the user's code has set."""
        raise NotImplementedError

    def _set_attributes(self, held: dict[str, Any]) -> None:
        """Set these attributes, and delete others."""
        raise NotImplementedError


@functools.lru_cache(maxsize=4096)
def is_class_of_tensors(kind: type) -> bool:
    """Return whether a class of tensors is one that adds Python attributes and methods only.

    Torch's own classes and classes that take ATen ops are none; a class of parameters is one.
    """
    if issubclass(kind, OfClass):
        return True
    if not issubclass(kind, torch.Tensor) or kind is torch.nn.Parameter:
        return False
    if kind.__module__.split(".")[0] == "torch" or hasattr(kind, "is_traced"):
        return False
    own, base = (getattr(one, "__torch_dispatch__", None) for one in (kind, torch.Tensor))
    return own is base


def class_seen(value: torch.Tensor) -> type[torch.Tensor]:
    """Return the class of such a tensor, as user code sees it."""
    return value._class_seen_by_code() if isinstance(value, OfClass) else type(value)


def plain_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor with the memory of one of such a class."""
    if isinstance(value, OfClass):
        return value._plain_tensor()
    return as_class(value, torch.Tensor)


def attributes_beside(value: torch.Tensor) -> dict[str, Any]:
    """Return the attributes of a tensor of such a class."""
    return value._attributes_set() if isinstance(value, OfClass) else dict(value.__dict__)


def set_attributes_beside(value: torch.Tensor, held: dict[str, Any]) -> None:
    """Give a tensor of such a class these attributes, and no others."""
    if isinstance(value, OfClass):
        value._set_attributes(held)
        return
    space = vars(value)
    space.clear()
    space.update(held)


def of_class(plain: Any, kind: type[torch.Tensor]) -> Any:
    """Return a plain tensor as one of a class; what has no class, as an array of JAX, as it is."""
    adopted = getattr(plain, "_adopted_by", None)
    if adopted is not None:
        return adopted(kind)
    if not isinstance(plain, torch.Tensor):
        return plain
    return as_class(plain, kind)


def as_class(
    tensor: torch.Tensor, kind: type[torch.Tensor], *, counted: bool = False
) -> torch.Tensor:
    """Return another view of a tensor of the host, of a class, also while a trace runs.

    Args:
        tensor: The tensor.
        kind: The class.
        counted: Whether it is a view of the user's own, which requires no grad under `no_grad`.
    """
    # A mode that sees the op would make a Python object for its result, and there can be but one.
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch.set_grad_enabled(torch.is_grad_enabled() if counted else tensor.requires_grad),
    ):
        return _AS_SUBCLASS(tensor, kind)


def like_class(made: Any, tensor: torch.Tensor) -> Any:
    """Return a copy of a tensor as one of its class, a leaf, with its attributes.

    Args:
        made: The copy, which nobody else holds; a plain one.
        tensor: What it is a copy of.
    """
    if made is tensor or not is_class_of_tensors(type(tensor)) or is_class_of_tensors(type(made)):
        return made
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        copy = _MAKE_SUBCLASS(class_seen(tensor), made, made.requires_grad)
    set_attributes_beside(copy, attributes_beside(tensor))
    return copy


_MAKE_SUBCLASS = torch.Tensor._make_subclass  # type: ignore[attr-defined]
_AS_SUBCLASS = torch.Tensor.as_subclass
