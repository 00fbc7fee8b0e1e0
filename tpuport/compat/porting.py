"""`tpuport.porting`: the block inside which code written for CUDA imports, builds and runs."""

import contextlib
import difflib
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import tpuport.compat.shims
from tpuport.compat.emulated import programs
from tpuport.compat.emulated.device import emulated
from tpuport.compat.emulated.installed import InForce
from tpuport.compat.emulated.process_group import ended_afterwards
from tpuport.compat.emulated.settings import _ACTIVE, _EVERYWHERE, PortingSettings
from tpuport.compat.import_stubs import STAND_INS
from tpuport.compat.imports.import_hook import hook
from tpuport.compat.packages._package import find_packages
from tpuport.foundation.errors import UsageError
from tpuport.foundation.imports import importing
from tpuport.foundation.patching.copies import COPIES
from tpuport.foundation.patching.shim import REPLACED, find_shims


@contextlib.contextmanager
def porting(
    *packages: str,
    paths: Sequence[str | Path] = (),
    absent: Sequence[str] = (),
    eager: Sequence[str] = (),
    methods: Sequence[str] = (),
    verify: bool | str = True,
    rtol: float | None = None,
    port_modules: bool = True,
    fallback: str | None = None,
    **options: Any,
) -> Iterator[PortingSettings]:
    """Make code written for CUDA import, build and run unedited inside the block.

    Blocks may be nested and may run in several threads. An inner block has what its outer one says
    of absent packages, classes, methods and options, too.

    Args:
        *packages: Import names (`"navsim"`) whose modules are rewritten as they are imported.
        paths: Folders below which every module is rewritten too.
        absent: Packages that may be missing: stand-ins satisfy their import and say so when used.
        eager: Names of module classes to leave to eager PyTorch.
        methods: Methods to compile as one program (`"Planner.get_action"`), besides `__call__`.
        verify: Which calls of each program are compared with eager PyTorch: "first" (or True),
            "always", or none (False).
        rtol: Tolerance of that comparison, relative to the largest element.
        port_modules: Whether calls of modules on `"cuda"` become jitted programs. False leaves
            them to eager PyTorch on the CPU, and to your own `tpuport.convert`.
        fallback: "host" lets functions that cannot be traced run on the host inside the programs
            that call them, as in `tpuport.convert`.
        **options: Settings of single shims: `autocast_float16="float16"` (or "bfloat16", which
            is the default), `cuda_version="12.4"` (None if left out), and for provided
            packages such as `flash_attn={"version": "2.6.3"}` and
            `megatron={"sizes": {"tensor_model_parallel": 2}}`.

    Yields:
        The active settings, with the report of what happens in the block (`.report`).

    Raises:
        UsageError: a named package was imported before, no shim has an option of that name, or
            `verify` or `fallback` is none of its choices.
    """
    _check_options(options)
    if verify not in _VERIFY:
        choices = ", ".join(map(repr, _VERIFY))
        raise UsageError(f"porting(verify=...) is one of {choices}; got {verify!r}")
    folders = tuple(Path(path).resolve() for path in paths)
    own = PortingSettings(
        packages, folders, tuple(absent), tuple(eager), tuple(methods), options=options
    )
    if fallback not in (None, "host"):
        raise UsageError(f"porting(fallback=...) is None or 'host'; got {fallback!r}")
    settings = replace(
        own.inside(_ACTIVE.get()),
        verify=verify,
        rtol=rtol,
        port_modules=port_modules,
        fallback=fallback,
    )
    with contextlib.ExitStack() as stack:
        token = _ACTIVE.set(settings)
        stack.callback(_ACTIVE.reset, token)
        _EVERYWHERE.append(settings)
        stack.callback(_forget, settings)
        stack.enter_context(STAND_INS.in_force())
        stack.enter_context(ended_afterwards())
        stack.enter_context(_SHIMS.in_force())
        stack.enter_context(emulated())
        modules = stack.enter_context(hook(settings.packages, settings.paths)).modules
        settings.report.imported = modules
        yield settings


def _check_options(options: dict[str, Any]) -> None:
    known = {*find_packages()}
    known.update(name for shim in find_shims(tpuport.compat.shims) for name in shim.OPTIONS)
    unknown = sorted(options.keys() - known)
    if unknown:
        close = difflib.get_close_matches(unknown[0], [*known, *_OWN_NAMES], 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(known))}"
        msg = f"porting() has no argument {unknown[0]!r}; {hint}"
        raise UsageError(msg)


_VERIFY = (True, False, "first", "always")
_OWN_NAMES = tuple(f.name for f in fields(PortingSettings))


def _forget(settings: PortingSettings) -> None:
    # Not `remove`: equal settings of another context are another entry.
    for index, one in enumerate(_EVERYWHERE):
        if one is settings:
            del _EVERYWHERE[index]
            break
    if not _EVERYWHERE:
        programs.forget()


class _Shims(InForce):
    """The shims of `PORTING` scope, installed once a process while any context is active."""

    def __init__(self) -> None:
        super().__init__()
        self._token = object()
        self._finder = _LateModules(self._shim_late)

    def _install(self) -> None:
        shims = [shim() for shim in find_shims(tpuport.compat.shims)]
        try:
            COPIES.look_for(
                original
                for shim in shims
                if shim.MODULE in sys.modules
                for original in shim.copied()
            )
            for shim in shims:
                if shim.MODULE in sys.modules:
                    REPLACED.add(self._token, shim.replacements())
                else:
                    self._finder.wanted.add(shim.MODULE)
        except BaseException:
            self._uninstall()
            raise
        sys.meta_path.insert(0, self._finder)

    def _uninstall(self) -> None:
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._finder.wanted.clear()
        REPLACED.remove(self._token)

    def _shim_late(self, name: str) -> None:
        with self._lock:
            for shim in find_shims(tpuport.compat.shims) if self._contexts else ():
                if name == shim.MODULE:
                    late = shim()
                    COPIES.look_for(late.copied())
                    REPLACED.add(self._token, late.replacements())


class _LateModules(importlib.abc.MetaPathFinder):
    """A finder that reports when one of the wanted modules has been imported."""

    def __init__(self, loaded: Any) -> None:
        self.wanted: set[str] = set()
        self._loaded = loaded
        self._finding = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of the other finders, with a loader that reports when it is done."""
        if fullname not in self.wanted or getattr(self._finding, "name", None) == fullname:
            return None
        self._finding.name = fullname
        try:
            spec = _find(fullname, path)
        finally:
            self._finding.name = None
        del target
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        if hasattr(loader, "exec_module"):
            spec.loader = _Telling(loader, lambda: self._loaded(fullname))
        return spec


def _find(name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, path, None) if find is not None else None
        if spec is not None:
            return spec
    return None


class _Telling(importlib.abc.Loader):
    """A loader that wraps another one, and reports when a module has been executed."""

    def __init__(self, loader: Any, done: Any) -> None:
        self._loader, self._done = loader, done

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module as the wrapped loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module with the wrapped loader as its own, and report it."""
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader
        module.__loader__ = self._loader
        with importing():  # torch._dynamo, which the first optimizer imports, has 600 modules
            self._loader.exec_module(module)
        self._done()


_SHIMS = _Shims()
