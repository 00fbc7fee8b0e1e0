"""The abstract values that the inference computes for expressions of a traced function."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpuport.source.inference.classes import ClassInfo
    from tpuport.source.syntax.module import Function


class Kind(Enum):
    """The kind of an expression while its program is traced."""

    TRACED = "traced"
    HOST = "host"
    UNKNOWN = "unknown"


class Form(Enum):
    """The type of a value, as far as it is known."""

    ANY = "any"
    TENSOR = "tensor"
    MASK = "mask"  # a tensor of dtype bool
    NONE = "none"
    ARRAY = "array"  # of numpy
    SEQUENCE = "sequence"  # list or tuple; its items are known, or one represents all
    MAPPING = "mapping"  # a dictionary by names; one value represents all
    MODULE = "module"  # an nn.Module that can be called
    INSTANCE = "instance"  # of a class of this file
    CLASS = "class"
    FUNCTION = "function"  # of this file


@dataclass(frozen=True, slots=True)
class Value:
    """An abstract value.

    Attributes:
        kind: Whether it is traced. Containers of traced values are UNKNOWN, because their truth
            value and length are Python's.
        form: The type of the value.
        items: The items of a sequence, if their number is known.
        item: The value that represents every item of a sequence, if their number is not known, or
            every value of a mapping.
        owner: The class of an instance or bound method, or the class itself.
        function: The definition of a function.
    """

    kind: Kind
    form: Form = Form.ANY
    items: "tuple[Value, ...] | None" = None
    item: "Value | None" = None
    owner: "ClassInfo | None" = None
    function: "Function | None" = None

    @property
    def is_tensor(self) -> bool:
        """Return whether the value is known to be a tensor, traced or not."""
        return self.form is Form.TENSOR or self.form is Form.MASK


UNKNOWN = Value(Kind.UNKNOWN)
HOST = Value(Kind.HOST)
NONE = Value(Kind.HOST, Form.NONE)
TRACED = Value(Kind.TRACED, Form.TENSOR)
TRACED_NUMBER = Value(Kind.TRACED)
MASK = Value(Kind.TRACED, Form.MASK)
HOST_TENSOR = Value(Kind.HOST, Form.TENSOR)
HOST_MASK = Value(Kind.HOST, Form.MASK)
ARRAY = Value(Kind.HOST, Form.ARRAY)
MODULE = Value(Kind.UNKNOWN, Form.MODULE)
TRACED_SEQUENCE = Value(Kind.UNKNOWN, Form.SEQUENCE, item=TRACED)


def sequence(items: Sequence[Value]) -> Value:
    """Return the value of a list or tuple of known items."""
    kind = Kind.HOST if all(item.kind is Kind.HOST for item in items) else Kind.UNKNOWN
    return Value(kind, Form.SEQUENCE, items=tuple(items))


def sequence_of(item: Value) -> Value:
    """Return the value of a list or tuple with an unknown number of such items."""
    kind = Kind.HOST if item.kind is Kind.HOST else Kind.UNKNOWN
    return Value(kind, Form.SEQUENCE, item=item)


def item_of(value: Value, index: int | None = None) -> Value:
    """Return the result of indexing a value with a number, or of iterating over it."""
    if value.form is Form.SEQUENCE:
        if value.items is None:
            return value.item or UNKNOWN
        if index is not None:
            return value.items[index] if -len(value.items) <= index < len(value.items) else UNKNOWN
        return join(value.items)
    if value.form is Form.MAPPING:
        return HOST  # its keys
    if value.kind is Kind.TRACED:
        return value
    if value.form in (Form.MODULE, Form.INSTANCE):
        return MODULE
    return HOST if value.kind is Kind.HOST else UNKNOWN


def join(values: Iterable[Value]) -> Value:
    """Join the values that a name may have. None is left out unless it is the only one."""
    found: Value | None = None
    for value in values:
        if value is NONE:
            continue
        if found is None:
            found = value
        elif found != value:
            found = _join_two(found, value)
    return NONE if found is None else found


def _join_two(first: Value, second: Value) -> Value:
    if first.form is second.form is Form.SEQUENCE:
        return _join_sequences(first, second)
    callable_forms = (Form.MODULE, Form.INSTANCE)
    if first.form in callable_forms and second.form in callable_forms:
        return MODULE
    if first.kind is not second.kind:
        return UNKNOWN
    if first.is_tensor and second.is_tensor:
        return TRACED if first.kind is Kind.TRACED else HOST_TENSOR
    return {Kind.TRACED: TRACED_NUMBER, Kind.HOST: HOST, Kind.UNKNOWN: UNKNOWN}[first.kind]


def _join_sequences(first: Value, second: Value) -> Value:
    if first.items is not None and second.items is not None:
        if len(first.items) == len(second.items):
            pairs = zip(first.items, second.items, strict=True)
            return sequence([join(pair) for pair in pairs])
    # An empty list that was filled says nothing about its items.
    return sequence_of(join(item_of(value) for value in (first, second) if value.items != ()))


def contains_traced(value: Value) -> bool:
    """Return whether a value is traced or is a sequence that holds something traced."""
    if value.form is Form.SEQUENCE:
        return any(map(contains_traced, value.items or ([value.item] if value.item else [])))
    return value.kind is Kind.TRACED


def combine(values: Sequence[Value]) -> Value:
    """Return the result of an operation on values: traced if one is, host if all are."""
    tensor = False
    known = True
    for value in values:
        if value.kind is Kind.TRACED or (value.form is Form.SEQUENCE and contains_traced(value)):
            return TRACED
        tensor = tensor or value.is_tensor
        known = known and value.kind is Kind.HOST
    if not known:
        return UNKNOWN
    return HOST_TENSOR if tensor else HOST
