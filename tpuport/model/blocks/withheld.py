"""Attributes in which blocks differ: which of them the code of a block reads."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tpuport.model.blocks.alike import Member


class _Buffers(dict[str, Any]):
    """A module's buffers, and beside them attributes that tell when they are read.

    `nn.Module.__getattr__` looks here for what is not in the module's own dict.
    """

    def __init__(self, buffers: Any, hidden: dict[str, Any], read: Callable[[str], None]) -> None:
        super().__init__(buffers)
        self.hidden, self.read = hidden, read

    def __contains__(self, name: Any) -> bool:
        return name in self.hidden or super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        if name in self.hidden:
            self.read(name)
            return self.hidden[name]
        return super().__getitem__(name)


def _note_read(reads: set[tuple[str, str]], fqn: str, name: str) -> None:
    reads.add((fqn, name))


@contextlib.contextmanager
def withheld(member: Member, reads: set[tuple[str, str]]) -> Iterator[None]:
    """Note which of the attributes that differ between blocks the code inside reads."""
    by_module: dict[str, list[str]] = {}
    for fqn, name in member.varying:
        by_module.setdefault(fqn, []).append(name)
    saved: list[tuple[torch.nn.Module, Any, dict[str, Any]]] = []
    for fqn, names in by_module.items():
        module = member.module.get_submodule(fqn)
        # An attribute of the class would be found instead, unnoticed.
        on_class = {name for name in names if hasattr(type(module), name)}
        reads.update((fqn, name) for name in on_class)
        attributes = dict(module.__dict__)
        hidden = {name: module.__dict__.pop(name) for name in names if name not in on_class}
        saved.append((module, module._buffers, attributes))

        read = functools.partial(_note_read, reads, fqn)
        module.__dict__["_buffers"] = _Buffers(module._buffers, hidden, read)
    try:
        yield
    finally:
        for module, buffers, attributes in saved:
            held = module.__dict__
            now = {n: v for n, v in held.items() if n not in ("_buffers",)}
            held.clear()
            held.update({**attributes, **now, "_buffers": buffers})
