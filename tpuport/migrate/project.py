"""The files of a migration together: which class extends which."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import libcst as cst

from tpuport.migrate.source_file import SourceFile, own_attribute

# How many folders up a class's module is looked for.
_LEVELS = 3


@dataclass(frozen=True)
class ClassPlace:
    """A class and the file that it is in."""

    file: SourceFile
    node: cst.ClassDef

    @property
    def name(self) -> str:
        """Return the name of the class."""
        return self.node.name.value

    @property
    def bases(self) -> list[str]:
        """Return the last names of its bases."""
        found = [arg.value for arg in self.node.bases if arg.keyword is None]
        return [self.file.code(base).rpartition(".")[2] for base in found]

    def methods(self) -> dict[str, cst.FunctionDef]:
        """Return its own methods by name."""
        body = self.node.body.body
        return {one.name.value: one for one in body if isinstance(one, cst.FunctionDef)}

    def own_uses(self, name: str) -> list[cst.Attribute]:
        """Return each `self.name` in it."""
        found = self.file.all(cst.Attribute, self.node)
        return [node for node in found if own_attribute(node) == name]


class Project:
    """Parsed files, and the relations of their classes.

    Args:
        files: All files that can be seen. Classes are told apart by their names alone, so a name
            that two of them have belongs to no family.
    """

    def __init__(self, files: Iterable[SourceFile]) -> None:
        self.files = list(files)
        self.classes: dict[str, ClassPlace] = {}
        twice: set[str] = set()
        for file in self.files:
            for node in file.all(cst.ClassDef):
                place = ClassPlace(file, node)
                twice |= {place.name} & self.classes.keys()
                self.classes[place.name] = place
        for name in twice:
            del self.classes[name]

    def bases(self, place: ClassPlace) -> list[ClassPlace]:
        """Return the class and those it extends, the nearest first."""
        found, pending = [place], list(place.bases)
        while pending:
            base = self.classes.get(pending.pop(0))
            if base is not None and base not in found:
                found.append(base)
                pending += base.bases
        return found

    def family(self, place: ClassPlace) -> list[ClassPlace]:
        """Return the class, those it extends, and those that extend it."""
        below = [one for one in self.classes.values() if place in self.bases(one)[1:]]
        return [*self.bases(place), *below]


def related(path: Path, text: str) -> Iterator[Path]:
    """Yield the files that a script imports classes from, if they are near it.

    Args:
        path: The script.
        text: Its text.
    """
    folders = list(path.absolute().parents)[:_LEVELS]
    for node in cst.parse_module(text).body:
        for small in node.body if isinstance(node, cst.SimpleStatementLine) else ():
            if not isinstance(small, cst.ImportFrom) or small.relative or small.module is None:
                continue
            name = cst.Module([]).code_for_node(small.module).replace(".", "/")
            near = (folder / f"{name}.py" for folder in folders)
            yield from [one for one in near if one.is_file()][:1]
