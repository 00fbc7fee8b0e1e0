"""The import hook that rewrites modules by the safe rules, and forgets them afterwards."""

import contextlib
import os
import sys
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, NamespaceLoader, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from tpuport.compat.imports.later_finders import ask_later
from tpuport.compat.imports.rewritten import Rewritten, default_cache_dir, rewritten
from tpuport.foundation.errors import UsageError
from tpuport.lint.cache import Cache
from tpuport.source.rewrite.matching import normal_line_breaks
from tpuport.source.syntax.text import SourceText

_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD_LIBRARY = os.path.join(os.path.realpath(sysconfig.get_path("stdlib")), "")
_OWN = "tpuport"


@dataclass(frozen=True)
class Imported:
    """The outcome for one module that was to be rewritten.

    Attributes:
        name: The module.
        file: Its file.
        applied: The fixes, each as its rule's code and its line.
        left: Findings that stay, each as its rule's code, its line and the reason.
        reason: Why the file was imported unchanged; empty where the rules have read it.
    """

    name: str
    file: str
    applied: tuple[tuple[str, int], ...] = ()
    left: tuple[tuple[str, int, str], ...] = ()
    reason: str = ""


class RewrittenLoader(SourceFileLoader):
    """A loader that runs rewritten code; the source that tracebacks quote stays the user's."""

    def __init__(self, fullname: str, path: str, made: Rewritten) -> None:
        super().__init__(fullname, path)
        self._made = made

    def get_code(self, fullname: str) -> CodeType:
        """Return the rewritten code, bypassing Python's own cache of bytecode."""
        del fullname
        assert self._made.code is not None
        return self._made.code

    @property
    def rewritten_text(self) -> SourceText:
        """Return the text that the code was compiled from, for `tpuport.source.rewrite.live`."""
        source = normal_line_breaks(self.get_source(self.name) or "")
        original = dict(enumerate(source.split("\n"), 1))
        return SourceText(self._made.text, self._made.origins, original)


class ImportHook(MetaPathFinder):
    """A finder that asks the finders after it, and rewrites the modules that it covers.

    Only modules in plain Python files are rewritten; other loaders are left alone.

    Args:
        packages: Import names; each covers the package and everything below it.
        paths: Files, and folders of which everything below is covered but what is installed there
            (`site-packages`).
        cache: The cache of rewritten files.

    Attributes:
        modules: The outcome for each module that is covered, in the order of import.
    """

    def __init__(
        self, packages: Collection[str], paths: Collection[str | Path], cache: Cache
    ) -> None:
        self.modules: list[Imported] = []
        self._packages = tuple(packages)
        self._paths = tuple(os.path.realpath(path) for path in paths)
        self._cache = cache
        self._found: dict[str, None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the finders after this one, with a rewriting loader if covered."""
        is_own = fullname.partition(".")[0] == _OWN
        if is_own or not (self._paths or self._is_named(fullname)):
            return None
        if target is not None and not self.has_loaded(fullname):
            # A reload of a module from before the block, which must outlive the block unchanged.
            return None
        spec = ask_later(self, fullname, path, target)
        if spec is None:
            return None
        if spec.loader is None or isinstance(spec.loader, NamespaceLoader):
            folders = list(spec.submodule_search_locations or ())
            if any(self.covers(fullname, folder) for folder in folders):
                self._found[fullname] = None
        elif type(spec.loader) is SourceFileLoader and self.covers(fullname, spec.loader.path):
            self._found[fullname] = None
            made = self.loader(fullname, spec.loader.path)
            spec.loader = _in_place_of(spec.loader, made)
        return spec

    def covers(self, name: str, file: str) -> bool:
        """Return whether a module is to be rewritten."""
        if self._is_named(name):
            return True
        file = os.path.realpath(file)
        return any(_is_below(file, path) for path in self._paths)

    def loader(self, name: str, file: str) -> SourceFileLoader:
        """Return a loader for a covered file: the plain one if there is nothing to rewrite."""
        made = self._rewritten(file)
        self.modules.append(Imported(name, file, made.applied, made.left, made.reason))
        if made.code is None:
            return SourceFileLoader(name, file)
        return RewrittenLoader(name, file, made)

    def has_loaded(self, name: str) -> bool:
        """Return whether a loaded module came through this hook."""
        return name in self._found

    def takes_over(self, name: str) -> bool:
        """Return whether a loaded module would have come through this hook."""
        file = getattr(sys.modules.get(name), "__file__", None)
        return self._is_named(name) or (file is not None and self.covers(name, file))

    def forget(self) -> None:
        """Drop the modules that came through this hook, so that a later import reads the files.

        A module that another installed hook covers too stays until that hook is removed.
        """
        for name in list(self._found):
            heir = next((one for one in _in_force() if one.takes_over(name)), None)
            if heir is not None:
                heir._found[name] = None
                continue
            module = sys.modules.pop(name, None)
            parent, _, child = name.rpartition(".")
            around = getattr(sys.modules.get(parent), "__dict__", {})
            if module is not None and around.get(child) is module:
                delattr(sys.modules[parent], child)
        self._found.clear()

    def _is_named(self, module: str) -> bool:
        return any(module == name or module.startswith(f"{name}.") for name in self._packages)

    def _rewritten(self, file: str) -> Rewritten:
        try:
            with open(file, "rb") as source:
                data = source.read()
        except OSError as error:
            return Rewritten(reason=f"cannot be read: {error.strerror or error}")
        return rewritten(data, file, self._cache)


@contextlib.contextmanager
def hook(
    packages: Collection[str] = (),
    paths: Collection[str | Path] = (),
    *,
    cache_dir: Path | None = None,
) -> Iterator[ImportHook]:
    """Rewrite modules as they are imported inside the block.

    The rules applied are those of `tpuport rewrite`, but for the ones about CUDA and process groups
    (TPU5xx), whose calls the shims answer. Each file is read by itself: a function that only a step
    in another file reaches is left to `convert`, which rewrites it when a trace needs it.

    Afterwards the finder is gone, and so are the modules that came through it, so that a later
    import gives the unchanged file; objects made from them live on, but cannot be pickled.

    Args:
        packages: Import names (`"navsim"`). Named, an installed package is rewritten, too.
        paths: Files, and folders of which all is covered but `site-packages`.
        cache_dir: Folder of rewritten files; one in the user's cache folder if left out.

    Yields:
        The hook, which has the account of what was rewritten.

    Raises:
        UsageError: a name is no import name, a path leads nowhere, or a package was imported
            before: its modules hold each other, so it cannot be rewritten now. Below a path,
            modules that are loaded already stay unchanged.
    """
    for name in packages:
        _check_package(name)
    for path in paths:
        if not os.path.exists(path):
            raise UsageError(f"Expected a file or folder with code to rewrite, got {path}.")
    finder = ImportHook(packages, paths, Cache(cache_dir or default_cache_dir()))
    if not packages and not paths:
        yield finder
        return
    sys.meta_path.insert(0, finder)
    try:
        yield finder
    finally:
        # Not `remove`, which would call `__eq__` of other people's finders.
        sys.meta_path[:] = [one for one in sys.meta_path if one is not finder]
        finder.forget()


def _in_place_of(theirs: SourceFileLoader, ours: SourceFileLoader) -> SourceFileLoader:
    """Return our loader, or theirs with our class if another finder has set methods on it.

    Such a method, an `exec_module` for example, calls the loader's own, which has to be ours then.
    """
    if vars(theirs).keys() <= vars(SourceFileLoader("", "")).keys():
        return ours
    theirs.__class__ = type(ours)
    vars(theirs).update(vars(ours))
    return theirs


def loader_for(name: str, file: str) -> SourceFileLoader:
    """Return the loader that the installed hooks give a file, such as the script that is run."""
    for finder in _in_force():
        if finder.covers(name, file):
            return finder.loader(name, file)
    return SourceFileLoader(name, file)


def _in_force() -> list[ImportHook]:
    return [finder for finder in list(sys.meta_path) if isinstance(finder, ImportHook)]


def _check_package(name: str) -> None:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(
            f'Expected the import name of a package, such as "navsim", got {name!r}.'
            " What to do: name files and folders as paths."
        )
    if name.partition(".")[0] == _OWN:
        raise UsageError("tpuport itself is not rewritten.")
    loaded = [one for one in list(sys.modules) if one == name or one.startswith(f"{name}.")]
    if any(not any(finder.has_loaded(one) for finder in _in_force()) for one in loaded):
        raise UsageError(
            f"{name} was imported before it could be rewritten."
            f" What to do: import it, and what imports it, inside the block."
        )


def _is_below(file: str, path: str) -> bool:
    """Return whether a file is a path or below it, and not installed there."""
    if file == path:
        return True
    start = os.path.join(path, "")
    if not file.startswith(start) or not _INSTALLED.isdisjoint(file[len(start) :].split(os.sep)):
        return False
    return path.startswith(_STANDARD_LIBRARY) or not file.startswith(_STANDARD_LIBRARY)
