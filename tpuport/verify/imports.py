"""What a script imports, and the modules beside it that do so for it; nothing is run."""

import ast
from collections.abc import Callable, Sequence
from pathlib import Path

_LARGEST = 1_000_000
# A module, and the package without which it cannot be imported.
_NEEDED_BY = {"torch.utils.tensorboard": "tensorboard"}


def parse_file(path: Path) -> ast.Module | None:
    """Return the syntax tree of a file; None if it cannot be parsed, or is too large to look at."""
    try:
        return None if path.stat().st_size > _LARGEST else ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def imported_names(body: Sequence[ast.stmt]) -> set[str]:
    """Return the modules that statements import, but for those below a condition or a `try`.

    A name that is imported from a module is among them, as it may be a module too.
    """
    found: set[str] = set()
    for statement in body:
        match statement:
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=module, names=names, level=level):
                start = "." * level + (module or "")
                # What is imported may be a module of its own.
                dot = "." if module else ""
                found |= {f"{start}{dot}{alias.name}" for alias in names if alias.name != "*"}
                found |= {start} if module else set()
    return found


def started_names(tree: ast.Module) -> set[str]:
    """Return what a script imports beside that in functions that it calls, and in its main part.

    Only what runs in any case counts: nothing below a condition, a loop or a `try`.
    """
    functions = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}
    waiting: list[Sequence[ast.stmt]] = [tree.body]
    found: set[str] = set()
    while waiting:
        body = waiting.pop()
        found |= imported_names(body)
        for statement in body:
            match statement:
                case ast.With(body=inner):
                    waiting.append(inner)
                case ast.If(test=ast.Compare(left=ast.Name(id="__name__")), body=inner):
                    waiting.append(inner)
                case ast.Expr(value=value) | ast.Assign(value=value) | ast.Return(value=value):
                    calls = [] if value is None else _calls(value)
                    waiting += [functions.pop(n).body for n in calls if n in functions]
    return found


def _calls(value: ast.expr) -> list[str]:
    """Return the names of functions that an expression calls, each once."""
    names = (
        node.func.id
        for node in ast.walk(value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    )
    return list(dict.fromkeys(names))


def later_names(tree: ast.Module) -> set[str]:
    """Return what a module imports if it comes to that: in functions, below conditions.

    What it can do without, as a `try` around the import says, is left out.
    """
    found: set[str] = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= imported_names([node])
        inside = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Try):
            inside = [*node.handlers, *node.orelse, *node.finalbody]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            inside = list(node.orelse)
        waiting += inside
    return found - imported_names(tree.body)


def reached(
    start: Path,
    imports: set[str],
    imports_of: Callable[[Path], set[str]],
    root: Path,
    find: Callable[[str, Path, Path], set[Path]] | None = None,
) -> tuple[set[str], set[Path]]:
    """Return what a script imports, also through others: dotted names, and modules beside it.

    Args:
        start: The script.
        imports: What it imports itself.
        imports_of: Returns that of another module.
        root: The folder of the repository.
        find: What to call in place of `own_modules`, such as one that remembers.
    """
    find = find or own_modules
    waiting, done, found = [(start, imports)], {start}, set()
    while waiting:
        path, names = waiting.pop()
        for name in names:
            targets = find(name, path, root)
            is_of_module = name.rpartition(".")[0] in names
            if not targets and not name.startswith("."):
                found |= set() if is_of_module else {name}
                found |= {package for start, package in _NEEDED_BY.items() if name == start}
            for target in targets - done:
                done.add(target)
                waiting.append((target, imports_of(target)))
    return found, done


def packages_of(script: Path) -> set[str]:
    """Return the packages that a script and the modules beside it import."""

    def imports_of(path: Path) -> set[str]:
        tree = parse_file(path)
        return set() if tree is None else imported_names(tree.body)

    names = reached(script, imports_of(script), imports_of, script.parent)[0]
    return {name.partition(".")[0] for name in names}


def own_modules(name: str, path: Path, root: Path) -> set[Path]:
    """Return the files of the repository that an import of a name in a module executes."""
    above = len(name) - len(name.lstrip("."))
    parts = name[above:].split(".") if name[above:] else []
    folders = [path.parent, root, root / "src"]
    if above:
        folders = [path.parents[min(above, len(path.parents)) - 1]]
    for folder in folders:
        file, package = folder.joinpath(*parts), folder.joinpath(*parts, "__init__.py")
        found = {one for one in (package, file.with_suffix(".py")) if parts and one.is_file()}
        if found:
            around = [folder.joinpath(*parts[:end], "__init__.py") for end in range(1, len(parts))]
            return {package if package in found else file.with_suffix(".py")} | {
                one for one in around if one.is_file()
            }
    return set()
