"""The base class of provided packages."""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, ClassVar

import tpuport.compat.packages
from tpuport.compat.emulated.settings import active


class Package:
    """A package of CUDA kernels that is provided in plain PyTorch inside `porting()`.

    `NAME` is the import name, `DISTRIBUTION` the name for `importlib.metadata`, and
    `VERSION` the release whose signatures are followed. `TARGET`, `REASON` and `REFERENCE` are as
    in a shim: what is replaced, why, and what it equals.

    Most are used even where the CUDA package is installed. One with `IF_MISSING` is served only if
    it is not, and only to code that cannot do without it, as a stand-in is.

    User code keeps what it imported, which still works after the block.
    """

    NAME: ClassVar[str]
    DISTRIBUTION: ClassVar[str]
    VERSION: ClassVar[str]
    TARGET: ClassVar[str]
    REASON: ClassVar[str]
    REFERENCE: ClassVar[str]
    IF_MISSING: ClassVar[bool] = False

    def modules(self) -> dict[str, dict[str, Any]]:
        """Return the attributes of each module by its full name, `NAME` itself included."""
        raise NotImplementedError

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Return the options that `porting(name={...})` has for this package."""
        settings = active()
        return dict(settings.options.get(cls.NAME) or {}) if settings is not None else {}

    def serves(self) -> bool:
        """Return whether the import that runs now is answered; asked of packages that are always
        served, in place of an installed one.
        """
        return True

    def explain(self, error: Exception) -> None:
        """Add a note to an error that ends a script, if it may come from not having the package."""

    def begin(self) -> None:
        """Set up what the package needs: it was imported in this block for the first time."""

    def end(self) -> None:
        """Undo `begin`, at the end of the last block."""

    @classmethod
    def version(cls) -> str:
        """Return the version that it reports: `VERSION`, unless the user asked for another."""
        return str(cls.options().get("version", cls.VERSION))


@functools.cache
def find_packages() -> MappingProxyType[str, type[Package]]:
    """Find every provided package, by its import name."""
    found: dict[str, type[Package]] = {}
    for info in sorted(
        pkgutil.iter_modules(tpuport.compat.packages.__path__), key=lambda m: m.name
    ):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"tpuport.compat.packages.{info.name}")
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and issubclass(value, Package)
                and value.__module__ == module.__name__
            ):
                found[value.NAME] = value
    return MappingProxyType(found)


def named(*functions: Callable[..., Any]) -> dict[str, Any]:
    """Return functions and classes by their own names."""
    return {function.__name__: function for function in functions}
