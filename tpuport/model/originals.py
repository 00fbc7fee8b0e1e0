"""Tensors that the module which was converted keeps in plain attributes, and the port writes to.

What a program only reads there is the tensor of the original module: a script that writes to it
changes what the next call reads, as in eager PyTorch. A tensor that calls write to is the port's
own from the first of them on, as parameters and buffers are from the beginning.
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tpuport.tracing.core.guards import NotedTensor


class OriginalWrittenWarning(UserWarning):
    """A script writes to a tensor of the original module, of which the port has its own."""


class Originals:
    """The tensors in plain attributes of the module that was converted.

    Args:
        name: the class of the module.
        leaves: its state by name.
        registered: the names of parameters and buffers, which do not count.
    """

    def __init__(self, name: str, leaves: Mapping[str, Any], registered: Iterable[str]) -> None:
        self._name = name
        plain = {n: t for n, t in leaves.items() if n not in registered}
        self._begun = {
            n: NotedTensor(t)
            for n, t in plain.items()
            if isinstance(t, torch.Tensor) and t.device.type == "cpu"
        }
        for noted in self._begun.values():
            noted.share()
        self._own: dict[str, NotedTensor] = {}

    def part(self, name: str) -> None:
        """Note that the port has a tensor of its own now."""
        noted = self._begun.pop(name, None)
        if noted is not None:
            self._own[name] = noted

    def part_all(self) -> None:
        """Note that the port has all of them as its own now."""
        for name in list(self._begun):
            self.part(name)

    def warn(self) -> None:
        """Warn, once for each tensor, of one that was written in the original module."""
        for name in [n for n, noted in self._own.items() if noted.is_written()]:
            del self._own[name]
            warnings.warn(
                f"{name!r} of the {self._name} was written after the module was converted, and the"
                " port has a value of its own, as of parameters and buffers: its calls write to it,"
                " too, or ported.module was asked for. What to do: write to"
                f" ported.module.{name} instead",
                OriginalWrittenWarning,
                stacklevel=2,
            )
