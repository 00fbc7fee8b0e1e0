"""No file and no function grows beyond what is read in one go."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"tpuport": 400, "benchmarks": 400, "recipes": 400, "tests": 500}
INIT, RULE, FUNCTION = 60, 160, 60

# Files that belong together although they are longer: how long they may be, and why.
EXCEPTIONS = {
    "tpuport/rules/tensor_branch.py": (
        280,
        "seven examples, each one a form of branch with its own reason, are two thirds of it, and"
        " a rule file holds its own examples",
    ),
    "tpuport/rules/tensor_check.py": (
        190,
        "the examples show asserts, raises and reports, and are two thirds of it; the code that"
        " fixes them is in _checking.py",
    ),
}


def most_lines(name: str) -> int:
    """How many lines a file may have, by its path from the root of the repository."""
    *folders, file = name.split("/")
    if name in EXCEPTIONS:
        return EXCEPTIONS[name][0]
    return standard_lines(folders, file)


def standard_lines(folders: list[str], file: str) -> int:
    """How many lines a file may have if nothing is said of it by name."""
    if file == "__init__.py":
        return INIT
    if folders == ["tpuport", "rules"] and not file.startswith("_"):
        return RULE
    return FOLDERS[folders[0]]


def find_excess(source: str, name: str) -> list[str]:
    """What of one file is over its budget, each as `path: reason`. Decorators do not count."""
    count, most = len(source.splitlines()), most_lines(name)
    found = [f"{name}: {count} lines, at most {most}"] if count > most else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION:
                found.append(f"{name}:{node.lineno}: {node.name} has {length} lines")
    return found


FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("name", FILES)
def test_files_and_functions_keep_to_their_budget(name: str):
    assert find_excess((ROOT / name).read_text(encoding="utf-8"), name) == []


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_every_exception_is_needed(name: str):
    *folders, file = name.split("/")
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert len(lines) > standard_lines(folders, file)


def test_every_folder_is_looked_at():
    assert {name.split("/")[0] for name in FILES} == set(FOLDERS)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("tpuport/model/ported_model.py", 400),
        ("tpuport/rules/_blocks.py", 400),
        ("tpuport/rules/tensor_while.py", 160),
        ("tpuport/rules/tensor_branch.py", 280),
        ("tpuport/tracing/lowerings/__init__.py", 60),
        ("benchmarks/measure.py", 400),
        ("recipes/flux.py", 400),
        ("tests/exactness/test_state.py", 500),
    ],
)
def test_a_long_file_is_noticed(name: str, most: int):
    assert find_excess("x = 1\n" * most, name) == []
    assert find_excess("x = 1\n" * (most + 1), name) == [
        f"{name}: {most + 1} lines, at most {most}"
    ]


@pytest.mark.parametrize("start", ["def f():", "async def f():", "@cache\ndef f():"])
def test_a_long_function_is_noticed(start: str):
    assert find_excess(start + "\n    pass" * 59, "tpuport/foundation/errors.py") == []
    (excess,) = find_excess(start + "\n    pass" * 60, "tpuport/foundation/errors.py")
    assert excess.endswith("f has 61 lines")
    nested = "class A:\n    " + (start + "\n    pass" * 60).replace("\n", "\n    ")
    assert len(find_excess(nested, "tpuport/foundation/errors.py")) == 1
