"""A stage imports only stages to its left, the source half imports no framework, and no module
needs itself to be imported.

Read from the syntax tree, so that an import inside a function counts too.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tpuport"

# What `tpuport.ops` gathers.
OPS = ("attention", "device", "filled", "masked", "state")
# The data flow from left to right. Members of one group may import each other.
GROUPS = (
    {"errors", "markup"},
    {"source", "rules"},
    {"lint"},
    {"diagnosis"},
    {"attention"},
    {"shims", "model", "checkpoints", "running", "ops", *(f"ops_{n}" for n in OPS)},
    {"sharding"},
    {"program"},
    {"training"},
)
# What stands beside the flow: it may import every stage, and no stage may import it.
FRONT = {"__init__", "cli", "commands", "demo", "doctor", "loading", "testing"}
# Every module there comes with the base install.
TEXT_ONLY = {"errors", "markup", "source", "rules", "lint", "diagnosis"}
FRAMEWORKS = {
    *("torch", "torchax", "jax", "jaxlib", "numpy", "optax"),
    *("transformers", "diffusers", "einops", "safetensors"),
}
LEVEL = {stage: level for level, group in enumerate(GROUPS) for stage in group}


def stage_of(path: Path) -> str:
    """The stage that a file of the package belongs to: the first part of its path in it."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


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


def find_violations(source: str, path: Path) -> list[str]:
    """What the imports of one file break, each as `path:line: reason`."""
    stage = stage_of(path)
    found = []
    for line, name in imported_modules(ast.parse(source), path):
        root, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if root != "tpuport":
            if stage in TEXT_ONLY and root in FRAMEWORKS:
                found.append(f"{path}:{line}: {stage} imports {root}")
        elif stage in FRONT or rest == "__version__":
            continue
        elif target not in LEVEL:
            found.append(f"{path}:{line}: {stage} imports {name}, which is not in a stage")
        elif LEVEL[target] > LEVEL[stage]:
            found.append(f"{path}:{line}: {stage} imports {target}, which is to its right")
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_module_has_a_place():
    assert {stage_of(path) for path in FILES} <= {*LEVEL, *FRONT}


def test_the_source_half_is_there():
    assert {"source", "rules", "model"} <= {stage_of(path) for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_left(path: Path):
    assert find_violations(path.read_text(encoding="utf-8"), path) == []


COMMANDS = [PACKAGE / "cli.py", *sorted((PACKAGE / "commands").glob("*.py"))]


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_the_command_line_imports_its_stages_lazily(path: Path):
    statements = ast.parse(path.read_text(encoding="utf-8")).body
    eager = (node for node in statements if isinstance(node, ast.Import | ast.ImportFrom))
    names = {name for node in eager for _, name in imported_modules(node, path)}
    ours = {name for name in names if name.startswith("tpuport.")}
    roots = {name.partition(".")[0] for name in names - ours}
    light = {"__version__", "commands", "errors", "markup"}
    assert {name.split(".")[1] for name in ours} <= light
    assert roots - {"typer"} <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("file", "source", "reason"),
    [
        ("source/engine.py", "import torch", "source imports torch"),
        ("source/engine.py", "import torch.nn as nn", "source imports torch"),
        ("rules/item_call.py", "def f():\n    from jax import numpy", "rules imports jax"),
        ("source/engine.py", "from tpuport.model import trace", "source imports model"),
        ("source/engine.py", "from ..model.trace import x", "source imports model"),
        ("source/engine.py", "from tpuport import model", "source imports model"),
        ("source/engine.py", "import_module('tpuport.compat.shims')", "source imports shims"),
        ("model/trace.py", "import tpuport.sharding.mesh", "model imports sharding"),
        ("model/trace.py", "if TYPE_CHECKING:\n    import tpuport.aot", "imports program"),
        ("model/trace.py", "from tpuport import convert", "tpuport.convert, which is not in"),
        (
            "model/trace.py",
            "from tpuport.cli.app import app",
            "tpuport.cli.app.app, which is not in",
        ),
        ("program/aot.py", "from ..training import loop", "program imports training"),
        ("errors.py", "from tpuport.source import finding", "errors imports source"),
        ("errors.py", "from . import rules", "errors imports rules"),
        ("lint/run.py", "import numpy", "lint imports numpy"),
        ("lint/run.py", "from tpuport.model import trace", "lint imports model"),
        ("lint/run.py", "from tpuport.cli import lint", "not in a stage"),
        ("source/engine.py", "from tpuport.lint import run", "source imports lint"),
    ],
)
def test_a_wrong_import_is_found(file: str, source: str, reason: str):
    (violation,) = find_violations(source, PACKAGE / file)
    assert reason in violation


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("source/engine.py", "import ast\nfrom tpuport.rules._rule import Rule"),
        ("source/engine.py", "from . import finding\nfrom .finding import Finding"),
        ("model/trace.py", "import torch\nfrom tpuport.source.rewrite.matching import lint"),
        ("lint/run.py", "from tpuport import __version__, errors, markup, rules, source"),
        ("model/lowerings/sort.py", "from ..backend import y\nfrom tpuport import ops, shims"),
        ("training/loop.py", "from tpuport import errors, model, program, sharding, source"),
        ("cli.py", "def demo():\n    from tpuport.demo import run\n    import torch"),
    ],
)
def test_a_right_import_is_not(file: str, source: str):
    assert find_violations(source, PACKAGE / file) == []


# Cycles: an import inside a function is free to lead back, one at the top of a file is not.


def needed_modules(body: list[ast.stmt], path: Path, known: set[str]) -> set[str]:
    """The modules of the package that importing a file imports."""
    needed = set()
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            needed |= needed_modules(node.body + node.orelse, path, known)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for _, name in imported_modules(node, path):
                needed.add(name if name in known else name.rpartition(".")[0])
    return needed & known


def find_cycle(needs: dict[str, set[str]]) -> list[str]:
    """Modules of which each imports the next, and the last one the first; empty if none do."""
    done: set[str] = set()

    def follow(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        for other in sorted(needs[name]) if name not in done else ():
            cycle = follow(other, [*path, name])
            if cycle:
                return cycle
        done.add(name)
        return []

    return next((cycle for name in needs if (cycle := follow(name, []))), [])


def test_no_module_needs_itself():
    names = {
        ".".join(("tpuport", *path.relative_to(PACKAGE).with_suffix("").parts)): path
        for path in FILES
    }
    modules = {name.removesuffix(".__init__"): path for name, path in names.items()}
    needs = {
        name: needed_modules(ast.parse(path.read_text(encoding="utf-8")).body, path, {*modules})
        for name, path in modules.items()
    }
    assert needs["tpuport.model.ported_model"] >= {
        "tpuport.tracing.core.arguments",
        "tpuport.model.program_cache",
    }
    assert find_cycle(needs) == []


def test_a_cycle_is_found():
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    path = PACKAGE / "errors.py"
    lazy = "if TYPE_CHECKING:\n    import tpuport.cli.app\ndef f():\n    import tpuport.cli.app"
    assert needed_modules(ast.parse(lazy).body, path, {"tpuport.cli.app"}) == set()
    eager = "if x:\n    from tpuport.cli.app import app"
    assert needed_modules(ast.parse(eager).body, path, {"tpuport.cli.app"}) == {"tpuport.cli.app"}
