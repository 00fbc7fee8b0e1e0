"""The codemod that takes torch_xla out of scripts; it also runs by itself:

python -m libcst.tool codemod --no-format -x tpuport.migrate.torch_xla.MigrateTorchXla script.py
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.codemod import CodemodCommand, CodemodContext
from libcst.codemod.visitors import AddImportsVisitor, RemoveImportsVisitor

from tpuport.migrate.api_calls import CALL, plan_calls
from tpuport.migrate.project import Project, related
from tpuport.migrate.source_file import Edits, Note, SourceFile
from tpuport.migrate.spreading import plan_spreading
from tpuport.migrate.step_parts import XLA_TEXTS
from tpuport.migrate.training_steps import find_steps, plan_step
from tpuport.rules._torch_xla_facts import COUNTERPARTS, NEEDLESS, PACKAGE


@dataclass(frozen=True)
class Migration:
    """The result for one file.

    Attributes:
        after: Its new text.
        done: What was changed.
        left: What is left to the reader.
    """

    after: str
    done: tuple[Note, ...]
    left: tuple[Note, ...]


class MigrateTorchXla(CodemodCommand):
    """Replaces torch_xla by torch, jax and tpuport where that is proved to be the same."""

    DESCRIPTION = "Replace torch_xla by torch, jax and tpuport."

    def transform_module_impl(self, tree: cst.Module) -> cst.Module:
        """Rewrite one file, and warn of what is left."""
        name = self.context.filename or "<string>"
        file = SourceFile(tree, name)
        if not _uses(file):
            return tree
        near = _related_files({name: tree.code}) if self.context.filename else []
        edits = _planned([file], near)[file]
        for note in sorted(edits.left):
            self.warn(f"{name}:{note.line}: {note.code} left: {note.text}")
        return _applied(file, edits)


def migrate(texts: Mapping[str, str]) -> dict[str, Migration]:
    """Rewrite files that use torch_xla, together.

    Args:
        texts: The text of each file by its path.
    """
    files = [SourceFile(cst.parse_module(text), name) for name, text in texts.items()]
    used = [file for file in files if _uses(file)]
    others = [file for file in files if file not in used]
    edits = _planned(used, [*others, *_related_files(texts)])
    made = {
        file.name: Migration(
            _applied(file, edits[file]).code,
            tuple(sorted(set(edits[file].done))),
            tuple(sorted(set(edits[file].left))),
        )
        for file in used
    }
    return {**{file.name: Migration(file.module.code, (), ()) for file in others}, **made}


def _uses(file: SourceFile) -> bool:
    stars = [node for node in file.all(cst.ImportFrom) if isinstance(node.names, cst.ImportStar)]
    return bool(_imports(file)) or any(PACKAGE in file.code(node) for node in stars)


def _related_files(texts: Mapping[str, str]) -> list[SourceFile]:
    known = {Path(name).absolute() for name in texts}
    paths = {path for name, text in texts.items() for path in related(Path(name), text)} - known
    return [
        SourceFile(cst.parse_module(path.read_text(encoding="utf-8")), str(path))
        for path in sorted(paths)
    ]


def _planned(files: list[SourceFile], others: Iterable[SourceFile]) -> dict[SourceFile, Edits]:
    """Plan the edits of files; the others are only read."""
    edits = {file: Edits() for file in files}
    project = Project([*files, *others])
    # Steps of files that are only read count as moved too: they have to be migrated as well.
    seen = {**edits, **{file: Edits() for file in others}}
    steps = find_steps(project, seen)
    for step in steps:
        plan_step(project, seen, step)
    plan_spreading(project, seen, steps)
    moved = {step.parts.method for step in steps}
    for file in files:
        _note_eager(file, edits[file], moved)
        plan_calls(file, edits[file])
        _note_rest(file, edits[file])
        _note_texts(file, edits[file])
        _note_imports(file, edits[file])
    return edits


def _note_eager(file: SourceFile, edits: Edits, moved: Collection[cst.CSTNode]) -> None:
    """Note each step that is no method, and so stays in eager PyTorch."""
    for call in file.all(cst.Call):
        function = file.around(call, cst.FunctionDef)
        is_step = m.matches(call.func, m.Attribute(attr=m.Name("backward")))
        if not is_step or function in moved:
            continue
        if function is not None and file.line(function) in {note.line for note in edits.left}:
            continue
        text = (
            f"the step around `{file.code(call)}` stays in eager PyTorch, on the host: only a"
            " method that takes one step is moved. What to do: write a loss function and"
            " make_train_step"
        )
        edits.left.append(Note(file.line(call), CALL, text))


def _note_rest(file: SourceFile, edits: Edits) -> None:
    """Note each name of torch_xla that stays."""
    taken = {child for node in edits.handled for child in _chain(node)}
    for node in [*file.all(cst.Attribute), *file.all(cst.Name)]:
        name = file.torch_xla_name(node)
        outer = file.parent(node)
        inner = isinstance(outer, cst.Attribute)
        if name is None or inner or node in taken or file.around(node, cst.ImportAlias):
            continue
        if file.around(node, cst.Import | cst.ImportFrom):  # pyright: ignore[reportArgumentType]
            continue
        what = COUNTERPARTS.get(name) or NEEDLESS.get(name) or "nothing stands for it here"
        edits.left.append(
            Note(file.line(node), CALL, f"`{file.code(node)}` stays. What to write: {what}")
        )


def _note_imports(file: SourceFile, edits: Edits) -> None:
    """Note each import that stays because other code depends on whether it works, or on `*`."""
    for node in [*file.all(cst.Import), *file.all(cst.ImportFrom)]:
        if PACKAGE not in file.code(node):
            continue
        if isinstance(node.names, cst.ImportStar):
            text = f"`{file.code(node)}` stays: which names come from it is not known"
            edits.left.append(Note(file.line(node), CALL, text))
        elif file.around(node, cst.Try) is not None:
            text = f"`{file.code(node)}` stays: the `try` around it asks whether torch_xla is there"
            edits.left.append(Note(file.line(node), CALL, text))


def _note_texts(file: SourceFile, edits: Edits) -> None:
    """Note each text that means torch_xla to torch."""
    for text in file.all(cst.SimpleString):
        if text.evaluated_value in XLA_TEXTS:
            what = "`cpu` for a device; there is no process group, and a test for it is false"
            edits.left.append(
                Note(file.line(text), CALL, f"{text.value} stays. What to write: {what}")
            )


def _chain(node: cst.CSTNode) -> Iterable[cst.CSTNode]:
    """Yield a dotted name and the shorter ones that it begins with."""
    yield node
    while isinstance(node, cst.Attribute):
        node = node.value
        yield node


def _applied(file: SourceFile, edits: Edits) -> cst.Module:
    context = CodemodContext(filename=file.name)
    changed = file.module.visit(_Replace(edits))
    assert isinstance(changed, cst.Module)
    changed = _with_helpers(changed, edits)
    there = {
        alias.evaluated_alias or alias.evaluated_name
        for line in changed.body
        for small in (line.body if isinstance(line, cst.SimpleStatementLine) else ())
        if isinstance(small, cst.Import)
        for alias in small.names
    }
    for module, name in sorted(edits.imports, key=str):
        if (name or module) in there:
            continue
        if name == "np":
            AddImportsVisitor.add_needed_import(context, module, asname="np")
        else:
            AddImportsVisitor.add_needed_import(context, module, name)
    changed = AddImportsVisitor(context).transform_module(changed)
    for module, name, alias in _imports(file, guarded=False):
        RemoveImportsVisitor.remove_unused_import(context, module, name, alias)
    changed = RemoveImportsVisitor(context).transform_module(changed)
    return changed if file.module.header else _without_gap(changed)


def _without_gap(module: cst.Module) -> cst.Module:
    """Remove the empty lines that the first import leaves behind."""
    if not module.body or not isinstance(module.body[0], cst.SimpleStatementLine):
        return module
    first, lines = module.body[0], list(module.body[0].leading_lines)
    while lines and lines[0].comment is None:
        del lines[0]
    header = list(module.header)
    while header and header[0].comment is None:
        del header[0]
    body = [first.with_changes(leading_lines=lines), *module.body[1:]]
    return module.with_changes(header=header, body=body)


def _with_helpers(module: cst.Module, edits: Edits) -> cst.Module:
    """Add helpers before the first class or function."""
    if not edits.helpers:
        return module
    body = list(module.body)
    kinds = (cst.ClassDef, cst.FunctionDef)
    at = next((n for n, one in enumerate(body) if isinstance(one, kinds)), len(body))
    made: list[Any] = []
    for text in edits.helpers.values():
        (one,) = cst.parse_module(text.lstrip()).body
        blank = cst.EmptyLine(indent=False)
        made.append(one.with_changes(leading_lines=[blank, blank]))
    return module.with_changes(body=[*body[:at], *made, *body[at:]])


def _imports(file: SourceFile, *, guarded: bool = True) -> list[tuple[str, str | None, str | None]]:
    """Return the imports of torch_xla: the module, a name from it, and the name it gets here.

    Args:
        file: The file.
        guarded: Whether those inside of `try` count, and names that are imported there too.
    """
    found = _imports_of([*file.all(cst.Import), *file.all(cst.ImportFrom)], file)
    if guarded:
        return found
    tried = [node for one in file.all(cst.Try) for node in file.all(cst.Import, one)]
    others = [node for one in file.all(cst.Try) for node in file.all(cst.ImportFrom, one)]
    kept = _imports_of([*tried, *others], file)
    return [one for one in found if one not in kept]


def _imports_of(
    nodes: Iterable[cst.Import | cst.ImportFrom], file: SourceFile
) -> list[tuple[str, str | None, str | None]]:
    found: list[tuple[str, str | None, str | None]] = []
    for node in nodes:
        if not isinstance(node, cst.Import):
            continue
        for alias in node.names:
            found.append((alias.evaluated_name, None, alias.evaluated_alias))
    for node in nodes:
        if (
            isinstance(node, cst.Import)
            or node.module is None
            or node.relative
            or isinstance(node.names, cst.ImportStar)
        ):
            continue
        module = file.module.code_for_node(node.module)
        for alias in node.names:
            found.append((module, alias.evaluated_name, alias.evaluated_alias))
    return [one for one in found if one[0].partition(".")[0] == PACKAGE]


class _Replace(cst.CSTTransformer):
    """Put the planned replacements in place, the innermost first."""

    def __init__(self, edits: Edits) -> None:
        super().__init__()
        self._replaced = edits.replaced

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        made = super().on_leave(original_node, updated_node)
        replacement = self._replaced.get(original_node)
        return made if replacement is None else replacement(made)
