"""Packages that a TPU host lacks: some are provided, others only satisfy their import.

Provided packages (`tpuport/compat/packages/`) compute what the CUDA package computes. A stand-in
(`absent.py`) is served for a package that is named as absent, or that only CUDA hosts can install,
and only where the importing code cannot do without: an import inside `try` with a handler for
ImportError takes the handler, and `find_spec` and `importlib.metadata` say that nothing is there.
A package that is installed is never replaced by a stand-in.
"""

import builtins
import importlib.abc
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from tpuport.compat.emulated.installed import InForce
from tpuport.compat.emulated.settings import active
from tpuport.compat.imports.later_finders import ask_later
from tpuport.compat.imports.missing_packages import StandInModule
from tpuport.compat.imports.optional_imports import copes, importing_frame
from tpuport.compat.packages._package import Package, find_packages
from tpuport.foundation.cuda_only import is_cuda_only
from tpuport.foundation.patching.shim import REPLACED, Replacement
from tpuport.foundation.user_frames import is_inside


class _Loader(importlib.abc.Loader):
    """A loader of a module made here and the modules below it, which are recorded."""

    def __init__(
        self, module: ModuleType, made: dict[str, ModuleType], below: Iterable[str] = ()
    ) -> None:
        self._module, self._made, self._below = module, made, below

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that was made."""
        del spec
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Record the module, so that it leaves `sys.modules` with the context."""
        self._made[module.__name__] = module
        package = find_packages().get(module.__name__)
        if package is not None:
            package().begin()
        for name in self._below:
            importlib.import_module(name)


class _Provided(importlib.abc.MetaPathFinder):
    """The finder of provided packages, which comes before those of installed ones."""

    def __init__(self, made: dict[str, ModuleType]) -> None:
        self._made = made

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of a provided package."""
        del path, target
        package = find_packages().get(fullname.partition(".")[0])
        if package is None or package.IF_MISSING or active() is None:
            return None
        return _provide(package, fullname, self._made) if package().serves() else None

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        """Find the provided packages' metadata for `importlib.metadata`."""
        wanted = getattr(context, "name", None)
        for package in find_packages().values() if active() is not None else ():
            if package.IF_MISSING or not package().serves():
                continue
            if wanted is None or _plain(wanted) == _plain(package.DISTRIBUTION):
                yield _Distribution(package)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


class _Distribution(importlib.metadata.Distribution):
    """The metadata of a provided package."""

    def __init__(self, package: type[Package]) -> None:
        self._package = package

    def read_text(self, filename: str) -> str | None:
        """Return the text of METADATA or top_level.txt, None for other files."""
        package = self._package
        if filename == "METADATA":
            head = "Metadata-Version: 2.1"
            return f"{head}\nName: {package.DISTRIBUTION}\nVersion: {package.version()}\n"
        return f"{package.NAME}\n" if filename == "top_level.txt" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """Return where a file of the package would be."""
        return Path(__file__).parent / path


def _provide(package: type[Package], name: str, made: dict[str, ModuleType]) -> ModuleSpec | None:
    """Return the spec of a module of a provided package, or None if it has no such module."""
    modules = package().modules()
    if name not in modules:
        return None
    module = ModuleType(name, package.__doc__)
    vars(module).update(modules[name])
    below = [other for other in modules if other.rpartition(".")[0] == name]
    origin = f"provided by tpuport ({package.__module__})"
    return _package_spec(name, _Loader(module, made, below), origin)


def _package_spec(name: str, loader: _Loader, origin: str) -> ModuleSpec:
    spec = ModuleSpec(name, loader, origin=origin, is_package=True)
    spec.submodule_search_locations = []
    return spec


class _Absent(importlib.abc.MetaPathFinder):
    """The finder of stand-ins, which comes last and so only sees what is not installed.

    A program may append a finder of its own after it: that one is asked before an answer is given.
    """

    def __init__(self, made: dict[str, ModuleType], guard: Callable[[], None]) -> None:
        self._made, self._guard = made, guard

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a stand-in, or None where the import may fail."""
        frame, imports = importing_frame()
        if not imports or frame is None or active() is None:
            return None
        if is_inside(frame.f_code.co_filename) or copes(frame):
            return None
        later = ask_later(self, fullname, path, target)
        if later is not None:
            return later
        package = find_packages().get(fullname.partition(".")[0])
        spec = _provide(package, fullname, self._made) if package is not None else None
        if spec is not None:
            return spec
        if is_named(fullname) or is_cuda_only(fullname):
            self._guard()
            loader = _Loader(StandInModule(fullname), self._made)
            return _package_spec(fullname, loader, "stand-in for a package that is not installed")
        if "." not in fullname:
            raise _not_found(fullname)
        return None


def is_named(name: str) -> bool:
    """Return whether the user says that a module, its package or a part of it may be missing."""
    settings = active()
    return settings is not None and any(
        f"{name}.".startswith(f"{one}.") or f"{one}.".startswith(f"{name}.")
        for one in settings.absent
    )


def _not_found(name: str) -> ModuleNotFoundError:
    error = ModuleNotFoundError(f"No module named {name!r}", name=name)
    error.add_note(
        f"tpuport: install {name}, or, if the program only names it, let a stand-in satisfy the"
        f' import: tpuport run --absent {name} ..., or porting(absent=["{name}"])'
    )
    return error


class StandIns(InForce):
    """The finders of both kinds; uninstalling them clears their modules from `sys.modules`."""

    def __init__(self) -> None:
        super().__init__()
        self._guarding = False
        self._token = object()
        self._made: dict[str, ModuleType] = {}
        self._hidden: dict[str, ModuleType] = {}
        self._finders = (_Provided(self._made), _Absent(self._made, self._guard_imports))

    def _install(self) -> None:
        provided = {one for one, package in find_packages().items() if not package.IF_MISSING}
        for name in [one for one in list(sys.modules) if one.partition(".")[0] in provided]:
            self._hidden[name] = sys.modules.pop(name)
        sys.meta_path.insert(0, self._finders[0])
        sys.meta_path.append(self._finders[1])
        find_spec = _find_spec_of(importlib.util.find_spec)
        REPLACED.add(self._token, [Replacement(importlib.util, "find_spec", find_spec)])

    def _guard_imports(self) -> None:
        # Not before the first stand-in: it adds a frame to the traceback of each import.
        with self._lock:
            if not self._guarding:
                self._guarding = True
                guard = _import_of(builtins.__import__)
                REPLACED.add(self._token, [Replacement(builtins, "__import__", guard)])

    def _uninstall(self) -> None:
        REPLACED.remove(self._token)
        self._guarding = False
        for finder in self._finders:
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)
        for name, module in self._made.items():
            if name in find_packages():
                find_packages()[name]().end()
            if sys.modules.get(name) is module:
                del sys.modules[name]
            parent, _, last = name.rpartition(".")
            holder = sys.modules.get(parent)
            if holder is not None and vars(holder).get(last) is module:
                delattr(holder, last)
        self._made.clear()
        sys.modules.update(self._hidden)
        self._hidden.clear()


def _import_of(original: Any) -> Any:
    """Return an `__import__` that lets a guarded import of a stand-in fail.

    Without it the import would succeed, once another import has put the stand-in in `sys.modules`.
    """

    def __import__(
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        if level == 0 and isinstance(sys.modules.get(name.partition(".")[0]), StandInModule):
            frame = sys._getframe(1)
            if is_inside(frame.f_code.co_filename) or copes(frame):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, globals, locals, fromlist, level)

    return __import__


def _find_spec_of(original: Any) -> Any:
    """Return an `importlib.util.find_spec` that finds no stand-ins."""

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        full = importlib.util.resolve_name(name, package)
        root = full.partition(".")[0]
        if isinstance(sys.modules.get(root), StandInModule):
            if root == full:
                return None
            raise ModuleNotFoundError(f"No module named {root!r}", name=root)
        if isinstance(sys.modules.get(full), StandInModule):
            return None
        return original(name, package)

    return find_spec


STAND_INS = StandIns()
