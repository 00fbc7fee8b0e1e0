"""Modules that a file imports by a name that it computes; nothing is run."""

import ast
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

# What stands for a part of a name that only a run knows.
_ANY = "\0"
_MOST = 64
# Functions, and which argument names a module, or what is in one.
_BY_NAME = {
    "import_module": 0,
    "__import__": 0,
    "resolve_name": 0,
    "locate": 0,
    "import_string": 0,
    "run_module": 0,
    "get_class": 0,
    "get_object": 0,
    "get_method": 0,
    "instantiate": 0,
}
_BY_FILE = {"spec_from_file_location": 1, "SourceFileLoader": 1, "run_path": 0}
_BY_CODE = {"exec": 0, "eval": 0}
_LISTING = {"iter_modules", "walk_packages", "listdir", "scandir", "glob", "iglob", "rglob"}
_LISTING |= {"iterdir", "walk"}
_IMPORTS = re.compile(rf"\b(?:from|import)\s+([\w.{_ANY}]+)")
_PLACE = re.compile(r"%(?:\(\w+\))?[sdr]|\{[^{}]*\}")
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")
_FILE = re.compile(rf"[\w./{_ANY}-]+\.ya?ml")


def computed_names(tree: ast.Module) -> set[str]:
    """Return names of modules that a file computes, with a zero byte for each part that is open.

    Where all of a name is open, they are the dotted names and patterns of it that the file has as
    strings anywhere (tables of classes, `f"models.{name}"`), the YAML files that it names, and, if
    it lists folders, each module beside it, as `.` and a zero byte.
    """
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    importing = [call for call in calls if _place(_name_of(call.func)) is not None]
    if not importing:
        return set()
    known = _known_texts(tree)
    found: set[str] = set()
    is_open = False
    for call in importing:
        for text in _named(call, known):
            if text.strip(_ANY + "."):
                found.add(text)
            else:
                is_open = True
                found |= {text} if text.startswith(".") else set()
    if is_open:
        strings = {text for node in ast.walk(tree) for text in _texts(node, known)}
        found |= {text for text in strings if _FILE.fullmatch(text) or _is_pattern(text)}
        names = {name.id for name in ast.walk(tree) if isinstance(name, ast.Name)}
        lists = any(_name_of(call.func) in _LISTING for call in calls)
        found |= {f".{_ANY}"} if lists and names & {"__path__", "__file__"} else set()
    return found


def modules_named(texts: Iterable[str], path: Path, root: Path, files: Iterable[Path]) -> set[str]:
    """Return the modules of a repository that computed names may be, as an import has them.

    Args:
        texts: What `computed_names` gave.
        path: The file that has them.
        root: The folder of the repository.
        files: Its Python files.
    """
    texts = set(texts)
    if not texts:
        return set()
    for text in [text for text in texts if _FILE.fullmatch(text)]:
        texts |= _names_in_yaml(text.replace(_ANY, "*"), path, root)
    expressions = [re.compile(_expression(text)) for text in texts if not _FILE.fullmatch(text)]
    found = set()
    for file in files:
        for folder, dots in ((root, ""), (root / "src", ""), (path.parent, ""), (path.parent, ".")):
            if file != path and file.is_relative_to(folder):
                parts = file.relative_to(folder).with_suffix("").parts
                name = dots + ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                if any(one.fullmatch(name) for one in expressions):
                    found.add(name)
    return found


def _expression(text: str) -> str:
    """Return a regular expression for modules: those with a name, or that hold what has it."""
    parts = re.split(r"[.:]", text.strip(":")) if _ANY not in text else []
    if len(parts) > 1 and all(parts):  # `models.net.Net` is in a module `models.net`
        names = (".".join(parts), ".".join(parts[:-1]))
        return "|".join(map(re.escape, names))
    return re.escape(text).replace(re.escape(_ANY), r"[\w.]+")


def _named(call: ast.Call, known: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield what a call imports, if it is one that imports by a name."""
    function = _name_of(call.func)
    place = _place(function)
    if place is None or len(call.args) <= place:
        return
    for text in _texts(call.args[place], known) or {_ANY}:
        if function in _BY_CODE:
            yield from _IMPORTS.findall(text)
        elif function in _BY_FILE:
            yield text.removesuffix(".py").removeprefix("./").replace("/", ".")
        else:
            yield from (f"{package}{text}" for package in _packages(call, text, known))


def _place(function: str) -> int | None:
    return next((t[function] for t in (_BY_NAME, _BY_FILE, _BY_CODE) if function in t), None)


def _packages(call: ast.Call, text: str, known: Mapping[str, set[str]]) -> set[str]:
    """Return what a name that begins with a dot is relative to, if a call says so."""
    given = [one.value for one in call.keywords if one.arg == "package"] or call.args[1:2]
    names = _texts(given[0], known) if given and text.startswith(".") else set()
    return {"" if name in (".", _ANY) else name for name in names} or {""}


def _name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _known_texts(tree: ast.Module) -> dict[str, set[str]]:
    """Return what the strings, and tables of strings, that a file gives names to may be."""
    known: dict[str, set[str]] = {"__name__": {"."}, "__package__": {"."}}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = node.value
            parts = value.values if isinstance(value, ast.Dict) else [value]
            texts = set().union(*(_texts(part, {}) for part in parts))
            for target in targets:
                if texts and isinstance(target, ast.Name):
                    known.setdefault(target.id, set()).update(texts)
    return known


def _texts(node: ast.AST, known: Mapping[str, set[str]]) -> set[str]:
    """Return the strings that an expression may be; none if it says nothing about one."""
    match node:
        case ast.Constant(value=str(text)):
            return {text}
        case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)):
            return known.get(name, set())
        case ast.IfExp(body=body, orelse=other):
            return _texts(body, known) | _texts(other, known)
        case ast.JoinedStr(values=values):
            return _joined([_texts(value, known) for value in values])
        case ast.FormattedValue(value=value):
            return _texts(value, known) or {_ANY}
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            sides = [_texts(left, known), _texts(right, known)]
            return _joined(sides) if any(sides) else set()
        case ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Mod()):
            return {_PLACE.sub(_ANY, text)}
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str(text)), attr=attr), args=args
        ):
            return _called(text, attr, args, known)
    return set()


def _called(
    text: str, method: str, args: list[ast.expr], known: Mapping[str, set[str]]
) -> set[str]:
    """Return what a method of a string may give: `format` and `join`."""
    if method == "format":
        return {_PLACE.sub(_ANY, text)}
    if method == "join" and args and isinstance(args[0], ast.List | ast.Tuple):
        parts: list[set[str]] = []
        for one in args[0].elts:
            parts += [{text}, _texts(one, known)]
        return _joined(parts[1:])
    return set()


def _joined(parts: list[set[str]]) -> set[str]:
    choices = itertools.product(*(sorted(part) or [_ANY] for part in parts))
    found = {"".join(choice) for choice in itertools.islice(choices, _MOST)}
    return {re.sub(r"^\.\.(?!\.)", ".", re.sub(f"{_ANY}+", _ANY, text)) for text in found}


def _is_pattern(text: str) -> bool:
    """Return whether a string may name a module: dotted, with something known in it."""
    return re.fullmatch(rf"\.?[\w{_ANY}]+([.:][\w{_ANY}]+)+", text) is not None and bool(
        re.search(r"[A-Za-z]", text)
    )


def _names_in_yaml(pattern: str, path: Path, root: Path) -> set[str]:
    """Return the dotted names in configuration files that a script names."""
    found: set[str] = set()
    for folder in {path.parent, root}:
        relative = pattern.lstrip("/") if not pattern.startswith("..") else ""
        for file in itertools.islice(folder.glob(relative) if relative else (), _MOST):
            found |= _dotted_in(file, file.stat().st_mtime_ns)
    return found


@lru_cache(256)
def _dotted_in(file: Path, changed: int) -> frozenset[str]:
    del changed
    from tpuport.repository.texts import read_text

    return frozenset(_DOTTED.findall(read_text(file)))
