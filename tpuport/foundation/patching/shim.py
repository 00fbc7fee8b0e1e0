"""The base class of shims, and how their replacements are installed and taken back."""

import contextlib
import functools
import importlib
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

from tpuport.foundation.patching.copies import COPIES


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
    # Whether it is for a trace with numbers that are drawn on the host before each call only.
    FOR_DRAWS: ClassVar[bool] = False
    # Options of `porting()` that configure it.
    OPTIONS: ClassVar[tuple[str, ...]] = ()

    def replacements(self) -> list[Replacement]:
        """Return what to replace; called when the shim is installed."""
        raise NotImplementedError

    def copied(self) -> list[Any]:
        """Return the functions of which it replaces the copies in other modules, too."""
        return []


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
    return [
        Replacement(module, name, replacement)
        for module, name in COPIES.of(original)
        if module is not home
    ]


def everywhere(made: Iterable[tuple[Any, str, Callable[[Any], Any]]]) -> list[Replacement]:
    """Return replacements of functions, and of their copies in other modules.

    Args:
        made: for each function its owner, its name, and what makes the replacement of it.
    """
    replaced: list[Replacement] = []
    for owner, name, make in made:
        original = original_of(owner, name)
        function = make(original)
        function._tpuport_original = original
        replaced.append(Replacement(owner, name, function))
        replaced += copies(original, function, owner)
    return replaced


def original_of(owner: Any, name: str) -> Any:
    """Return a function as it is outside of all blocks: one inside of another finds its own."""
    held = getattr(owner, name)
    return getattr(held, "__dict__", {}).get("_tpuport_original", held)


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
        # What a token replaced, by its id: a process has thousands of replacements.
        self._keys: dict[int, list[tuple[int, str]]] = {}

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
                self._keys.setdefault(id(token), []).append(key)
                setattr(item.owner, item.name, item.value)

    def remove(self, token: object) -> None:
        """Take back the replacements that were installed on behalf of `token`."""
        with self._lock:
            for key in reversed(dict.fromkeys(self._keys.pop(id(token), ()))):
                attribute = self._attributes[key]
                attribute.layers = [pair for pair in attribute.layers if pair[0] is not token]
                if attribute.layers:
                    setattr(attribute.owner, attribute.name, attribute.layers[-1][1])
                    continue
                del self._attributes[key]
                if attribute.before is _MISSING:
                    delattr(attribute.owner, attribute.name)
                else:
                    setattr(attribute.owner, attribute.name, attribute.before)

    def original(self, owner: Any, name: str) -> Any:
        """Return what an owner itself holds under a name, without replacements; None if nothing.

        What somebody else has put over a replacement is no replacement.
        """
        with self._lock:
            attribute, held = self._attributes.get((id(owner), name)), vars(owner).get(name)
            if attribute is not None and held is attribute.layers[-1][1]:
                held = attribute.before
        return None if held is _MISSING else held


REPLACED = Replaced()


@contextlib.contextmanager
def installed(shims: Iterable[type[Shim]]) -> Iterator[None]:
    """Install shims for the block.

    Afterwards every attribute is the identical object as before.
    """
    token = object()
    try:
        made = [shim() for shim in shims if shim.MODULE in sys.modules]
        COPIES.look_for_new(original for shim in made for original in shim.copied())
        for shim in made:
            REPLACED.add(token, shim.replacements())
        yield
    finally:
        REPLACED.remove(token)
