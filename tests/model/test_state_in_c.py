"""Values whose state is in no attribute: each block sees what they hold when it is called."""

import array
import ctypes
import decimal
import enum
import functools
import operator
import re
import struct
import threading
import tracemalloc
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.repeated import Block, Stack, port
from tpuport.foundation.pytree.compare import same_value
from tpuport.tracing.guards.watch import Watcher, is_unchanged

VALUES = [1.0, 2.0, 1.0, 3.0, 1.0]


class Mode(enum.Enum):
    A = "a"
    B = "b"

    def __init__(self, name: str) -> None:
        self.scale = 1.0


class Level(int):
    """A number with an attribute."""

    scale = 1.0


class Item:
    """What a set can hold."""

    scale = 1.0


def set_array(value: np.ndarray, scale: float) -> None:
    value[...] = scale


# What is made, how a scale is put there, and how it is read.
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any, float], Any], Callable[[Any], float]]] = {
    "bytearray": (lambda: bytearray(1), lambda v, s: v.__setitem__(0, int(s)), lambda v: v[0]),
    "array": (lambda: array.array("d", [1]), lambda v, s: v.__setitem__(0, s), lambda v: v[0]),
    "memoryview": (
        lambda: memoryview(bytearray(1)),
        lambda v, s: v.__setitem__(0, int(s)),
        lambda v: v[0],
    ),
    "ctypes": (
        lambda: ctypes.c_double(1),
        lambda v, s: setattr(v, "value", s),
        lambda v: v.value,
    ),
    "mapping proxy": (
        lambda: types.MappingProxyType(PROXIED),
        lambda v, s: PROXIED.__setitem__("scale", s),
        lambda v: v["scale"],
    ),
    "member of an enum": (
        lambda: Mode.A,
        lambda v, s: setattr(v, "scale", s),
        lambda v: v.scale,
    ),
    "number": (lambda: Level(1), lambda v, s: setattr(v, "scale", s), lambda v: v.scale),
    "object in a set": (
        lambda: {Item()},
        lambda v, s: setattr(next(iter(v)), "scale", s),
        lambda v: next(iter(v)).scale,
    ),
    "partial": (
        lambda: functools.partial(list, [1.0]),
        lambda v, s: v.args[0].__setitem__(0, s),
        lambda v: v.args[0][0],
    ),
    "partial's state": (
        lambda: functools.partial(float, 1.0),
        lambda v, s: v.__setstate__((float, (s,), {}, {})),
        lambda v: v(),
    ),
    "event": (
        threading.Event,
        lambda v, s: v.set() if s > 1 else v.clear(),
        lambda v: 2.0 if v.is_set() else 1.0,
    ),
    "numpy": (lambda: np.ones(3), set_array, lambda v: float(v[1])),
    "view of numpy": (lambda: np.ones((3, 4))[:, ::2], set_array, lambda v: float(v[1, 1])),
    "numpy of objects": (
        lambda: np.array([1.0, None]),
        lambda v, s: v.__setitem__(0, s),
        lambda v: v[0],
    ),
    "masked numpy": (
        lambda: np.ma.MaskedArray([2.0, 1.0], [False, False]),
        lambda v, s: v.mask.__setitem__(0, s > 1),
        lambda v: float(v.sum()),
    ),
    "shape of numpy": (
        lambda: np.ones((1, 2)),
        lambda v, s: setattr(v, "shape", (1, 2) if s == 1 else (2, 1)),
        lambda v: float(v.shape[0]),
    ),
}
PROXIED = {"scale": 1.0}
HELD: list[Any] = [None]


class Held(Block):
    """Reads what a global list, or an argument, holds."""

    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: torch.Tensor, *given: Any) -> torch.Tensor:
        return super().forward(x) * self.read(given[0] if given else HELD[0])


class Setting(Stack):
    def __init__(self, name: str, how: str) -> None:
        _, _, read = KINDS[name]
        super().__init__(lambda i: Held(read), len(VALUES))
        self.kind, self.how = name, how

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        make, put, _ = KINDS[self.kind]
        HELD[0] = value = make()
        for scale, block in zip(VALUES, self.blocks, strict=True):
            put(value, scale)
            x = block(x, *([value] if self.how == "argument" else []))
        put(value, 1.0)
        return self.head(x)


@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, "global") for name in KINDS), ("bytearray", "argument"), ("number", "argument")],
)
def test_a_value_that_is_changed_between_blocks(name: str, how: str):
    record = port(Setting(name, how))
    assert record.traced in (2, 3)


def test_a_large_array_is_not_copied_at_each_look():
    value = np.zeros(1 << 20)
    records = Watcher()._of(value, 0)
    tracemalloc.start()
    try:
        assert is_unchanged(records)
        assert tracemalloc.get_traced_memory()[1] < value.nbytes / 4
    finally:
        tracemalloc.stop()
    value[-1] = -0.0
    assert not is_unchanged(records)


class Different(Stack):
    """Gives each of its blocks a value of its own."""

    def __init__(self, make: Callable[[float], Any], read: Callable[[Any], float]) -> None:
        super().__init__(lambda i: Held(read), len(VALUES))
        self.make = make

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        for scale, block in zip(VALUES, self.blocks, strict=True):
            x = block(x, self.make(scale))
        return self.head(x)


def leveled(scale: float) -> Level:
    level = Level(1)
    level.scale = scale
    return level


DIFFERENT: dict[str, tuple[Callable[[float], Any], Callable[[Any], float]]] = {
    "partial": (lambda s: functools.partial(float, s), lambda v: v()),
    "itemgetter": (lambda s: operator.itemgetter(int(s)), lambda v: v([0.0, 1.0, 2.0, 3.0])),
    "struct": (lambda s: struct.Struct("d" * int(s)), lambda v: v.size / 8),
    "number": (leveled, lambda v: v.scale),
    "decimal": (
        lambda s: decimal.Decimal("1.0" if s == 1 else "1.00"),
        lambda v: -v.as_tuple().exponent,
    ),
    "zero": (
        lambda s: np.float32(0.0 if s == 1 else -0.0),
        lambda v: float(np.copysign(1, v)),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_value_of_its_own_for_each_block(name: str):
    make, read = DIFFERENT[name]
    different = {read(make(scale)) for scale in VALUES}
    assert len(different) > 1
    assert port(Different(make, read)).traced >= len(different)


class ByAttribute(Held):
    def __init__(self, value: Any, read: Callable[[Any], float]) -> None:
        super().__init__(read)
        self.value = value

    def forward(self, x: torch.Tensor, *given: Any) -> torch.Tensor:
        return Block.forward(self, x) * self.read(self.value)


@pytest.mark.parametrize("name", ["partial", "itemgetter", "struct"])
def test_an_attribute_of_its_own_for_each_block(name: str):
    make, read = DIFFERENT[name]
    scales = iter(VALUES)
    record = port(Stack(lambda i: ByAttribute(make(next(scales)), read), len(VALUES)))
    assert (record.traced, record.reused) == (3, 2)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (functools.partial(print, 1), functools.partial(print, 1), True),
        (functools.partial(print, 1), functools.partial(print, 2), False),
        (functools.partial(dict, a=1), functools.partial(dict, a=1.0), False),
        (operator.attrgetter("a"), operator.attrgetter("b"), False),
        (operator.attrgetter("a"), operator.attrgetter("a"), True),
        (operator.methodcaller("a", 1), operator.methodcaller("a", 2), False),
        (struct.Struct("d"), struct.Struct("f"), False),
        (array.array("d", [1]), array.array("d", [2]), False),
        (array.array("b", [1]), array.array("B", [1]), False),
        (bytearray(b"a"), bytearray(b"a"), True),
        (bytearray(b"a"), bytearray(b"b"), False),
        (types.MappingProxyType({1: 2}), types.MappingProxyType({1: 3}), False),
        (re.compile("a"), re.compile("a", re.I), False),
        (Mode.A, Mode.B, False),
        (ctypes.c_int(1), ctypes.c_int(2), False),
        (threading.Lock(), threading.Lock(), False),
        (np.zeros((2, 3), "f4"), -np.zeros((2, 3), "f4"), False),
        (np.zeros(2, "c16"), np.zeros(2, "c16"), True),
    ],
)
def test_values_in_c_are_the_same_if_they_hold_the_same(a: Any, b: Any, same: bool):
    assert same_value(a, b) is same
