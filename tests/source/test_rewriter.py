"""Rewriting keeps what it does not touch, settles, and says what it left and why."""

import ast
import textwrap
from typing import ClassVar

import pytest

from tpuport.rules._apply import find, rewrite
from tpuport.rules._rule import Example, Rule
from tpuport.rules.tensor_to_number import TensorToNumber
from tpuport.source.inference.kinds import ObservedKinds
from tpuport.source.rewrite.finding import Fix, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.rewrite.rewriter import MAX_IDLE_PASSES, NotSettledError
from tpuport.source.syntax.text import Edit, Passage

HEAD = "import torch\nimport tpuport.ops\n\n\n"


def text(source: str) -> str:
    return textwrap.dedent(source).lstrip("\n")


def after(body: str) -> str:
    """The function made of this body, rewritten; without its imports."""
    source = "import torch\n\n\ndef forward(self, x: torch.Tensor, n, a=None):\n"
    result = rewrite(source + textwrap.indent(text(body), "    "))
    head, _, rest = result.source.partition("a=None):\n")
    assert head == HEAD + "def forward(self, x: torch.Tensor, n, "
    again = rewrite(result.source)
    assert again.source == result.source
    return textwrap.dedent(rest)


def reasons(body: str) -> list[str]:
    """Why nothing in the function made of this body is rewritten."""
    source = "import torch\n\n\ndef forward(self, x: torch.Tensor, n, a=None):\n"
    source += textwrap.indent(text(body), "    ")
    result = rewrite(source)
    assert result.source == source
    assert result.applied == []
    return [left.reason for left in result.left]


# Layout.


def test_comments_stay():
    result = after("""
        # before
        if x.sum() > 0:  # head
            # first
            y = x + 1  # one
            # last
        else:  # other
            y = x  # two
        # after
        return y
    """)
    assert result == text("""
        # before
        # head
        # other
        def if_true():
            # first
            y = x + 1  # one
            # last
            return y

        def if_false():
            y = x  # two
            return y

        y = tpuport.ops.cond(x.sum() > 0, if_true, if_false)
        # after
        return y
    """)


def test_comments_within_a_test_move_above_it():
    result = after("""
        y = x
        if (n is None  # host
                or x.sum() > 0):  # device
            y = x + 1
        return y
    """)
    assert result.startswith("y = x\n\n# host\n# device\ndef if_true(y):\n")
    assert "tpuport.ops.either(n is None, lambda: x.sum() > 0)" in result


def test_strings_over_several_lines_keep_their_content():
    result = after('''
        if x.sum() > 0:
            return x
        name = """a
          b
        c"""
        return f"""{name}
        end"""
    ''')
    assert '    name = """a\n  b\nc"""\n    return f"""{name}\nend"""\n' in result


def test_an_elif_becomes_an_else_with_a_branch_in_it():
    result = after("""
        if n > 1:
            y = x
        # why
        elif x.sum() > 0:
            y = x + 1
        else:
            y = x + 2
        return y
    """)
    assert result == text("""
        if n > 1:
            y = x
        # why
        else:
            def if_true():
                y = x + 1
                return y

            def if_false():
                y = x + 2
                return y

            y = tpuport.ops.cond(x.sum() > 0, if_true, if_false)
        return y
    """)


def test_a_chain_of_returns_of_any_length_settles():
    lines = [f"if x.sum() > {i}: return x + {i}" for i in range(15)]
    result = after("\n".join([*lines, "return x"]))
    assert result.count("return tpuport.ops.cond") == 15
    assert "if x.sum()" not in result


def test_one_line_branches():
    result = after("""
        if x.sum() > 0: y = x; z = 1  # both
        else: y = x + 1; z = 2
        return y, z
    """)
    assert "    y = x; z = 1  # both\n    return y, z\n" in result


def test_tabs_stay_tabs():
    source = "def forward(x: 'Tensor'):\n\tif x.sum() > 0:\n\t\treturn x\n\treturn -x\n"
    result = rewrite(source).source
    assert "\tdef if_true():\n\t\treturn x\n" in result
    assert "    " not in result


def test_windows_line_breaks_stay():
    source = "import torch\r\n\r\n\r\ndef f(x: torch.Tensor):\r\n    return float(x)\r\n"
    result = rewrite(source).source
    assert result.count("\n") == result.count("\r\n") == source.count("\n") + 1
    assert "import tpuport.ops\r\n" in result


def test_each_line_keeps_its_own_line_break():
    source = "import torch\r\n\n\ndef f(x: torch.Tensor):\n    y = x + 1\r\n    return float(y)"
    result = rewrite(source).source
    assert result == source.replace("torch\r\n", "torch\r\nimport tpuport.ops\r\n", 1).replace(
        "float(y)", "tpuport.ops.to_float(y)"
    )


def test_text_without_findings_comes_back_as_it_was():
    source = "x = 1\r\ny = 2\n\x0c\nz = 'a\tb'"
    assert rewrite(source).source is source


def test_columns_count_characters():
    (finding,) = find(
        "import torch\ndef f(x: torch.Tensor):\n    ä = 'ö'; y = float(x)\n    return y\n"
    )
    assert (finding.line, finding.column, finding.end_column) == (3, 17, 25)


# Imports.


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (
            '"""Doc."""\n\nimport os\nimport torch\n\nX = 1\n',
            "import torch\nimport tpuport.ops\n\nX",
        ),
        ("from torch import (\n    Tensor,\n)  # all\nX = 1\n", ")  # all\nimport tpuport.ops\nX"),
        ("# Licence.\n\nX = 1\n", "# Licence.\n\nimport tpuport.ops\n\nX = 1\n"),
        ('"""Doc."""\nX = 1\n', '"""Doc."""\nimport tpuport.ops\n\nX = 1\n'),
        ("from __future__ import annotations\nX = 1\n", "annotations\nimport tpuport.ops\nX"),
        ("import tpuport.ops\nimport torch\n", "import tpuport.ops\nimport torch\n"),
        (
            "import torch\ntry:\n    import x\nexcept ImportError:\n    x = 1\n",
            "torch\nimport tpuport",
        ),
    ],
)
def test_the_import_joins_those_at_the_top(before: str, expected: str):
    result = rewrite(before + "def f(x: 'torch.Tensor'):\n    return float(x)\n").source
    assert expected in result
    assert result.count("import tpuport.ops") == 1
    ast.parse(result)


def test_the_import_goes_above_a_decorated_function():
    source = "@wrap\ndef f(x: 'Tensor'):\n    return float(x)\n"
    assert rewrite(source).source.startswith("import tpuport.ops\n\n\n@wrap\ndef f(")


@pytest.mark.parametrize(
    "line",
    ["import jax as tpuport", "from a import tpuport", "tpuport = 1", "def tpuport(): pass"],
)
def test_a_file_that_uses_our_name_stays(line: str):
    source = f"{line}\ndef f(x: 'Tensor'):\n    return float(x)\n"
    result = rewrite(source)
    assert result.source == source
    assert [left.reason for left in result.left] == [
        "the file uses the name tpuport for something else"
    ]


# What is refused, and why.


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("if x.sum() > 0:\n    self.y = x\n    x = x + 1\nreturn x", "writes to self.y"),
        ("if x.sum() > 0:\n    x[:, 0] = 1\n    a = x\nreturn a", "writes to x[:, 0]"),
        ("if x.sum() > 0:\n    a[0] += 1\n    x = x + 1\nreturn x", "writes to a[0]"),
        (
            "if x.sum() > 0:\n    x.add_(1)\n    n = 2\nreturn x * n",
            "runs x.add_(1) for its effect",
        ),
        ("if x.sum() > 0:\n    y = x.relu_()\nelse:\n    y = x\nreturn y", "in place (x.relu_())"),
        ("if x.sum() > 0:\n    y = torch.add(x, 1, out=a)\nelse:\n    y = x\nreturn y", "out="),
        ("if x.sum() > 0:\n    y = a.pop()\nelse:\n    y = x\nreturn y", "in place (a.pop())"),
        ("if x.sum() > 0:\n    a += [x]\nreturn a", "extends a in place"),
        ("if x.sum() > 0:\n    self.note(x)\n    x = x + 1\nreturn x", "runs self.note(x)"),
        ("if x.sum() > 0:\n    del a[0]\n    n = 1\nreturn n", "(del a[0])"),
        ("if x.sum() > 0:\n    y = yield x\nelse:\n    y = x\nreturn y", "awaits or yields"),
        ("global G\nif x.sum() > 0:\n    G = 1\nreturn G", "G, which is global or nonlocal"),
        ("if x.sum() > 0:\n    y = 1\nreturn y", "y may be unbound"),
        ("if n:\n    y = 1\nif x.sum() > 0:\n    y = y + 1\nreturn y", "y may be unbound"),
        ("for y in n:\n    pass\nif x.sum() > 0:\n    y = y + 1\nreturn y", "y may be unbound"),
        ("y = 1\nif n:\n    del y\nif x.sum() > 0:\n    y = 2\nreturn y", "y may be unbound"),
        ("g = lambda: a\nif x.sum() > 0:\n    a = 1\nreturn g()", "a, which a nested function"),
        ("g = (a for _ in n)\nif x.sum() > 0:\n    a = 1\nreturn list(g)", "a, which a nested"),
        ("if x.sum() > 0:\n    import os\nelse:\n    os = 1\nreturn os", "module os for later"),
        ("if x.sum() > 0:\n    def g(): pass\nelse:\n    g = 1\nreturn g", "class or module g"),
        (
            "try:\n    if x.sum() > 0:\n        a = n()\nexcept E:\n    return a",
            "read if it raises",
        ),
        ("with n():\n    if x.sum() > 0:\n        a = n()\nreturn a", "read if it raises"),
        ("if x.sum() > 0:\n    self.f(x)", "runs self.f(x)"),
        ("if x.sum() > 0:\n    y = self.f(x)", "neither side binds a name that is read later"),
        ("if x.sum() > 0:\n    if n:\n        return x\nreturn a", "on some of its paths only"),
        ("for i in n:\n    if x.sum() > 0:\n        return x\nreturn a", "its block goes on after"),
        (
            "for i in n:\n    if x.sum() > 0:\n        break\n    a = i\nreturn a",
            "the break on line 7",
        ),
        ("return 1\nif x.sum() > 0:\n    a = 1\nreturn a", "it is never reached"),
        ("a = vars()\nif x.sum() > 0:\n    n = 1\nreturn n", "calls vars()"),
        ("return x if (m := n) and x.sum() > 0 and (m := a) else m", "binds m inside"),
        ("return (x if x.sum() > 0  # yes\n        else a)", "a comment inside it would be lost"),
        ("return [i for i in n if x.sum() > i]", "elements a comprehension keeps"),
        ("return f'{1 if x.sum() > 0 else 2}'", "inside an f-string"),
        ("class A:\n    y = 1 if x.sum() > 0 else 2\nreturn A", "does not run in a function"),
        (
            "while x.sum() > 0:\n    x = x - 1\n    if n:\n        break\nreturn x",
            "the break on line 8",
        ),
        (
            "while x.sum() > 0:\n    x = x - 1\n    y = x\nreturn y",
            "y may be unbound before the loop",
        ),
        ("while x.sum() > 0:\n    x = x - 1\nelse:\n    n = 1\nreturn x, n", "an else block"),
        ("while x.sum() > 0:\n    y = 1\nreturn x", "no variable that its test could read"),
        ("while n.pop() and x.sum() > 0:\n    x = x - 1\nreturn x", "in place (n.pop())"),
        ("assert x.sum() > 0, (yield)", "awaits or yields"),
        ("if x.sum() > 0:\n    n = n + 1\n    raise E(n)\nreturn n", "changes n before it raises"),
    ],
)
def test_what_is_not_rewritten(body: str, reason: str):
    found = reasons(body)
    assert any(reason in one for one in found), found


def test_an_object_made_in_the_branch_may_be_changed_there():
    result = after("""
        if x.sum() > 0:
            parts = []
            parts.append(x)
            y = x.clone()
            y[0] = 1
            y = y + len(parts)
        else:
            y = x
        return y
    """)
    assert "def if_true():" in result


def test_code_around_what_must_stay_stays_too():
    found = reasons("""
        if x.sum() > 0:
            while x.sum() > 1:
                x = x - 1
                if n:
                    break
        return x
    """)
    assert sorted(found) == [
        "it encloses line 6, which cannot be rewritten",
        "the break on line 9 cannot leave a nested function",
    ]


def test_a_return_that_waits_for_the_branch_around_it_is_rewritten():
    result = after("""
        if x.sum() > 0:
            return x
        elif x.sum() < -1:
            return x + 1
        return x + 2
    """)
    assert result.count("return tpuport.ops.cond") == 2


def test_unsafe_fixes_are_made_only_when_asked_for():
    class Unsafe(TensorToNumber):
        CODE = "TPU198"
        SAFETY = Safety.UNSAFE

    source = "def f(x: 'Tensor'):\n    return float(x)\n"
    kept = rewrite(source, rules=[Unsafe])
    assert (kept.source, kept.applied) == (source, [])
    assert [left.reason for left in kept.left] == ["its fix is unsafe and was not asked for"]
    made = rewrite(source, rules=[Unsafe], unsafe=True)
    assert [applied.safety for applied in made.applied] == ["unsafe"]


# Settling.


class Swap(Rule):
    """Turns every `a` into `b`, and its sibling turns it back."""

    CODE = "TPU199"
    MESSAGE = "`{name}`"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.NOTE
    EXAMPLES: ClassVar[tuple[Example, ...]] = ()
    CLEAN: ClassVar[tuple[str, ...]] = ()
    OLD, NEW = "a", "b"

    def visit_Name(self, node: ast.Name, context: Context) -> None:
        if node.id == self.OLD:
            context.report(self, node, name=node)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        start, end = context.module.span(node)
        return Fix((Edit(start, end, Passage.of(self.NEW, 1)),))


class SwapBack(Swap):
    OLD, NEW = "b", "a"
    CODE = "TPU197"


def test_rules_that_undo_each_other_are_named():
    with pytest.raises(NotSettledError) as raised:
        rewrite("a = 1\n", rules=[Swap, SwapBack], file="m.py")
    message = str(raised.value)
    assert message.startswith("m.py:1: rewriting does not settle")
    assert f"after {MAX_IDLE_PASSES} more passes there is still work for TPU19" in message
    assert "What to do: " in message
    assert rewrite("a = 1\n", rules=[Swap]).source == "b = 1\n"


def test_the_account_is_in_the_order_of_the_file():
    source = text("""
        import torch


        def f(x: torch.Tensor):
            y = float(x) if x > 0 else int(x)
            assert y > 0
            return y
    """)
    result = rewrite(source, file="m.py")
    lines = [(applied.file, applied.line, applied.code) for applied in result.applied]
    assert [line for _, line, _ in lines] == [5, 5, 5, 6]
    assert {code for _, _, code in lines} == {"TPU101", "TPU102", "TPU103"}
    assert result.applied[-1].before == "assert y > 0"
    assert result.applied[-1].after == "assert tpuport.ops.passes(y > 0)"


def test_names_of_helpers_are_new():
    source = text("""
        def f(x, if_true, y):
            if x > 0:
                y = if_true
            if x > 1:
                y = if_false_2
            return y
    """)
    result = rewrite(source, kinds=ObservedKinds([2, 4]))
    assert "def if_true_2(y):" in result.source
    assert "def if_false(y):" in result.source
    assert "def if_true_3(y):" in result.source
    assert "def if_false_3(y):" in result.source
