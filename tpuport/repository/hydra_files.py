"""The configuration files with which a script of hydra starts; nothing is run."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tpuport.repository.path_expressions import path_of
from tpuport.repository.scripts import StartScript
from tpuport.repository.texts import read_text

_TARGET = re.compile(r"(?:^|[{,])\s*_target_:\s*['\"]?([A-Za-z_][\w.]*)", re.MULTILINE)
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
_ENVIRONMENT = re.compile(r"\$\{(?:oc\.)?env:\s*(\w+)\s*\}")
_NAME, _FOLDER = ("--config-name", "-cn"), ("--config-dir", "-cd")
# Lines with these say nothing about one run of the script's own configuration.
_OTHER = ("--config-path", "-cp", "--multirun", "-m")


@dataclass(frozen=True)
class HydraGroup:
    """A choice of a list of defaults: `task: pusht`, which is a file of the folder `task`.

    Attributes:
        name: What the command line has for it.
        choices: The names of the files that are there.
        is_open: Whether a person has to choose: `task: ???`.
    """

    name: str
    choices: tuple[str, ...]
    is_open: bool


@dataclass(frozen=True)
class HydraConfig:
    """A configuration: its files, each with where its content goes, in the order of merging.

    Attributes:
        parts: Packages, as `task` or empty for the top, and files.
        groups: The choices.
    """

    parts: tuple[tuple[str, Path], ...]
    groups: tuple[HydraGroup, ...] = ()

    def leaves(self) -> dict[str, Any]:
        """Return the numbers, lists of them and strings of all files by their dotted names."""
        found: dict[str, Any] = {}
        for package, file in self.parts:
            content = _read_yaml(file)
            if isinstance(content, dict):
                kept = {k: v for k, v in content.items() if k not in ("defaults", "hydra")}
                found.update(_leaves(kept, package))
        return found

    def targets(self) -> set[str]:
        """Return what its `_target_` entries name: classes and functions, with their modules."""
        return {name for text in self._texts() for name in _TARGET.findall(text)}

    def variables(self) -> list[str]:
        """Return the environment variables that it cannot do without."""
        names = (name for text in self._texts() for name in _ENVIRONMENT.findall(text))
        return list(dict.fromkeys(names))

    def _texts(self) -> Iterator[str]:
        return (read_text(file) for _, file in self.parts)


def launched_words(script: Path, entry: StartScript) -> tuple[list[str], str]:
    """Return the words with which a line of the repository starts a script of hydra, and its place.

    Of the lines whose configuration is there, it is the first. Settings of hydra itself, such as
    where it writes, are left out.
    """
    for launch in entry.launches:
        words = [word for word in launch.arguments if not word.startswith("hydra.")]
        if any(word.partition("=")[0] in _OTHER for word in words):
            continue
        if any(_is_flag(word) for word in words) and not _found(script, entry, words):
            continue
        if words:
            return _one_word_each(words), launch.place
    return [], ""


def names_config(words: Sequence[str]) -> bool:
    """Return whether a command line says which configuration to take."""
    return any(_is_flag(word) for word in words)


def in_order(words: Sequence[str]) -> list[str]:
    """Return a command line with its flags in front of its settings, as hydra wants it."""
    return sorted(_one_word_each(words), key=lambda word: not word.startswith("-"))


def _is_flag(word: str) -> bool:
    return word.partition("=")[0] in (*_NAME, *_FOLDER)


def _one_word_each(words: Sequence[str]) -> list[str]:
    """Return a command line in which a flag and its value are one word: `--config-name=base`."""
    found: list[str] = []
    for word in words:
        if found and found[-1] in (*_NAME, *_FOLDER):
            found[-1] = f"--config-{'name' if found[-1] in _NAME else 'dir'}={word}"
        else:
            found.append(word)
    return found


def _flag(words: Sequence[str], names: Sequence[str]) -> str | None:
    pairs = (word.partition("=") for word in _one_word_each(words))
    return next((value for flag, _, value in pairs if flag in names and value), None)


def find_config(
    script: Path, entry: StartScript, given: Sequence[str] = (), changes: Sequence[str] = ()
) -> HydraConfig | None:
    """Return the configuration that a script of hydra starts with, if it can be seen.

    Args:
        script: The script.
        entry: What is known of it.
        given: The command line of a person; without one that of the repository counts.
        changes: What is set besides.
    """
    words = [*given, *changes]
    if not names_config(given):
        launched = launched_words(script, entry)[0]
        words = [*(word for word in launched if not given or _is_flag(word)), *words]
    found = _found(script, entry, words)
    if found is None:
        return None
    folders, file = found
    return _Composer(folders, _choices(words)).config(file)


def _found(
    script: Path, entry: StartScript, words: Sequence[str]
) -> tuple[list[Path], Path] | None:
    """Return the folders of configurations, and the file that a command line starts with."""
    folder, decorated = _decorator(script)
    root = script.parents[len(Path(entry.path).parts) - 1]
    added = _flag(words, _FOLDER)
    folders = [*([root / added] if added else []), *([folder] if folder else [])]
    name = _flag(words, _NAME) or decorated
    files = [file for one in folders if name and (file := _yaml(one / name)) is not None]
    if not files:
        return None
    hydra = (_read_yaml(files[0]) or {}).get("hydra")
    paths = hydra.get("searchpath") if isinstance(hydra, dict) else None
    for path in map(str, paths if isinstance(paths, list) else ()):
        kind, _, place = path.partition("://")
        folders.append(root / (place.replace(".", "/") if kind == "pkg" else place))
    return folders, files[0]


def _choices(words: Sequence[str]) -> dict[str, str]:
    pairs = (word.lstrip("+").partition("=") for word in words if not word.startswith("-"))
    return {name: value for name, sign, value in pairs if sign}


def config_names(script: Path) -> list[str]:
    """Return the names of the configurations beside each other that a script may start with."""
    folder, _ = _decorator(script)
    return [] if folder is None else sorted(path.stem for path in folder.glob("*.yaml"))


def _decorator(script: Path) -> tuple[Path | None, str | None]:
    """Return the folder and the name that `@hydra.main` gives."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None, None
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="main", value=ast.Name(id="hydra"))):
                given = {k.arg: k.value for k in node.keywords}
                path = path_of(given.get("config_path"), script, constants)
                name = path_of(given.get("config_name"), script, constants)
                return (script.parent / path if path else None), name
    return None, None


def _yaml(path: Path) -> Path | None:
    file = path if path.suffix in (".yaml", ".yml") else path.with_name(f"{path.name}.yaml")
    return file if file.is_file() else None


class _Composer:
    """Puts a configuration together from its lists of defaults, as far as files show it.

    Args:
        folders: Where configurations are.
        choices: What the command line sets, by name.
    """

    def __init__(self, folders: Sequence[Path], choices: dict[str, str]) -> None:
        self._folders, self._choices = folders, choices
        self._groups: dict[str, HydraGroup] = {}
        self._known: set[tuple[str, Path]] = set()

    def config(self, file: Path) -> HydraConfig:
        """Return the configuration of a file."""
        return HydraConfig(tuple(self._parts(file, "", "")), tuple(self._groups.values()))

    def _parts(self, file: Path, group: str, package: str) -> Iterator[tuple[str, Path]]:
        """Yield the files of a list of defaults, and the file itself where it stands in it."""
        if (package, file) in self._known:
            return
        self._known.add((package, file))
        header = _PACKAGE.search(read_text(file))
        if header is not None and header[1] != "_group_":
            package = header[1].removeprefix("_global_").lstrip(".")
        found = _read_yaml(file)
        entries = found.get("defaults") if isinstance(found, dict) else None
        entries = entries if isinstance(entries, list) else []
        for entry in entries:
            if entry == "_self_":
                yield package, file
            else:
                yield from self._default(entry, group, package)
        if "_self_" not in entries:
            yield package, file

    def _default(self, entry: Any, group: str, package: str) -> Iterator[tuple[str, Path]]:
        if isinstance(entry, dict) and len(entry) == 1:
            words, name = next((str(key).split(), value) for key, value in entry.items())
        else:  # a file beside this one, or below it
            words, name = ["/".join(str(entry).split("/")[:-1])], str(entry).split("/")[-1]
        own, _, place = words[-1].partition("@")
        if isinstance(entry, str) and "@" in name:
            name, _, place = name.partition("@")
        whole = own.lstrip("/") if own.startswith("/") or not group else f"{group}/{own}".strip("/")
        if isinstance(entry, dict) and "override" not in words[:-1]:
            name = self._chosen(whole, name, f"{whole}@{place}" if place else whole)
        target = {"": own.strip("/").replace("/", "."), "_here_": ""}.get(place, place)
        if target.startswith("_global_"):
            package, target = "", target.removeprefix("_global_").lstrip(".")
        inner = ".".join(filter(None, (package, target)))
        for one in name if isinstance(name, list) else [name]:
            files = [_yaml(folder / whole / str(one)) for folder in self._folders]
            for path in [file for file in files if one is not None and file is not None][:1]:
                yield from self._parts(path, whole, inner)

    def _chosen(self, group: str, name: Any, key: str) -> Any:
        """Return which file of a group it is, and note the group by its name in words."""
        there = {p.stem for folder in self._folders for p in (folder / group).glob("*.yaml")}
        chosen = self._choices.get(key, name)
        self._groups.setdefault(key, HydraGroup(key, tuple(sorted(there)), chosen == "???"))
        return chosen


def _read_yaml(file: Path) -> Any:
    """Return what a YAML file holds; None if it cannot be read or PyYAML is not installed."""
    try:
        return _read_once(file, file.stat().st_mtime_ns)
    except OSError:
        return None


@lru_cache(256)
def _read_once(file: Path, changed: int) -> Any:
    del changed
    try:
        import yaml
    except ImportError:
        return None
    # Lists of tens of thousands of recordings are read in a fraction of a second.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return yaml.load(read_text(file), loader)
    except (ValueError, yaml.YAMLError):
        return None


def _leaves(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(node, int | float | str | bool) or _is_numbers(node):
        yield name, node


def _is_numbers(node: Any) -> bool:
    return isinstance(node, list) and bool(node) and all(type(one) is int for one in node)


def read_value(text: str) -> Any:
    """Return the value that a word of a command line gives a setting."""
    try:
        import yaml
    except ImportError:
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
