"""The settings of a porting context, and which context is active."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tpuport.compat.emulated.costs import Calls
from tpuport.compat.emulated.report import RunReport


@dataclass
class CallHooks:
    """What is done at the calls of modules that are programs, or that would be.

    Attributes:
        after: Told of each program that has run: its module, the method, and the key of its random
            numbers.
        instead: Runs a call in place of its program: the module, the method, its code, arguments.
        keeps: Told, ahead of `after`, what a program keeps for its backward pass: the arrays.
    """

    after: Callable[[Any, str, Any], None] | None = None
    instead: Callable[[Any, str, Any, Any, Any], Any] | None = None
    keeps: Callable[[list[Any]], None] | None = None


@dataclass(frozen=True)
class PortingSettings:
    """The settings of one `porting()` block.

    Attributes:
        packages: Import names whose modules are rewritten as they are imported.
        paths: Folders below which every module is rewritten as it is imported.
        absent: Packages that may be missing: stand-ins satisfy their import.
        eager: Names of module classes that are left to eager PyTorch.
        methods: Methods that are programs of their own: `Class.method`, or `module:Class.method`.
        verify: Which calls of each program are compared with eager PyTorch, as `porting` says.
        rtol: Tolerance of that comparison; None for the default of the dtype.
        fallback: "host" where functions that cannot be traced run on the host, inside programs.
        port_modules: Whether calls of modules on the accelerator become programs.
        options: The options of single shims and provided packages, by name.
        report: The report of what happens in the block.
        calls: The calls of modules in the block.
        hooks: What is done at those that are programs.
    """

    packages: tuple[str, ...] = ()
    paths: tuple[Path, ...] = ()
    absent: tuple[str, ...] = ()
    eager: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    verify: bool | str = True
    rtol: float | None = None
    port_modules: bool = True
    fallback: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    report: RunReport = field(default_factory=RunReport, compare=False, repr=False)
    calls: Calls = field(default_factory=Calls, compare=False, repr=False)
    hooks: CallHooks = field(default_factory=CallHooks, compare=False, repr=False)

    def inside(self, outer: "PortingSettings | None") -> "PortingSettings":
        """Return these settings with the names and options of an enclosing block added."""
        if outer is None:
            return self
        return replace(
            self,
            absent=(*outer.absent, *self.absent),
            eager=(*outer.eager, *self.eager),
            methods=(*outer.methods, *self.methods),
            options={**outer.options, **self.options},
        )


# Contexts of this thread, and all of the process: a thread that user code starts inside a block has
# no context of its own, and works in the one that was entered last.
_ACTIVE: ContextVar[PortingSettings | None] = ContextVar("active", default=None)
_EVERYWHERE: list[PortingSettings] = []


def active() -> PortingSettings | None:
    """Return the settings of the innermost porting context, or None outside of all."""
    settings = _ACTIVE.get()
    if settings is not None:
        return settings
    return _EVERYWHERE[-1] if _EVERYWHERE else None
