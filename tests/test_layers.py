"""A room imports only rooms above it, the source half imports no framework, nothing imports itself.

Read from the syntax tree, so that an import inside a function and one under TYPE_CHECKING count.
docs/design/house.md describes the rooms; each has a README.
"""

import ast
import functools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tpuport"

# Each room and what it may import besides itself.
BASE = {"foundation"}
TEXT = BASE | {"source", "rules", "lint"}
TRACING = BASE | {"source", "kernels", "reports", "tracing"}
MODEL = TRACING | TEXT | {"weights", "cost", "diagnosis", "generation", "model"}
SPREAD = BASE | {"cost", "reports", "tracing", "model", "diagnosis", "sharding"}
AOT = SPREAD | {"weights", "kernels", "training", "aot"}
ROOMS: dict[str, set[str]] = {
    "foundation": set(),
    "source": BASE,
    "kernels": BASE,
    "reports": BASE,
    "weights": BASE,
    "cost": BASE,
    "rules": BASE | {"source"},
    "tracing": TRACING,
    "lint": TEXT,
    "ops": BASE | {"source", "tracing"},
    "migrate": TEXT,
    "diagnosis": TEXT,
    "generation": BASE | {"tracing"},
    "model": MODEL,
    "sharding": SPREAD,
    "quantization": SPREAD | {"weights", "quantization"},
    "training": SPREAD | {"weights"},
    "aot": AOT,
    "compat": MODEL | AOT,
}
# What stands in front of the rooms: it may import every room, and no room may import it.
FRONT = {
    *(
        "__init__",
        "__main__",
        "cli",
        "demo",
        "doctor",
        "loading",
        "measurement",
        "repository",
        "servers",
    ),
    "testing",
    "verify",
}

# The rooms of tracing/, from the bottom up: one may import what is in an earlier line.
TRACING_ROOMS = (
    {"core"},
    {"state", "lowerings", "dynamic_shapes"},
    {"attention.masks"},
    {"control_flow", "attention", "dispatch"},
    {"functions"},
    {"guards", "precision"},
    {"scan_layers", "patterns"},
    {"session"},
    {"patches"},
)

# What comes with the base install alone.
TEXT_ONLY = {
    "foundation.errors",
    "foundation.files",
    "foundation.reporting",
    "foundation.version",
    "foundation.user_frames",
    *("source", "rules", "lint", "diagnosis"),
}
FRAMEWORKS = {
    *("torch", "torchax", "jax", "jaxlib", "numpy", "optax"),
    *("transformers", "diffusers", "einops", "safetensors"),
}
MOST_IN_A_CIRCLE = 3


def name_of(path: Path) -> str:
    """Return the dotted name of a file from the package on: `tracing.core.tensor`."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imported_modules(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, `from tpuport import x` and string imports included."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                package = ("tpuport", *path.relative_to(PACKAGE).parent.parts)
                parents = package[: len(package) - level + 1] if level else ()
                base = ".".join([*parents, *([module] if module else [])])
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in names)
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                if ast.unparse(function).rpartition(".")[2] in {"import_module", "__import__"}:
                    yield node.lineno, name


def tracing_level(name: str) -> int | None:
    """Return the line of `TRACING_ROOMS` that a file of tracing/ belongs to."""
    rest = name.removeprefix("tracing.")
    found = [
        (len(room), level)
        for level, rooms in enumerate(TRACING_ROOMS)
        for room in rooms
        if rest == room or rest.startswith(room + ".")
    ]
    return max(found)[1] if found else None


def find_violations(source: str, path: Path) -> list[str]:
    """Return what the imports of one file break, each as `path:line: reason`."""
    own = name_of(path)
    room = own.partition(".")[0]
    text_only = any(own == one or own.startswith(one + ".") for one in TEXT_ONLY)
    found = []
    for line, name in imported_modules(ast.parse(source), path):
        root, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if root != "tpuport":
            if text_only and root in FRAMEWORKS:
                found.append(f"{path}:{line}: {room} imports {root}")
        elif room in FRONT or (target == room and room != "tracing"):
            continue
        elif target not in ROOMS:
            found.append(f"{path}:{line}: {room} imports {name}, which is not in a room")
        elif target != room and target not in ROOMS[room]:
            found.append(f"{path}:{line}: {room} imports {target}, which is no room above it")
        elif target == room:
            level, other = tracing_level(own), tracing_level(rest)
            if level is not None and other is not None and other > level:
                found.append(f"{path}:{line}: {own} imports {rest}, which is above it in tracing")
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_module_has_a_room():
    assert {name_of(path).partition(".")[0] for path in FILES} == {*ROOMS, *FRONT}


def test_every_room_of_tracing_has_a_level():
    files = [name_of(path) for path in FILES if path.parent != PACKAGE / "tracing"]
    assert [n for n in files if n.startswith("tracing.") and tracing_level(n) is None] == []


def test_imports_point_down_the_table():
    found = (find_violations(path.read_text(encoding="utf-8"), path) for path in FILES)
    assert [violation for one in found for violation in one] == []


# Every room is explained where it stands.

SUB_ROOMS = sorted(room for rooms in TRACING_ROOMS for room in rooms if "." not in room)
ROOM_FOLDERS = [*ROOMS, *(f"tracing/{room}" for room in SUB_ROOMS)]
READMES = sorted(PACKAGE.rglob("README.md"))


def missing_names(text: str, folder: Path) -> list[str]:
    """Return the files and folders that a README names in backticks and that do not exist."""
    names = re.findall(r"`([\w./-]+(?:\.py|/))`", text)
    return [name for name in names if not (folder / name).exists()]


def test_every_room_has_a_readme():
    assert [n for n in ROOM_FOLDERS if not (PACKAGE / n / "README.md").is_file()] == []


def test_a_readme_names_files_that_exist():
    texts = ((path, path.read_text(encoding="utf-8")) for path in READMES)
    assert [(p, n) for p, text in texts for n in missing_names(text, p.parent)] == []


PAGES = ("design/house.md", "glossary.md", "index.md", "pipeline.md")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_about_the_package_names_files_that_exist(page: str):
    text = (PACKAGE.parent / "docs" / page).read_text(encoding="utf-8")
    found = [n for n in missing_names(text, PACKAGE) if not (PACKAGE.parent / n).exists()]
    assert found == []


def test_a_wrong_name_in_a_readme_is_found():
    text = "`tensor.py`, `../core/`, `gone.py`, `away/`, `x.shape`, `file.py:function`"
    assert missing_names(text, PACKAGE / "tracing/core") == ["gone.py", "away/"]


COMMANDS = sorted((PACKAGE / "cli").glob("*.py"))


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_the_command_line_imports_its_rooms_lazily(path: Path):
    statements = ast.parse(path.read_text(encoding="utf-8")).body
    eager = (node for node in statements if isinstance(node, ast.Import | ast.ImportFrom))
    names = {name for node in eager for _, name in imported_modules(node, path)}
    ours = {name for name in names if name.startswith("tpuport.")}
    roots = {name.partition(".")[0] for name in names - ours}
    assert {name.split(".")[1] for name in ours} <= {"cli", "foundation"}
    assert roots - {"typer"} <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("file", "source", "reason"),
    [
        ("source/rewrite/live.py", "import torch", "source imports torch"),
        ("source/rewrite/live.py", "import torch.nn as nn", "source imports torch"),
        ("rules/item_call.py", "def f():\n    from jax import numpy", "rules imports jax"),
        ("source/rewrite/live.py", "from tpuport.rules import _rule", "source imports rules"),
        ("source/rewrite/live.py", "from ...model.convert import x", "source imports model"),
        ("source/rewrite/live.py", "from tpuport import model", "source imports model"),
        ("source/rewrite/live.py", "import_module('tpuport.compat')", "source imports compat"),
        ("model/convert.py", "import tpuport.sharding.mesh", "model imports sharding"),
        ("model/convert.py", "if TYPE_CHECKING:\n    import tpuport.aot", "model imports aot"),
        ("model/convert.py", "from tpuport import convert", "tpuport.convert, which is not in"),
        ("model/convert.py", "from tpuport.cli.app import app", "cli.app.app, which is not in"),
        ("training/step.py", "from ..aot import search", "training imports aot"),
        ("foundation/errors.py", "from tpuport.source import rewrite", "imports source"),
        ("foundation/errors.py", "import torch", "foundation imports torch"),
        ("lint/run.py", "import numpy", "lint imports numpy"),
        ("lint/run.py", "from tpuport.model import convert", "lint imports model"),
        ("lint/run.py", "from tpuport.cli import lint", "not in a room"),
        ("weights/save.py", "from tpuport.tracing.core import tensor", "weights imports tracing"),
        ("tracing/core/tensor.py", "from tpuport.tracing.dispatch import x", "above it in tracing"),
        ("tracing/dispatch/x.py", "from tpuport.tracing.session.tracer import y", "above it in"),
    ],
)
def test_a_wrong_import_is_found(file: str, source: str, reason: str):
    (violation,) = find_violations(source, PACKAGE / file)
    assert reason in violation


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("rules/item_call.py", "import ast\nfrom tpuport.rules._rule import Rule"),
        ("source/rewrite/live.py", "from . import finding\nfrom .finding import Finding"),
        ("model/convert.py", "import torch\nfrom tpuport.source.rewrite.live import x"),
        ("lint/run.py", "from tpuport import foundation, rules, source"),
        ("tracing/session/x.py", "from ..core.tensor import y\nfrom tpuport import reports"),
        ("tracing/attention/x.py", "from tpuport.tracing.attention.masks import bands"),
        ("training/loop.py", "from tpuport import foundation, model, sharding, weights"),
        ("cli/app.py", "def demo():\n    from tpuport.demo import run\n    import torch"),
    ],
)
def test_a_right_import_is_not(file: str, source: str):
    assert find_violations(source, PACKAGE / file) == []


# Circles, of packages and of files. Every import counts, wherever it stands.


def modules_of(files: Iterable[Path]) -> dict[str, Path]:
    """Return every module by its dotted name; a package by its own."""
    names = {f"tpuport.{name_of(path)}": path for path in files}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


def import_graph(modules: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    graph: dict[str, set[str]] = {}
    for own, path in modules.items():
        graph[own] = set()
        for _, name in imported_modules(ast.parse(path.read_text(encoding="utf-8")), path):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name and name != own:
                graph[own].add(name)
    return graph


def package_graph(graph: Mapping[str, set[str]], packages: set[str]) -> dict[str, set[str]]:
    """Return the packages that each package imports.

    The `__init__` of a package is its face and names what is inside; it is no part of the package
    here, so that the package may hold others that import its files. Neither is its `__main__`,
    which starts what is inside.
    """
    found: dict[str, set[str]] = {}

    def home(name: str) -> str:
        is_face = name in packages or name.endswith(".__main__")
        return f"{name} (face)" if is_face else name.rpartition(".")[0]

    for name, needed in graph.items():
        own = found.setdefault(home(name), set())
        own |= {home(other) for other in needed} - {home(name)}
    for needed in list(found.values()):
        for name in needed:
            found.setdefault(name, set())
    return found


def find_circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the sets of nodes that reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            circle = sorted(stack[at:])
            del stack[at:]
            if len(circle) > 1:
                circles.append(circle)

    for name in graph:
        if name not in index:
            visit(name)
    return circles


MODULES = modules_of(FILES)


@functools.cache
def whole_graph() -> dict[str, set[str]]:
    """Return the graph of the package; reading all its files takes a second or two."""
    return import_graph(MODULES)


def test_the_graph_sees_what_is_there():
    graph = whole_graph()
    assert len(graph) > 400
    assert "tpuport.tracing.core.tensor" in graph["tpuport.tracing.core.context"]
    assert "tpuport.compat.shims" in graph["tpuport.compat.porting"]


def test_no_packages_import_each_other():
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert find_circles(package_graph(whole_graph(), packages)) == []


def test_no_circle_of_files_is_large():
    assert [c for c in find_circles(whole_graph()) if len(c) > MOST_IN_A_CIRCLE] == []


def test_a_circle_is_found():
    assert find_circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert find_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]
    graph = {"p.x": {"q.y"}, "q.y": {"p.z"}, "p.z": set(), "p": {"p.x"}}
    assert find_circles(package_graph(graph, {"p"})) == [["p", "q"]]
    inside = {"p": {"p.q.y"}, "p.q.y": {"p.x"}, "p.x": set()}
    assert find_circles(package_graph(inside, {"p"})) == []


def test_an_import_inside_a_function_counts():
    lazy = "if TYPE_CHECKING:\n    import tpuport.cli\ndef f():\n    import tpuport.demo.story"
    names = [name for _, name in imported_modules(ast.parse(lazy), PACKAGE / "errors.py")]
    assert names == ["tpuport.cli", "tpuport.demo.story"]
