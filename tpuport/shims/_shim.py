"""What a shim file declares, and how shims are put in force and taken back."""

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import tpuport.shims


@dataclass(frozen=True)
class Replacement:
    """One attribute to replace.

    `getattr(owner, name)` becomes `value` while the shim is in force.
    """

    owner: Any
    name: str
    value: Any


class Shim:
    """A replacement of something in another package while a trace runs.

    `TARGET` names what is replaced, `REASON` says why. `module` is the package that must already be
    imported for the shim to apply (nothing is imported for its sake).
    """

    TARGET: ClassVar[str]
    REASON: ClassVar[str]
    MODULE: ClassVar[str] = "torch"

    def replacements(self) -> list[Replacement]:
        """What to replace; called when the shim is put in force."""
        raise NotImplementedError

    @staticmethod
    def count(name: str) -> None:
        """Note a call for the report."""
        from tpuport.model.trace import current

        trace = current()
        if trace is not None:
            trace.counters.shims[name] = trace.counters.shims.get(name, 0) + 1


def find_shims() -> list[type[Shim]]:
    """Every shim class in this folder (files with a leading underscore are not shims)."""
    found: list[type[Shim]] = []
    for info in sorted(pkgutil.iter_modules(tpuport.shims.__path__), key=lambda m: m.name):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"tpuport.shims.{info.name}")
        found += [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, Shim)
            and value.__module__ == module.__name__
        ]
    return found


def copies(original: Any, replacement: Any, home: Any) -> list[Replacement]:
    """`from package import function` made copies in the importing modules: replace those too.

    Args:
        original: the function as its home module holds it.
        replacement: what stands for it.
        home: the module that defines it, which is replaced apart.
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


@contextlib.contextmanager
def installed(shims: list[type[Shim]] | None = None) -> Iterator[None]:
    """Put shims in force for the block.

    Afterwards every attribute is the identical object as before.
    """
    undo: list[tuple[Any, str, Any]] = []
    try:
        for shim in find_shims() if shims is None else shims:
            if shim.MODULE not in sys.modules:
                continue
            for item in shim().replacements():
                # What the owner itself holds, not what it inherits: restoring must not copy an
                # inherited attribute down.
                undo.append((item.owner, item.name, vars(item.owner).get(item.name, _MISSING)))
                setattr(item.owner, item.name, item.value)
        yield
    finally:
        for owner, name, before in reversed(undo):
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
