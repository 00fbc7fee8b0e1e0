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
    """Return the modules that statements import, but for those below a condition or a `try`."""
    found: set[str] = set()
    for statement in body:
        match statement:
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module), level=0):
                found.add(module)
            case ast.ImportFrom(module=module, names=names):
                found |= {f".{module or alias.name}" for alias in names}
    return found


def reached(
    start: Path, imports: set[str], imports_of: Callable[[Path], set[str]], root: Path
) -> tuple[set[str], set[Path]]:
    """Return what a script imports, also through others: packages, and modules beside it.

    Args:
        start: The script.
        imports: What it imports itself.
        imports_of: Returns that of another module.
        root: The folder of the repository.
    """
    waiting, done, found = [(start, imports)], {start}, set()
    while waiting:
        path, names = waiting.pop()
        for name in names:
            target = _own_module(name, path, root)
            if target is None:
                if not name.startswith("."):
                    found.add(name.partition(".")[0])
                    found |= {package for start, package in _NEEDED_BY.items() if name == start}
            elif target not in done:
                done.add(target)
                waiting.append((target, imports_of(target)))
    return found, done


def packages_of(script: Path) -> set[str]:
    """Return the packages that a script and the modules beside it import."""

    def imports_of(path: Path) -> set[str]:
        tree = parse_file(path)
        return set() if tree is None else imported_names(tree.body)

    return reached(script, imports_of(script), imports_of, script.parent)[0]


def _own_module(name: str, path: Path, root: Path) -> Path | None:
    relative = name.lstrip(".").replace(".", "/")
    for folder in [path.parent] if name.startswith(".") else [path.parent, root, root / "src"]:
        for candidate in (folder / f"{relative}.py", folder / relative / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None
