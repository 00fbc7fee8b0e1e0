"""The base class of shims, and how their replacements are installed and taken back."""

import contextlib
import functools
import importlib
import pkgutil
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar


@dataclass(frozen=True)
class Replacement:
    """One attribute to replace.

    `getattr(owner, name)` becomes `value` while the shim is installed.
    """

    owner: Any
    name: str
    value: Any


class Shim:
    """A replacement of something in another package.

    `TARGET` names what is replaced, `REASON` says why, `REFERENCE` what it equals (a function, an
    equation, upstream's file), with which its test compares it. `MODULE` is the package that must
    already be imported for the shim to apply: nothing is imported for its sake, and one that the
    user's code imports inside `porting()` is shimmed right after the import.

    What user code imported inside `porting()` it keeps afterwards, so a replacement of that scope
    does what the original did when no context is active.
    """

    TARGET: ClassVar[str]
    REASON: ClassVar[str]
    REFERENCE: ClassVar[str] = ""
    MODULE: ClassVar[str] = "torch"
    # Options of `porting()` that configure it.
    OPTIONS: ClassVar[tuple[str, ...]] = ()

    def replacements(self) -> list[Replacement]:
        """Return what to replace; called when the shim is installed."""
        raise NotImplementedError


def find_shims(package: ModuleType) -> tuple[type[Shim], ...]:
    """Return every shim class in a package (files with a leading underscore are no shims)."""
    return _find_shims(package.__name__, tuple(package.__path__))


@functools.cache
def _find_shims(package: str, path: tuple[str, ...]) -> tuple[type[Shim], ...]:
    found: list[type[Shim]] = []
    for info in sorted(pkgutil.iter_modules(path), key=lambda m: m.name):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{package}.{info.name}")
        found += [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, Shim)
            and value.__module__ == module.__name__
        ]
    return tuple(found)


def copies(original: Any, replacement: Any, home: Any) -> list[Replacement]:
    """Return replacements of the copies that `from package import function` made in other modules.

    Args:
        original: the function as its home module holds it.
        replacement: the function to replace it by.
        home: the module that defines it, where the caller replaces it.
    """
    known = _COPIES.get(id(original))
    if known is None or known[0] is not original or known[1] != len(sys.modules):
        places = [
            (module, name)
            for module in list(sys.modules.values())
            if module is not home and isinstance(getattr(module, "__dict__", None), dict)
            for name, value in list(vars(module).items())
            if value is original
        ]
        known = _COPIES[id(original)] = (original, len(sys.modules), places)
    return [
        Replacement(module, name, replacement)
        for module, name in known[2]
        if vars(module).get(name) is original
    ]


# Looking through every module of the process takes longer than tracing a small model.
_COPIES: dict[int, tuple[Any, int, list[tuple[Any, str]]]] = {}

_MISSING = object()


@dataclass
class _Attribute:
    """One replaced attribute: its original value, and the active replacements (the last wins)."""

    owner: Any
    name: str
    before: Any
    layers: list[tuple[object, Any]] = field(default_factory=list)


class Replaced:
    """The attributes replaced in this process.

    Blocks that replace the same attribute may overlap in any order, in one thread or in several. A
    block that ends removes its own layer, and the last one restores the identical object.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._attributes: dict[tuple[int, str], _Attribute] = {}

    def add(self, token: object, items: Iterable[Replacement]) -> None:
        """Install replacements on behalf of `token`."""
        with self._lock:
            for item in items:
                key = (id(item.owner), item.name)
                attribute = self._attributes.get(key)
                if attribute is None:
                    # The owner's own value, not an inherited one: restoring must not copy an
                    # inherited attribute down.
                    before = vars(item.owner).get(item.name, _MISSING)
                    attribute = _Attribute(item.owner, item.name, before)
                    self._attributes[key] = attribute
                attribute.layers.append((token, item.value))
                setattr(item.owner, item.name, item.value)

    def remove(self, token: object) -> None:
        """Take back the replacements that were installed on behalf of `token`."""
        with self._lock:
            for key, attribute in reversed(list(self._attributes.items())):
                if not any(owner is token for owner, _ in attribute.layers):
                    continue
                attribute.layers = [pair for pair in attribute.layers if pair[0] is not token]
                if attribute.layers:
                    setattr(attribute.owner, attribute.name, attribute.layers[-1][1])
                    continue
                del self._attributes[key]
                if attribute.before is _MISSING:
                    delattr(attribute.owner, attribute.name)
                else:
                    setattr(attribute.owner, attribute.name, attribute.before)


REPLACED = Replaced()


@contextlib.contextmanager
def installed(shims: Iterable[type[Shim]]) -> Iterator[None]:
    """Install shims for the block.

    Afterwards every attribute is the identical object as before.
    """
    token = object()
    try:
        for shim in shims:
            if shim.MODULE in sys.modules:
                REPLACED.add(token, shim().replacements())
        yield
    finally:
        REPLACED.remove(token)
