"""No file, function or class grows beyond what is read in one go.

What counts is code: docstrings, comments and blank lines are free, so that nobody saves on them,
and so are the examples of a rule, which are its tests and its page.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"tpuport": 500, "benchmarks": 500, "recipes": 500, "tests": 600}
INIT, FUNCTION, METHODS = 60, 60, 20
# A rule holds its detection and its fix, so that one file tells all about it. The longest is
# write_through_view: it follows a view to its base, and has to prove that the base can be rebound.
RULE = 300
# What rules show in the documentation and run as tests, and the list of a package's names.
FREE = {"EXAMPLES", "CLEAN", "__all__"}

# Classes with more public methods, and why.
EXCEPTIONS = {
    "tpuport/tracing/core/sym_node.py:NumberNode": "the methods of torch's SymNode",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = Function | ast.ClassDef | ast.Module


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and the statements in it: expressions, which are nine of ten, define nothing."""
    yield node
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        inside = getattr(node, name, None)
        for one in inside if isinstance(inside, list) else ():
            yield from statements(one)


def free_lines(tree: ast.AST) -> set[int]:
    """Return the lines of docstrings and of lists that are free."""
    lines: set[int] = set()
    for node in statements(tree):
        if isinstance(node, Documented) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines.update(range(first.lineno, (first.end_lineno or 0) + 1))
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in FREE:
            lines.update(range(node.lineno, (node.end_lineno or 0) + 1))
    return lines


def code_lines(source: str, tree: ast.AST) -> set[int]:
    """Return the numbers of the lines that hold code."""
    free = free_lines(tree)
    return {
        number
        for number, line in enumerate(source.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#") and number not in free
    }


def most_lines(name: str) -> int:
    """Return how many lines of code a file may have, by its path from the root."""
    *folders, file = name.split("/")
    if file == "__init__.py":
        return INIT
    if folders == ["tpuport", "rules"] and not file.startswith("_"):
        return RULE
    return FOLDERS[folders[0]]


def public_methods(node: ast.ClassDef) -> set[str]:
    """Return the methods that callers may use; properties are values, and `visit_X` is ast's."""
    return {
        method.name
        for method in node.body
        if isinstance(method, Function)
        and not method.name.startswith(("_", "visit_"))
        and not any(
            "property" in ast.unparse(d) or ".setter" in ast.unparse(d)
            for d in method.decorator_list
        )
    }


def find_excess(source: str, name: str) -> list[str]:
    """Return what of one file is over its budget, each as `path: reason`."""
    tree = ast.parse(source)
    code = code_lines(source, tree)
    most = most_lines(name)
    found = [f"{name}: {len(code)} lines of code, at most {most}"] if len(code) > most else []
    for node in statements(tree):
        if isinstance(node, Function):
            length = sum(line in code for line in range(node.lineno, (node.end_lineno or 0) + 1))
            if length > FUNCTION:
                found.append(f"{name}:{node.lineno}: {node.name} has {length} lines of code")
        if isinstance(node, ast.ClassDef) and f"{name}:{node.name}" not in EXCEPTIONS:
            count = len(public_methods(node))
            if count > METHODS:
                found.append(f"{name}:{node.lineno}: {node.name} has {count} public methods")
    return found


FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
)


def test_files_functions_and_classes_keep_to_their_budget():
    found = (find_excess((ROOT / name).read_text(encoding="utf-8"), name) for name in FILES)
    assert [excess for one in found for excess in one] == []


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_every_exception_is_needed(name: str):
    file, _, wanted = name.partition(":")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    (found,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == wanted]
    assert len(public_methods(found)) > METHODS


def test_every_folder_is_looked_at():
    assert {name.split("/")[0] for name in FILES} == set(FOLDERS)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("tpuport/model/convert.py", 500),
        ("tpuport/rules/_blocks.py", 500),
        ("tpuport/rules/tensor_while.py", 300),
        ("tpuport/tracing/lowerings/__init__.py", 60),
        ("benchmarks/measure.py", 500),
        ("recipes/flux.py", 500),
        ("tests/exactness/test_state.py", 600),
    ],
)
def test_a_long_file_is_noticed(name: str, most: int):
    free = '"""Docs.\n\nMore."""\n\n# A comment.\n'
    assert find_excess(free + "x = 1\n" * most, name) == []
    assert find_excess(free + "x = 1\n" * (most + 1), name) == [
        f"{name}: {most + 1} lines of code, at most {most}"
    ]


def test_examples_of_a_rule_are_free():
    examples = "class A:\n    EXAMPLES = (\n" + "        1,\n" * 400 + "    )\n"
    assert find_excess(examples, "tpuport/rules/tensor_while.py") == []


@pytest.mark.parametrize("start", ["def f():", "async def f():", "@cache\ndef f():"])
def test_a_long_function_is_noticed(start: str):
    name = "tpuport/model/convert.py"
    assert find_excess(start + '\n    """Docs."""' + "\n    pass" * 59, name) == []
    (excess,) = find_excess(start + "\n    pass" * 60, name)
    assert excess.endswith("f has 61 lines of code")
    nested = "class A:\n    " + (start + "\n    pass" * 60).replace("\n", "\n    ")
    assert len(find_excess(nested, name)) == 1


def test_a_class_with_many_methods_is_noticed():
    methods = "".join(f"    def m{i}(self): ...\n" for i in range(20))
    private = "    def _p(self): ...\n    def visit_If(self): ...\n"
    assert find_excess("class A:\n" + methods + private, "tpuport/model/convert.py") == []
    (excess,) = find_excess("class A:\n    def n(self): ...\n" + methods, "tpuport/a.py")
    assert excess.endswith("A has 21 public methods")


# Each recipe is a program of its own.
PROGRAMS = [
    "tpuport",
    *(str(p.parent.relative_to(ROOT)) for p in ROOT.glob("recipes/*/__init__.py")),
]
# Modules of a network, which models of different families name alike.
SAME_IN_TWO_FAMILIES = {"RMSNorm", "RotaryEmbedding", "SwiGLU"}


@pytest.mark.parametrize("folder", sorted(PROGRAMS))
def test_a_class_name_means_one_thing(folder: str):
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in statements(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in twice.items() if name not in SAME_IN_TWO_FAMILIES} == {}
