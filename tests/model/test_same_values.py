"""Values that are the same for any code that reads them, and those that only look so."""

import array
import ctypes
import enum
import functools
import operator
import re
import struct
import threading
import types
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from tpuport.foundation.pytree.compare import same_value


class Marked(list[Any]):
    factor = 1.0


class Mode(enum.Enum):
    A = "a"
    B = "b"

    def __init__(self, name: str) -> None:
        self.scale = 1.0


def marked(factor: float) -> Marked:
    made = Marked([1])
    made.factor = factor
    return made


NAN = float("nan")


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (0.0, -0.0, False),
        (0j, -0j, False),
        (NAN, float("nan"), True),
        (1, True, False),
        ([1], [1.0], False),
        ({1: 2}, {True: 2}, False),
        ({1: [2]}, {1: [2]}, True),
        ({1}, {1.0}, False),
        ({"a"}, {"a"}, True),
        (marked(1), marked(1), True),
        (marked(1), marked(2), False),
        (deque([1], 2), deque([1], 3), False),
        (slice(0), slice(False), False),
        (torch.zeros(2), -torch.zeros(2), False),
        (torch.tensor([NAN]), torch.tensor([NAN]), True),
        (torch.zeros(()), torch.zeros((), requires_grad=True), False),
        (torch.zeros(2, 3), torch.zeros(3, 2).T, False),
        (np.zeros(2), -np.zeros(2), False),
        (np.array([NAN]), np.array([NAN]), True),
        (np.zeros(2), np.zeros(2, np.float32), False),
    ],
)
def test_values_are_the_same_if_no_code_could_tell_them_apart(a: Any, b: Any, same: bool):
    assert same_value(a, b) is same


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
