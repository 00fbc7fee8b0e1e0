"""Conversion of dataclasses to JSON and back, by their annotations."""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum, EnumType
from functools import cache, partial
from typing import Any, TypeVar

from tpuport.foundation.errors import UsageError

T = TypeVar("T")


def encoded(value: Any) -> Any:
    """Convert a value to what `json.dumps` writes as standard JSON.

    A dataclass becomes a dict of its fields, a tuple a list, an enum its value and a numpy scalar a
    number. A float that JSON cannot hold becomes `"nan"`, `"inf"` or `"-inf"`, which `float` reads.
    """
    if value is None or isinstance(value, str | int):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, tuple | list):
        return [encoded(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): encoded(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        return {name: encoded(getattr(value, name)) for name in _names(type(value))}
    # The base install has no numpy, so its scalars are known by their module.
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return encoded(value.item())
    return value


def decoded(kind: type[T], value: Any) -> T:
    """Rebuild a value of type `kind` from what `encoded` returned; missing fields get defaults.

    Raises:
        KeyError, TypeError, ValueError: the value does not fit the type.
    """
    read = _reader(kind)
    return value if read is None else read(value)


def decoded_text(kind: type[T], text: str, what: str) -> T:
    """Rebuild a value of type `kind` from a file or message that has what `encoded` returned.

    Raises:
        UsageError: the text is not that; the message calls it by the name `what`.
    """
    try:
        return decoded(kind, json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"this is no {what} as JSON: {error}") from None


# Kept by type, as a lint of many files reads thousands of records.
@cache
def _reader(kind: Any) -> Callable[[Any], Any] | None:
    """Return the function that rebuilds values of a type; None if JSON holds them as they are."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is float or isinstance(kind, EnumType):
        return kind
    if dataclasses.is_dataclass(kind):
        return partial(_read_record, kind)
    if origin in (types.UnionType, typing.Union):
        some = next(one for one in inner if one is not type(None))
        return lambda value: None if value is None else decoded(some, value)
    if origin is list:
        return lambda value: [decoded(inner[0], item) for item in value]
    if origin is tuple and inner[-1] is ...:
        return lambda value: tuple(decoded(inner[0], item) for item in value)
    if origin is tuple:
        return lambda value: tuple(decoded(*pair) for pair in zip(inner, value, strict=True))
    if origin is dict:
        return lambda value: {key: decoded(inner[1], item) for key, item in value.items()}
    return None


def _read_record(kind: Any, value: Mapping[str, Any]) -> Any:
    given = {}
    for name, read in _fields(kind).items():
        if name in value:
            given[name] = value[name] if read is None else read(value[name])
    return kind(**given)


@cache
def _fields(kind: type) -> dict[str, Callable[[Any], Any] | None]:
    """Return the reader of each field of a dataclass, by name."""
    hints = typing.get_type_hints(kind)
    return {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)}


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))
