"""The attributes of a traced tensor that user code sets, and of its copies."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from tpuport.foundation.pytree.tensor_classes import OfClass


class SetAttributes(dict[str, Any]):
    """The attributes that user code has set on a tensor; a change of this dict sets them, too.

    A tensor of fastai takes a copy of the `__dict__` of another, and one of MONAI is updated by it.
    What the tracer keeps in a tensor is in neither.
    """

    def __init__(self, tensor: OfClass) -> None:
        super().__init__(tensor._attributes_set())
        self._tensor = tensor

    def _changed(self) -> None:
        self._tensor._set_attributes(dict(self))

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._changed()

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._changed()

    def __ior__(self, other: Any) -> "SetAttributes":  # type: ignore[override]
        self.update(other)
        return self

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Set attributes."""
        super().update(*args, **kwargs)
        self._changed()

    def setdefault(self, name: str, default: Any = None) -> Any:  # type: ignore[override]
        """Return an attribute, set first if there is none."""
        found = super().setdefault(name, default)
        self._changed()
        return found

    def pop(self, *args: Any) -> Any:
        """Delete an attribute and return it."""
        found = super().pop(*args)
        self._changed()
        return found

    def popitem(self) -> tuple[str, Any]:
        """Delete the last attribute and return it."""
        found = super().popitem()
        self._changed()
        return found

    def clear(self) -> None:
        """Delete all attributes."""
        super().clear()
        self._changed()

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


def as_copy(
    source: torch.Tensor, made: torch.Tensor, copied: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Return a leaf with the flag and the attributes of the tensor that it is a copy of."""
    if source.requires_grad:
        made.requires_grad_()
    held = vars(source)
    for name in ("_is_param", *(n for n in held if not n.startswith("_"))):
        if name in held:
            setattr(made, name, copied(held[name]))
    return made
