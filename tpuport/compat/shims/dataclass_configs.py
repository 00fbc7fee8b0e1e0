"""`@dataclass` on a transformers configuration, which since version 5 is a dataclass already."""

import dataclasses
import functools
import sys
from typing import Any

from tpuport.compat.emulated.settings import active
from tpuport.foundation.patching.shim import Replacement, Shim


class DataclassConfigs(Shim):
    """`@dataclass` that finds the default factories of a configuration again.

    transformers 5 makes each subclass of `PretrainedConfig` a dataclass at its definition, and a
    dataclass removes `field(default_factory=...)` from the class. The decorator that code written
    for transformers 4 has on the class then sees a field without a default after fields with one.
    """

    TARGET = "dataclasses.dataclass"
    REASON = "code written for transformers 4 fails at import: non-default argument follows default"
    REFERENCE = "the same class over a base that is no dataclass, as PretrainedConfig was"
    MODULE = "dataclasses"

    def replacements(self) -> list[Replacement]:
        original = dataclasses.dataclass

        def dataclass(cls: Any = None, /, **options: Any) -> Any:
            if cls is None:
                return lambda found: dataclass(found, **options)
            if active() is None or not _is_configuration(cls):
                return original(cls, **options)
            _put_back_factories(cls)
            return _positional(original(cls, **options))

        return [Replacement(dataclasses, "dataclass", dataclass)]


def _is_configuration(cls: type) -> bool:
    library = sys.modules.get("transformers.configuration_utils")
    base = getattr(library, "PretrainedConfig", None)
    return isinstance(base, type) and issubclass(cls, base) and not _is_library(cls)


def _is_library(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "transformers"


def _fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()


def _positional(cls: type) -> type:
    """Make a configuration take its own fields by position too, as a dataclass does."""
    by_name: Any = vars(cls).get("__init__")
    library = {f.name for one in cls.__mro__[1:] if _is_library(one) for f in _fields(one)}
    names = [f.name for f in _fields(cls) if f.name not in library and f.init and not f.kw_only]
    if getattr(by_name, "__globals__", {}).get("__name__") != "transformers.configuration_utils":
        return cls  # the class has one of its own

    @functools.wraps(by_name)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(names):
            raise TypeError(f"{cls.__name__} takes {len(names)} arguments, {len(args)} were given")
        if twice := set(kwargs) & set(names[: len(args)]):
            raise TypeError(f"{cls.__name__} got multiple values for argument {min(twice)!r}")
        by_name(self, **dict(zip(names, args, strict=False)), **kwargs)

    cls.__init__ = __init__
    return cls


def _put_back_factories(cls: type) -> None:
    """Set the fields with default factories again, which an earlier `@dataclass` removed."""
    for name, made in vars(cls).get("__dataclass_fields__", {}).items():
        is_own = name in vars(cls).get("__annotations__", {})
        if is_own and name not in vars(cls) and made.default_factory is not dataclasses.MISSING:
            again = dataclasses.field(
                default_factory=made.default_factory,
                init=made.init,
                repr=made.repr,
                hash=made.hash,
                compare=made.compare,
                metadata=made.metadata,
            )
            setattr(cls, name, again)
