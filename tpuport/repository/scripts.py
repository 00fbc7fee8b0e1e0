"""The scripts of a repository that a person would start, found without running anything."""

import ast
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from tpuport.foundation.cuda_only import is_cuda_only
from tpuport.repository.computed_imports import computed_names, modules_named
from tpuport.repository.texts import read_text
from tpuport.verify.imports import (
    imported_names,
    later_names,
    own_modules,
    parse_file,
    reached,
    started_names,
)

# How the files of a repository name its scripts: `torchrun --nproc_per_node=8 train.py --lr 1`.
_LAUNCHERS = ("python", "python3", "torchrun", "deepspeed", "accelerate")
# What a document may have in front of a command: `$ `, `(env)[folder]$ `.
_PROMPT = re.compile(r"^[^`'\"]*?\$ ")
_SHELL = {".sh", ".bash", ".md", ".slurm", ".sbatch"}
_CONFIGURATION = {".yaml", ".yml"}
_LARGEST = 1_000_000
# `export SPLIT="train"`, which a later line of the same file uses as `$SPLIT`.
_ASSIGNED = re.compile(
    r"^\s*(?:export\s+)?(?P<name>[A-Za-z_]\w*)=(?P<q>[\"']?)(?P<value>[^\s$`\"'();|&<>#]+)(?P=q)\s*$",
    re.MULTILINE,
)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
# Where a command of a shell ends.
_ENDS = re.compile(r"\d?>{1,2}.*|&>.*|[|&;<]{1,2}|\d>&\d")
# What `tpuport run` has in place of packages for CUDA.
_PROVIDED = {
    path.stem for path in Path(__file__).parents[1].joinpath("compat", "packages").glob("[!_]*.py")
}
_HELPERS = {"tests", "test", "docs", "scripts", "tools", "examples", "third_party", "setup"}


@dataclass(frozen=True)
class Launch:
    """A line of a shell script or document that starts a script.

    Attributes:
        place: The file and the line.
        launcher: `python`, `torchrun` and so on.
        arguments: What follows the script's name.
    """

    place: str
    launcher: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class StartScript:
    """A script that can be started.

    Attributes:
        path: The script, relative to the repository.
        trains: Whether it or a module that it imports calls `backward()`, or a trainer that does.
        reasons: Why it is thought to be an entry point, in words.
        required: Arguments that it cannot do without.
        launches: The lines that start it.
        missing: Packages without which it does not start: that it or its own modules import at
            their top, or it in functions that it calls in any case, and that are not installed.
        maybe_missing: Packages that are imported elsewhere in them, and are not installed.
        score: How likely it is to be the one.
        packages: All packages that it or its own modules import at their top.
        modules: The files of the repository that it imports, relative to it.
    """

    path: str
    trains: bool
    reasons: tuple[str, ...]
    required: tuple[str, ...] = ()
    launches: tuple[Launch, ...] = ()
    missing: tuple[str, ...] = ()
    score: int = 0
    packages: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    maybe_missing: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """Return the path as a word of a command, which takes no dash at its start for a name."""
        return f"./{self.path}" if self.path.startswith("-") else self.path


@dataclass
class _Seen:
    """What the syntax tree of a file shows."""

    has_main: bool = False
    trains: bool = False
    hydra: bool = False
    required: list[str] = field(default_factory=list)
    imports: set[str] = field(default_factory=set)
    started: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)
    # As the file has them first, then as the modules that they may be.
    computed: set[str] = field(default_factory=set)


class _SeenFiles(dict[Path, _Seen]):
    """What each file of a repository shows, and which files an import in it is."""

    def __init__(self, found: Mapping[Path, _Seen]) -> None:
        super().__init__(found)
        self.find = cache(own_modules)  # scripts import much the same


def find_scripts(root: Path, files: Sequence[Path]) -> list[StartScript]:
    """Return the scripts that can be started, the likeliest first.

    Args:
        root: The folder of the repository.
        files: Its Python files.
    """
    seen = _read_all(root, files)
    launches = _launches(root)
    own = _own_names(root, files)
    found = []
    for path, one in seen.items():
        name = path.relative_to(root).as_posix()
        started = tuple(launches.get(path.name, ()))
        if not (one.has_main or started) or path.name == "setup.py":
            continue
        imported, modules = _reached(path, one.started, seen, root)
        modules |= _may_reach(path, one.started | one.later, seen, root)
        one.trains |= any(seen[module].trains for module in modules)
        score, reasons = _score(name, one, started)
        script = StartScript(
            *(name, one.trains, reasons, tuple(one.required), started[:5], (), score)
        )
        found.append(_with_packages(script, imported, modules, own, seen, root))
    return sorted(found, key=lambda one: (-one.score, one.path.count("/"), one.path))


def find_texts(root: Path) -> list[Path]:
    """Return the files that say how scripts are started: shell scripts, documents, YAML."""
    return [
        path
        for path in sorted(root.rglob("*"))
        if path.suffix in _SHELL | _CONFIGURATION
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
        and path.is_file()
        and path.stat().st_size <= _LARGEST
    ]


def add_packages(
    script: StartScript, root: Path, files: Sequence[Path], targets: set[str]
) -> StartScript:
    """Return a script with the packages and modules that it imports by name when it runs.

    Args:
        script: The script.
        root: The folder of the repository.
        files: Its Python files.
        targets: Dotted names of classes and functions, such as a configuration has.
    """
    imports = {name.rpartition(".")[0] for name in targets if "." in name}
    if not imports:
        return script
    seen = _read_all(root, files)
    own = _own_names(root, files)
    names, modules = _reached(root / script.path, imports, seen, root)
    known = {root / name for name in script.modules}
    modules |= _may_reach(root / script.path, imports, seen, root)
    trains = script.trains or any(seen[module].trains for module in modules)
    script = replace(script, trains=trains)
    names |= set(script.packages)
    return _with_packages(script, names, modules | known, own, seen, root)


def _with_packages(
    script: StartScript,
    imported: set[str],
    modules: set[Path],
    own: set[str],
    seen: _SeenFiles,
    root: Path,
) -> StartScript:
    start = root / script.path
    names = sorted(path.relative_to(root).as_posix() for path in modules if path != start)
    later = _imported_in_some_cases({start, *modules} & seen.keys(), seen, root)
    absent = [_packages(one for one in n if not _installed(one, own)) for n in (imported, later)]
    return replace(
        script,
        missing=tuple(sorted(absent[0])),
        packages=tuple(sorted(_packages(imported))),
        modules=tuple(names),
        maybe_missing=tuple(sorted(absent[1] - absent[0])),
    )


def _imported_in_some_cases(modules: set[Path], seen: _SeenFiles, root: Path) -> set[str]:
    """Return all that modules may import, also through what they import in some cases only."""

    def imports_of(path: Path) -> set[str]:
        one = seen.get(path)
        if one is None:
            return set()
        return one.imports | one.started | one.later | one.computed

    found: set[str] = set()
    done: set[Path] = set()
    for module in modules:
        if module not in done:
            names, through = reached(module, imports_of(module), imports_of, root, seen.find)
            found |= names
            done |= through
    return found


def shown_launches(entry: StartScript) -> list[str]:
    """Return how the repository starts a script, on a CPU first, then on one device."""
    known = [one for one in entry.launches if one.arguments]
    known.sort(key=lambda one: ("cpu" not in " ".join(one.arguments), one.launcher == "torchrun"))
    return [f"{one.place} starts it with `{shlex.join(one.arguments)}`" for one in known]


def _score(name: str, seen: _Seen, started: Sequence[Launch]) -> tuple[int, tuple[str, ...]]:
    parts = Path(name).parts
    stem = Path(name).stem.lower()
    points = {
        "it trains": 4 * seen.trains,
        "it has a main part": 2 * seen.has_main,
        "other files start it": 3 * bool(started),
        "hydra configures it": 2 * seen.hydra,
        "it has the name of a script that trains": 3
        * stem.startswith(("train", "main", "finetune")),
        "it lies at the top": 1 * (len(parts) == 1),
    }
    helper = any(part.lower() in _HELPERS for part in parts[:-1]) or stem.startswith("test")
    return sum(points.values()) - 4 * helper, tuple(why for why, n in points.items() if n)


def _read_all(root: Path, files: Sequence[Path]) -> _SeenFiles:
    """Return what each file shows that can be parsed."""
    seen = _SeenFiles({path: one for path in files if (one := _read(path)) is not None})
    for path, one in seen.items():
        one.computed = modules_named(one.computed, path, root, seen)
    return seen


def _read(path: Path) -> _Seen | None:
    """Return what a file shows, or None if it cannot be parsed."""
    tree = parse_file(path)
    if tree is None:
        return None
    seen = _Seen()
    for node in ast.walk(tree):
        match node:
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                seen.has_main = True
            case ast.Call(func=ast.Attribute(attr="backward")):
                seen.trains = True
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="fit" | "train")):
                seen.trains |= "trainer" in name.lower()
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=args, keywords=keywords):
                seen.required += _required(args, keywords)
            case ast.Attribute(value=ast.Name(id="hydra"), attr="main"):
                seen.has_main = seen.hydra = True
    seen.imports, seen.later = imported_names(tree.body), later_names(tree)
    seen.started = started_names(tree)
    seen.computed = computed_names(tree)
    # A script like nanoGPT's has no main part: it runs from its first line to its last.
    loops = any(isinstance(node, (ast.While, ast.For)) for node in tree.body)
    seen.has_main |= loops and seen.trains
    return seen


def _required(args: Sequence[ast.expr], keywords: Sequence[ast.keyword]) -> list[str]:
    given = {keyword.arg: keyword.value for keyword in keywords}
    names = [a.value for a in args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    if not names:
        return []
    needed = given.get("required")
    positional = not names[0].startswith("-") and "default" not in given
    optional = given.get("nargs")
    if isinstance(optional, ast.Constant) and optional.value in ("?", "*"):
        positional = False
    is_needed = isinstance(needed, ast.Constant) and needed.value is True
    return [max(names, key=len)] if positional or is_needed else []


def _reached(
    start: Path, imports: set[str], seen: _SeenFiles, root: Path
) -> tuple[set[str], set[Path]]:
    """Return what a script imports, also through others: names, and modules beside it."""

    def imports_of(path: Path) -> set[str]:
        return seen[path].imports if path in seen else set()

    packages, modules = reached(start, imports, imports_of, root, seen.find)
    return packages, modules & seen.keys()


def _may_reach(start: Path, names: set[str], seen: _SeenFiles, root: Path) -> set[Path]:
    """Return the modules that a script may import, by names that it and they compute as well.

    Args:
        start: The script.
        names: What it imports, in some cases only as well.
        seen: What is known of each file.
        root: The folder of the repository.
    """

    def imports_of(path: Path) -> set[str]:
        one = seen.get(path)
        return set() if one is None else one.imports | one.computed

    found = reached(start, names | imports_of(start), imports_of, root, seen.find)[1]
    return found & seen.keys()


def _packages(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def _own_names(root: Path, files: Sequence[Path]) -> set[str]:
    """Return what the files of a repository may be imported as, wherever the search path begins.

    A folder `env/robomimic` is no package `robomimic.utils`.
    """
    found = set()
    for path in files:
        parts = path.relative_to(root).with_suffix("").parts
        for end in range(1, len(parts) + 1):
            found |= {".".join(parts[start:end]) for start in range(end)}
    return found


def _installed(name: str, own: set[str]) -> bool:
    """Return whether an import finds something: a package, a module beside it, or a stand-in."""
    package = name.partition(".")[0]
    if name in own or package in sys.stdlib_module_names or package in sys.builtin_module_names:
        return True
    if package in _PROVIDED or is_cuda_only(name):
        return True
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _launches(root: Path) -> dict[str, list[Launch]]:
    """Return the lines that start Python files, by the name of the file."""
    found: dict[str, list[Launch]] = {}
    for path in (path for path in find_texts(root) if path.suffix in _SHELL):
        text = read_text(path)
        values = {m["name"]: m["value"] for m in _ASSIGNED.finditer(text)}
        for number, line in _joined_lines(text):
            launch = _parse(
                _with_variables(line, values), f"{path.relative_to(root).as_posix()}:{number}"
            )
            if launch is not None:
                found.setdefault(launch[0], []).append(launch[1])
    return found


def _joined_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines with their numbers; one that ends in a backslash goes on in the next."""
    start, parts = 0, []
    for number, line in enumerate(text.splitlines(), 1):
        start = start or number
        parts.append(line.rstrip().removesuffix("\\"))
        if not line.rstrip().endswith("\\"):
            yield start, " ".join(parts)
            start, parts = 0, []
    if parts:
        yield start, " ".join(parts)


def _with_variables(line: str, values: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: values.get(match[1] or match[2], match[0]), line)


def _parse(line: str, place: str) -> tuple[str, Launch] | None:
    try:
        words = shlex.split(_PROMPT.sub("", line), comments=True)
    except ValueError:
        return None
    while words and re.fullmatch(r"\w+=.*", words[0]):
        del words[0]
    if not words or words[0] not in _LAUNCHERS:
        return None
    script = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if script is None:
        return None
    given = words[script + 1 :]
    end = next((i for i, word in enumerate(given) if _ENDS.fullmatch(word)), len(given))
    return Path(words[script]).name, Launch(place, words[0], tuple(given[:end]))
