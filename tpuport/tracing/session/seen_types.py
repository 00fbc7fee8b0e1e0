"""`type(x)` and `isinstance(x, ...)` in user code while a trace runs: what they are in eager."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tpuport.foundation.pytree.sealed import Sealed, note
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.row_list import ListLike
from tpuport.tracing.core.sym_node import NumberNode
from tpuport.tracing.core.tensor import TracedTensor

_KINDS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def seen_type(value: Any) -> Any:
    """Return the type of a value; of a traced tensor or number the one that eager code sees."""
    if isinstance(value, (TracedTensor, ListLike)):
        return value.__class__
    if isinstance(value, sym_numbers.SYMBOLIC) and isinstance(value.node, NumberNode):
        return _KINDS[type(value)]
    found = type(value)
    if issubclass(found, Sealed):
        note(found, "type")
    return SeenType if found in (type, _SeenMeta) else found


def seen_isinstance(value: Any, kinds: Any, /) -> bool:
    """Return whether a value is an instance; of a traced number what eager code sees."""
    if isinstance(value, sym_numbers.SYMBOLIC) and isinstance(value.node, NumberNode):
        return issubclass(_KINDS[type(value)], kinds) or isinstance(value, kinds)
    found = type(value)
    if issubclass(found, Sealed):
        note(found, "isinstance")
    return isinstance(value, kinds)


class _SeenMeta(type):
    """Has `SeenType` stand for Python's `type` wherever code uses that."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not SeenType:
            return super().__call__(*args, **kwargs)
        return seen_type(*args) if len(args) == 1 and not kwargs else type(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return (
            isinstance(instance, type) if cls is SeenType else super().__instancecheck__(instance)
        )

    def __subclasscheck__(cls, subclass: type) -> bool:
        return (
            issubclass(subclass, type) if cls is SeenType else super().__subclasscheck__(subclass)
        )

    def __eq__(cls, other: object) -> bool:
        return other is cls or (cls is SeenType and other is type)

    def __hash__(cls) -> int:
        return hash(type) if cls is SeenType else super().__hash__()


class SeenType(type, metaclass=_SeenMeta):
    """Python's `type`, as the code of a trace calls it."""


_SEEN = {"type": SeenType, "isinstance": seen_isinstance}


@contextlib.contextmanager
def seen_in(namespaces: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Let the code of some namespaces call these functions by Python's names in the block."""
    shadowed = [(space, name) for space in namespaces for name in _SEEN if name not in space]
    for space, name in shadowed:
        space[name] = _SEEN[name]
    try:
        yield
    finally:
        for space, name in shadowed:
            space.pop(name, None)
