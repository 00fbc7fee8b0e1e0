"""Conversion of dataclasses to JSON and back, by their annotations."""

import dataclasses
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def encoded(value: Any) -> Any:
    """Convert dataclasses to dicts of their fields, and tuples to lists."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: encoded(getattr(value, field.name)) for field in fields}
    if isinstance(value, tuple | list):
        return [encoded(item) for item in value]
    if isinstance(value, dict):
        return {str(key): encoded(item) for key, item in value.items()}
    return value


def decoded(kind: type[T], value: Any) -> T:
    """Rebuild a value of type `kind` from what `encoded` returned; missing fields get defaults."""
    return _decoded(kind, value)


def _decoded(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind) if field.name in value]
        made: Any = kind
        return made(**{name: _decoded(hints[name], value[name]) for name in names})
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        some = next(one for one in inner if one is not type(None))
        return None if value is None else _decoded(some, value)
    if origin is tuple:
        return tuple(_decoded(inner[0], item) for item in value)
    if origin is dict:
        return {key: _decoded(inner[1], item) for key, item in value.items()}
    return value
