"""Files with syntax of newer Pythons are linted by this one, with the places of the file."""

import ast
import sys

import pytest

from tpuport.lint.check import parse
from tpuport.lint.sources import read_source
from tpuport.rules._apply import find
from tpuport.source.syntax.newer_python import parse_newer

NEWER = '''type Alias = int
type Pair[T] = tuple[T, T]


class Box[T: (int, str)](list):
    type Inner = list[T]

    def get[U](self, x: U, *, end: str = "'") -> T:
        type = 3  # "no string
        print(f"{x["a"]} {'\\n'.join(x)} {x!r:>{x["k"]}} {{no}}", type, f'{f"{x['q']}"}')
        return x.item()


async def last[**P, *Ts](x): return rf"""{x['it"s']} {"""a"""} \\d"""
'''


def test_newer_syntax_is_read_with_its_places():
    tree, is_other = parse_newer(NEWER, "new.py")
    assert is_other is (sys.version_info < (3, 12))
    lines = NEWER.splitlines()
    names = {node.id: node for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert {"Alias", "Pair", "Inner"} <= set(names)
    item = next(n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "item")
    assert lines[item.lineno - 1][item.col_offset : item.end_col_offset] == "x.item"
    assert [n.name for n in ast.walk(tree) if isinstance(n, ast.AsyncFunctionDef)] == ["last"]


@pytest.mark.parametrize("source", ["type X", "def f[T(x): ...", 'f"{x', "x = (", 'f"{x["a"}"'])
def test_what_is_no_python_is_refused(source: str):
    with pytest.raises(SyntaxError):
        parse_newer(source, "bad.py")


def test_old_syntax_keeps_its_strings():
    source = 'x = f"{a[\'b\']!r:>3} {{c}}" + "f\'{d}"\ntype = [1]\ntype[0] = 2\n'
    tree, is_other = parse_newer(source, "old.py")
    assert (ast.dump(tree), is_other) == (ast.dump(ast.parse(source)), False)


def test_findings_of_a_newer_file():
    source = (
        "import torch\n\n\ndef forward[T](x: torch.Tensor, names: T):\n"
        '    print(f"{names["a"]}")\n    return x * x.sum().item()\n'
    )
    module = parse(read_source(source.encode(), "m.py"), "m.py")
    assert module.text.text == source
    if not module.is_newer:
        pytest.skip("waits for a Python older than 3.12")
    with pytest.raises(SyntaxError):
        find(source)


def test_lint_and_rewrite_of_a_newer_file(tmp_path):
    from typer.testing import CliRunner

    from tpuport.cli.app import app

    path = tmp_path / "m.py"
    path.write_text(
        "import torch\n\n\ndef forward[T](x: torch.Tensor, names: T):\n"
        '    if x.sum() > 0:\n        x = x + 1\n    return x, f"{names["a"]}"\n'
    )
    found = CliRunner().invoke(app, ["lint", "--no-cache", "--format", "concise", str(path)])
    assert "m.py:5:5: TPU101" in found.output
    if sys.version_info < (3, 12):
        assert "[*]" not in found.output
        left = CliRunner().invoke(app, ["rewrite", "--no-cache", str(path)])
        assert "that can be read in line 4" in left.output
