"""The configuration files with which a script of hydra starts; nothing is run."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuport.repository.scripts import StartScript

_TARGET = re.compile(r"(?:^|[{,])\s*_target_:\s*['\"]?([A-Za-z_][\w.]*)", re.MULTILINE)


@dataclass(frozen=True)
class HydraConfig:
    """A configuration file, and those that its list of defaults names.

    Attributes:
        file: The file that the script names.
        parts: The files of its defaults that are there.
    """

    file: Path
    parts: tuple[Path, ...]

    def leaves(self) -> dict[str, Any]:
        """Return the numbers and strings of the file by their dotted names."""
        return dict(_leaves(_read_yaml(self.file), ""))

    def targets(self) -> set[str]:
        """Return what its `_target_` entries name: classes and functions, with their modules."""
        texts = (path.read_text(errors="replace") for path in (self.file, *self.parts))
        return {name for text in texts for name in _TARGET.findall(text)}


def launched_config(entry: StartScript) -> list[str]:
    """Return the argument that names a configuration in a line of the repository, if any does.

    A line with a folder of configurations of its own says nothing about those of the repository.
    """
    for launch in entry.launches:
        words = launch.arguments
        if any(word.startswith(("--config-dir", "-cd", "--config-path", "-cp")) for word in words):
            continue
        for word, value in zip(words, (*words[1:], ""), strict=False):
            if word.startswith("--config-name="):
                return [word]
            if word in ("--config-name", "-cn") and value:
                return [f"--config-name={value}"]
    return []


def find_config(script: Path, entry: StartScript, name: str | None = None) -> HydraConfig | None:
    """Return the configuration that a script of hydra starts with, if it can be seen.

    Args:
        script: The script.
        entry: What is known of it.
        name: The name of the configuration; that of the decorator or of a launch if left out.
    """
    folder, decorated = _decorator(script)
    launched = launched_config(entry)
    name = name or (launched[0].partition("=")[2] if launched else decorated)
    if folder is None or name is None:
        return None
    file = _yaml(folder / name)
    return None if file is None else HydraConfig(file, tuple(_defaults(folder, file, set())))


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
            case ast.Call(func=ast.Attribute(value=ast.Name(id="hydra"), attr="main")):
                given = {k.arg: k.value for k in node.keywords}
                path = _last_string(given.get("config_path"), constants)
                name = _last_string(given.get("config_name"), constants)
                return (script.parent / path if path else None), name
    return None, None


def _last_string(node: ast.expr | None, constants: dict[str, ast.expr]) -> str | None:
    """Return the string that an expression ends with: `str(Path(__file__).parent / "config")`."""
    if isinstance(node, ast.Name):
        node = constants.get(node.id)
    found = [
        one.value
        for one in (ast.walk(node) if node is not None else ())
        if isinstance(one, ast.Constant) and isinstance(one.value, str)
    ]
    return found[-1] if found else None


def _yaml(path: Path) -> Path | None:
    file = path if path.suffix in (".yaml", ".yml") else path.with_name(f"{path.name}.yaml")
    return file if file.is_file() else None


def _defaults(folder: Path, file: Path, known: set[Path]) -> Iterator[Path]:
    """Yield the files that the list of defaults of a configuration names, and those of these."""
    found = _read_yaml(file)
    entries = found.get("defaults", ()) if isinstance(found, dict) else ()
    for entry in entries if isinstance(entries, list) else ():
        pair = next(iter(entry.items())) if isinstance(entry, dict) and entry else ("", entry)
        group, name = (str(one).partition(" ")[2] or str(one) for one in pair)
        for start in (folder, file.parent):
            path = _yaml(start / group.partition("@")[0].lstrip("/") / name)
            if path is not None and path not in known:
                known.add(path)
                yield path
                yield from _defaults(folder, path, known)


def _read_yaml(file: Path) -> Any:
    """Return what a YAML file holds; None if it cannot be read or PyYAML is not installed."""
    try:
        import yaml
    except ImportError:
        return None
    try:
        return yaml.safe_load(file.read_text(errors="replace"))
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _leaves(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            if name or key not in ("defaults", "hydra"):
                yield from _leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(node, int | float | str | bool):
        yield name, node
