"""Calls across the files of a project: the functions that a step in another file reaches.

Each file is first summarised by itself. The summaries, which are plain JSON, are then combined.
Nothing is imported: an import is resolved by the path that it spells.
"""

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import TypedDict

from tpuport.source.inference.roles import Role, Roles
from tpuport.source.syntax.imported import dotted_name
from tpuport.source.syntax.module import Function, Module

# Chains of re-exports (`from .a import f` in a package's `__init__`) are followed this far.
MAX_HOPS = 6


class Summary(TypedDict):
    """The facts about one file that the analysis of other files needs.

    Attributes:
        steps: Its functions that are part of a step by its own text: `f` or `Class.f`.
        calls: For each function the functions of this file that it mentions. Functions that need a
            package of CUDA kernels are left out: what they call is not reached on a TPU.
        uses: For each function the full names of what it mentions from other files.
        imports: The full name of each imported name of the file.
    """

    steps: list[str]
    calls: dict[str, list[str]]
    uses: dict[str, list[str]]
    imports: dict[str, str]


def summarise(module: Module, roles: Roles | None = None) -> Summary:
    """Summarise one parsed file.

    Args:
        module: The file.
        roles: The roles of its functions by the file's own text, if they are known already.
    """
    roles = roles or Roles(module)
    names = {function: name_of(function, roles) for function in roles.everything}
    imports = {n: full for n, full in module.imports.items() if not full.startswith(_FOREIGN)}
    return Summary(
        steps=[
            names[f]
            for f in roles.everything
            if roles.of(f) is Role.STEP and not roles.is_off_tpu(f)
        ],
        calls={
            names[f]: [names[callee] for callee in dict.fromkeys(roles.calls(f))]
            for f in roles.everything
            if f not in roles.gpu_only
        },
        uses={
            names[f]: _outside_names(module, f, imports)
            for f in roles.everything
            if f not in roles.gpu_only
        },
        imports=imports,
    )


_FOREIGN = ("torch", "numpy", "typing", "math", "os", "transformers.utils", "collections")


def name_of(function: Function, roles: Roles) -> str:
    """Return a function's `name`, or `Class.name` for a method."""
    owner = roles.owners.get(function)
    return function.name if owner is None else f"{owner.node.name}.{function.name}"


def _outside_names(module: Module, function: Function, imports: Mapping[str, str]) -> list[str]:
    found: dict[str, None] = {}
    for node in module.inside(function):
        name = dotted_name(node)
        if name is not None:
            root, dot, rest = name.partition(".")
            if root in imports:
                found[imports[root] + dot + rest] = None
    return list(found)


def find_reached(summaries: Mapping[str, Summary]) -> dict[str, frozenset[str]]:
    """Return for each file its functions that a step reaches, as `Roles` takes them.

    Args:
        summaries: The summary of each file by its path.
    """
    paths = _Paths(summaries)
    reached: set[tuple[str, str]] = set()
    pending = [(file, name) for file, summary in summaries.items() for name in summary["steps"]]
    while pending:
        place = pending.pop()
        if place in reached:
            continue
        reached.add(place)
        file, name = place
        summary = summaries[file]
        callees = [(file, callee) for callee in summary["calls"].get(name, ())]
        for used in summary["uses"].get(name, ()):
            callees += paths.functions(file, used)
        pending += [callee for callee in callees if not callee[1].endswith("__init__")]
    found: dict[str, set[str]] = {}
    for file, name in reached:
        found.setdefault(file, set()).add(name)
    return {file: frozenset(found.get(file, ())) for file in summaries}


class _Paths:
    """Index that resolves full names to files and functions, by the paths of the files."""

    def __init__(self, summaries: Mapping[str, Summary]) -> None:
        self.summaries = summaries
        self.by_last: dict[str, list[tuple[tuple[str, ...], str]]] = {}
        for file in summaries:
            parts = _module_parts(file)
            if parts:
                self.by_last.setdefault(parts[-1], []).append((parts, file))

    def functions(self, file: str, name: str) -> Iterator[tuple[str, str]]:
        """Yield the file and name of the function that a full name resolves to, if there is one."""
        for _ in range(MAX_HOPS):
            found = self._split(file, name)
            if found is None:
                return
            target, rest = found
            summary = self.summaries[target]
            if rest in summary["calls"]:
                yield target, rest
                return
            root, dot, after = rest.partition(".")
            if root not in summary["imports"]:
                return
            file, name = target, summary["imports"][root] + dot + after

    def _split(self, file: str, name: str) -> tuple[str, str] | None:
        """Split a full name into the file that it starts with and the rest of the name."""
        parts = name.lstrip(".").split(".")
        level = len(name) - len(name.lstrip("."))
        around: tuple[str, ...] = ()
        if level:
            around = PurePath(file).parent.parts
            around = around[: len(around) - level + 1]
        for end in range(len(parts) - 1, -1, -1):
            wanted = (*around, *parts[:end])
            target = self._file(wanted, exact=bool(level)) if wanted else None
            if target is not None and target != file:
                return target, ".".join(parts[end:])
        return None

    def _file(self, wanted: tuple[str, ...], *, exact: bool) -> str | None:
        for parts, file in self.by_last.get(wanted[-1], ()):
            if parts == wanted if exact else parts[-len(wanted) :] == wanted:
                return file
        return None


def _module_parts(file: str) -> tuple[str, ...]:
    path = PurePath(file)
    return path.parent.parts if path.stem == "__init__" else (*path.parent.parts, path.stem)
