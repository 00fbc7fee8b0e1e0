"""`as_subclass` of a traced tensor, known below the module that makes the classes.

Such a class is made of the traced tensor's, so its module registers itself here.
"""

from collections.abc import Callable
from typing import Any

import torch

Maker = Callable[[Any, type[torch.Tensor]], Any]

_MAKERS: dict[str, Maker] = {}


def makes(what: str) -> Callable[[Maker], Maker]:
    """Register the function that makes a "view" of a class, or has a class "adopt" a tensor."""

    def register(maker: Maker) -> Maker:
        _MAKERS[what] = maker
        return maker

    return register


class AsSubclass:
    """The methods of a traced tensor by which it becomes one of another class."""

    def as_subclass(self, cls: type[torch.Tensor]) -> Any:
        """Return another view of this tensor, of a class of tensors.

        Raises:
            PortError: the class does more than add Python attributes and methods.
        """
        return _MAKERS["view"](self, cls)

    def _adopted_by(self, kind: type[torch.Tensor]) -> Any:
        """Return this tensor as one of a class; nobody else may hold it."""
        return _MAKERS["adopt"](self, kind)
