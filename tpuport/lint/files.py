"""Discovery of the files of a run: paths, folders and globs to Python files and notebooks."""

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tpuport.foundation.errors import UsageError
from tpuport.lint.records import Problem, Trouble
from tpuport.lint.settings import PathPatterns, Settings

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

SUFFIXES = (".py", ".ipynb")
DEFAULT_EXCLUDE = (
    *(".bzr", ".direnv", ".eggs", ".git", ".hg", ".ipynb_checkpoints", ".mypy_cache", ".nox"),
    *(".pyenv", ".pytest_cache", ".ruff_cache", ".svn", ".tox", ".tpuport_cache", ".venv"),
    *("__pycache__", "__pypackages__", "_build", "build", "dist", "node_modules"),
    *("site-packages", "venv"),
)


@dataclass(frozen=True)
class Found:
    """The files of a run.

    Attributes:
        files: The files, each once, sorted by name, as the user would name them.
        problems: Entries met on the way that cannot be linted.
    """

    files: tuple[Path, ...]
    problems: tuple[Problem, ...]


def find_files(
    paths: Sequence[str],
    settings: Settings,
    *,
    force_exclude: bool = False,
    inside: Path | None = None,
) -> Found:
    """Find the files that paths lead to.

    Files and folders given by name are taken even if excludes or .gitignore files match them.

    Args:
        paths: Files, folders and patterns such as `src/**/model_*.py`.
        settings: Settings with the excludes.
        force_exclude: Whether excludes apply to files given by name too, as a pre-commit hook
            needs it.
        inside: A folder out of which no link is followed.

    Raises:
        UsageError: a path does not exist, or a pattern matches nothing.
    """
    walk = _Walk(settings, inside)
    for given in paths:
        for path in _expanded(given):
            if path.is_dir():
                walk.folder(path)
            elif not force_exclude or not walk.excludes(path, folder=False):
                walk.file(path)
    files = sorted(walk.files.values(), key=str)
    return Found(tuple(files), tuple(walk.problems))


def is_excluded(path: Path, settings: Settings) -> bool:
    """Return whether the excludes of the settings match a file or a folder that contains it."""
    return _Walk(settings).excludes(path, folder=False)


def _expanded(given: str) -> list[Path]:
    path = Path(given)
    if path.exists() or path.is_symlink():
        return [path]
    if not glob.has_magic(given):
        raise UsageError(f"There is no file or folder {given}.")
    matched = [Path(name) for name in sorted(glob.glob(given, recursive=True))]
    kept = [path for path in matched if path.is_dir() or path.suffix in SUFFIXES]
    if not kept:
        raise UsageError(f"Nothing to lint matches {given}.")
    # A matched folder would bring back the files in it that the pattern leaves out.
    return [path for path in kept if not path.is_dir()] or kept


def shown_path(path: Path) -> str:
    """Return a path as the user would name it: relative to the current folder if inside it."""
    try:
        return path.absolute().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return path.as_posix()


@dataclass(frozen=True)
class _Visit:
    """A folder to visit.

    Attributes:
        above: The real paths of the folders around it.
        given: The excluded folder that the user named; inside it, excludes match names only.
    """

    folder: Path
    ignores: "_Ignores"
    above: tuple[str, ...]
    given: Path | None


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:
        # A link to itself is neither file nor folder. It is reported when it is read.
        return False


class _Walk:
    """Collector of files. It follows links to folders, and takes each file and folder once."""

    def __init__(self, settings: Settings, inside: Path | None = None) -> None:
        self.files: dict[str, Path] = {}
        self._inside = None if inside is None else os.path.realpath(inside)
        self._folders: set[str] = set()
        self.problems: list[Problem] = []
        patterns = DEFAULT_EXCLUDE if settings.exclude is None else settings.exclude
        self._exclude = PathPatterns(settings.root, [*patterns, *settings.extend_exclude])

    def excludes(self, path: Path, *, folder: bool) -> bool:
        """Return whether the excludes of the settings match a path."""
        return self._exclude.match_file(path, folder=folder)

    def file(self, path: Path) -> None:
        """Add a file that is given by name."""
        path = Path(os.path.normpath(path))
        real = os.path.realpath(path)
        if path.exists() and not path.is_file():
            self._problem(path, "not a regular file")
        elif not self._leads_out(path, real):
            self.files.setdefault(real, path)

    def _leads_out(self, path: Path, real: str) -> bool:
        """Report a link that leads out of the folder whose files are wanted."""
        inside = self._inside
        if inside is None or real == inside or real.startswith(inside.rstrip(os.sep) + os.sep):
            return False
        self._problem(path, f"a link out of {Path(inside).name}, not followed", Trouble.SKIPPED)
        return True

    def folder(self, path: Path) -> None:
        """Add the files of a folder, and then those behind links in it."""
        path = Path(os.path.normpath(path))
        ignores = _Ignores.around(path)
        if ignores.ignores(path, folder=True):
            ignores = _Ignores(())
        # The user named an excluded folder: its path would exclude all in it, so match names.
        given = path.absolute() if self.excludes(path, folder=True) else None
        waiting = [_Visit(path, ignores, (), given)]
        while waiting:
            visit = waiting.pop(0)
            real = os.path.realpath(visit.folder)
            if real in visit.above:
                reason = "a link to a folder around it, not followed"
                self._problem(visit.folder, reason, Trouble.SKIPPED)
            elif real not in self._folders and not self._leads_out(visit.folder, real):
                self._folders.add(real)
                inside = replace(visit, above=(*visit.above, real))
                inner = list(self._entries(inside))
                # Links come last, so that a file goes by the name of its own place.
                waiting[:0] = [v for v in inner if not v.folder.is_symlink()]
                waiting += [v for v in inner if v.folder.is_symlink()]

    def _entries(self, visit: "_Visit") -> "Iterator[_Visit]":
        """Add the files of one folder and yield the folders in it."""
        folder = visit.folder
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            self._problem(folder, f"cannot be read: {error.strerror}")
            return
        has_file = any(entry.name == ".gitignore" for entry in entries)
        ignores = visit.ignores.inside(folder, has_file)
        for entry in entries:
            path, is_folder = folder / entry.name, _is_folder(entry)
            if not is_folder and path.suffix not in SUFFIXES:
                continue
            named = path if visit.given is None else self._exclude.root / path.name
            excluded = self.excludes(named, folder=is_folder)
            if excluded or ignores.ignores(path, folder=is_folder):
                continue
            if is_folder:
                yield replace(visit, folder=path, ignores=ignores)
            elif entry.is_symlink():
                self.file(path)
            elif entry.is_file():
                self.files.setdefault(os.path.join(visit.above[-1], entry.name), path)

    def _problem(self, path: Path, reason: str, trouble: Trouble = Trouble.UNREAD) -> None:
        self.problems.append(Problem(shown_path(path), reason, trouble))


@dataclass(frozen=True)
class _Ignores:
    """The .gitignore files that apply in a folder, the outermost first."""

    specs: "tuple[tuple[Path, GitIgnoreSpec], ...]"

    @classmethod
    def around(cls, folder: Path) -> "_Ignores":
        """Read the .gitignore files above a folder, up to the root of its repository."""
        absolute = folder.absolute()
        around = [absolute, *absolute.parents]
        root = next((path for path in around if (path / ".git").exists()), None)
        if root is None:
            return cls(())
        found = cls(tuple(_read_ignores(root, root / ".git" / "info" / "exclude")))
        for path in reversed(around[1 : around.index(root) + 1]):
            found = found.inside(path, (path / ".gitignore").is_file())
        return found

    def inside(self, folder: Path, has_file: bool) -> "_Ignores":
        """Return these and the .gitignore of one more folder, if it has one."""
        if not has_file:
            return self
        return _Ignores((*self.specs, *_read_ignores(folder.absolute(), folder / ".gitignore")))

    def ignores(self, path: Path, *, folder: bool) -> bool:
        """Return whether a path is ignored, by the innermost file with a pattern for it."""
        absolute = path.absolute()
        for root, spec in reversed(self.specs):
            name = absolute.relative_to(root).as_posix() + ("/" if folder else "")
            found = spec.check_file(name).include
            if found is not None:
                return found
        return False


def _read_ignores(root: Path, path: Path) -> "Iterator[tuple[Path, GitIgnoreSpec]]":
    try:
        lines: Iterable[str] = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        # An unreadable .gitignore ignores nothing, as in git.
        return
    from pathspec import GitIgnoreSpec

    yield root, GitIgnoreSpec.from_lines(lines)
