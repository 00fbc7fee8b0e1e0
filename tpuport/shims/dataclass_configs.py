"""`@dataclass` on a transformers configuration, which since version 5 is a dataclass already."""

import dataclasses
import sys
from typing import Any

from tpuport.running.settings import active
from tpuport.shims._shim import Replacement, Scope, Shim


class DataclassConfigs(Shim):
    """`@dataclass` that finds the default factories of a configuration again.

    transformers 5 makes each subclass of `PretrainedConfig` a dataclass as it is defined, and a
    dataclass takes `field(default_factory=...)` out of the class. The decorator that code written
    for transformers 4 has on the class then sees a field without a default after fields with one.
    """

    TARGET = "dataclasses.dataclass"
    REASON = "code written for transformers 4 fails at import: non-default argument follows default"
    REFERENCE = "the same class over a base that is no dataclass, as PretrainedConfig was"
    MODULE = "dataclasses"
    SCOPE = Scope.PORTING

    def replacements(self) -> list[Replacement]:
        original = dataclasses.dataclass

        def dataclass(cls: Any = None, /, **options: Any) -> Any:
            if cls is None:
                return lambda found: dataclass(found, **options)
            if active() is not None and _is_configuration(cls):
                _put_back_factories(cls)
            return original(cls, **options)

        return [Replacement(dataclasses, "dataclass", dataclass)]


def _is_configuration(cls: type) -> bool:
    library = sys.modules.get("transformers.configuration_utils")
    base = getattr(library, "PretrainedConfig", None)
    own = cls.__module__.partition(".")[0] == "transformers"
    return isinstance(base, type) and issubclass(cls, base) and not own


def _put_back_factories(cls: type) -> None:
    """The fields of a class as its body gave them, for those that a dataclass took out of it."""
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
