"""Which names are bound before a statement, read after it, and read if it raises."""

import ast
import textwrap

import pytest

from tpuport.source.inference.liveness import NameFlow
from tpuport.source.syntax.module import FUNCTIONS
from tpuport.source.syntax.names import collect, free_names
from tpuport.source.syntax.statements import exits_loop, leaves, may_swallow, returns


def flow_at_here(body: str) -> tuple[NameFlow, ast.stmt]:
    """The flow of `def f(p): body`, and the statement `here` in it."""
    source = "def f(p):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    function = ast.parse(source).body[0]
    assert isinstance(function, FUNCTIONS)
    (here,) = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Expr) and ast.unparse(node) == "here"
    ]
    return NameFlow(function), here


@pytest.mark.parametrize(
    ("body", "bound"),
    [
        ("x = 1\nhere", "p x"),
        ("x, (y, *z) = p\nhere", "p x y z"),
        ("if p:\n    x = y = 1\nelse:\n    x = 2\nhere", "p x"),
        ("if p:\n    x = 1\nelse:\n    return\nhere", "p x"),
        ("if (x := p):\n    pass\nhere", "p x"),
        ("if p and (x := p):\n    pass\nhere", "p"),
        ("if f(x := p) > 1:\n    pass\nhere", "p x"),
        ("for x in p:\n    y = 1\nhere", "p"),
        ("for x in p:\n    here", "p x"),
        ("while (x := p):\n    y = 1\nhere", "p x"),
        ("try:\n    x = 1\nexcept E:\n    pass\nhere", "p"),
        ("try:\n    x = 1\nexcept E:\n    x = 2\nhere", "p x"),
        ("try:\n    x = 1\nexcept E as e:\n    raise\nelse:\n    y = 1\nhere", "p x y"),
        ("try:\n    x = 1\nfinally:\n    y = 1\nhere", "p x y"),
        ("try:\n    x = 1\nfinally:\n    y = 1\n    here", "p y"),
        ("try:\n    pass\nexcept E as e:\n    e = 1\n    here", "p"),
        ("with torch.no_grad() as x:\n    y = 1\nhere", "p x y"),
        ("with suppress(E) as x:\n    y = 1\nhere", "p x"),
        ("del p\nx = 1\nhere", "x"),
        ("x: int\nhere", "p"),
        ("x: int = 1\nhere", "p x"),
        ("x += 1\nhere", "p x"),
        ("import a.b, c.d as e\nfrom m import g as h\nhere", "a e h p"),
        ("def g(): pass\nclass H: pass\nhere", "H g p"),
        ("match p:\n    case 1:\n        x = 1\n    case _:\n        x = 1\nhere", "p"),
        ("[y for y in p if (x := y)]\nhere", "p"),
    ],
)
def test_names_that_are_bound_before(body: str, bound: str):
    flow, here = flow_at_here(body)
    assert sorted(flow.before[here]) == bound.split()


def test_what_is_never_reached_has_nothing_before_it():
    flow, here = flow_at_here("return 1\nhere")
    assert here not in flow.before


@pytest.mark.parametrize(
    ("body", "live"),
    [
        ("here\nreturn x", "x"),
        ("here\nx = 1\nreturn x", ""),
        ("here\nx += 1\nreturn x", "x"),
        ("here\nif p:\n    x = 1\nreturn x", "p x"),
        ("here\nif p:\n    x = 1\nelse:\n    x = 2\nreturn x", "p"),
        ("here\nfor x in p:\n    pass\nreturn x", "p x"),
        ("for i in p:\n    x\n    here\n    x = 1", ""),
        ("for i in p:\n    x\n    x = 1\n    here", "x"),
        ("for i in p:\n    x = 1\n    here\n    if x: continue\n    y", "x y"),
        ("for i in p:\n    here\n    break\nelse:\n    y\nreturn x", "x"),
        ("while x:\n    here\nreturn y", "x y"),
        ("while p:\n    y = x\n    here\n    x = y", "p y"),
        ("here\ndef g(): return x\nreturn g", "x"),
        ("here\nwith p as x: pass\nreturn x", "p"),
        ("try:\n    here\n    f()\nexcept E:\n    x", "f x"),
        ("try:\n    pass\nexcept E:\n    here\nfinally:\n    x\nreturn y", "x y"),
        ("here\nreturn (x := 1) + x", ""),
        ("here\nreturn x + (x := 1)", "x"),
        ("here\nreturn [y for y in z for w in x]", "x z"),
        ("here\nx = [x for x in x]", "x"),
        ("here\nmatch x:\n    case [y] if z:\n        y", "x y z"),
        ("here\ndel x", "x"),
    ],
)
def test_names_that_are_read_after(body: str, live: str):
    flow, here = flow_at_here(body)
    assert sorted(flow.after[here] - {"E", "here"}) == live.split()


@pytest.mark.parametrize(
    ("body", "live"),
    [
        ("here\nreturn x", ""),
        ("try:\n    here\n    y\nexcept A:\n    x", "A x"),
        ("try:\n    here\nfinally:\n    x\nreturn y", "x y"),
        ("try:\n    try:\n        here\n    finally:\n        pass\nexcept A:\n    x", "A x"),
        ("try:\n    x\nexcept A:\n    here", ""),
        ("with c():\n    here\nreturn x", "x"),
        ("with torch.no_grad():\n    here\nreturn x", ""),
    ],
)
def test_names_that_are_read_if_it_raises(body: str, live: str):
    flow, here = flow_at_here(body)
    assert sorted(flow.on_error[here]) == live.split()


@pytest.mark.parametrize(
    ("body", "captured"),
    [
        ("x = 1\nlambda: x\nhere", "x"),
        ("x = 1\ndef g(): return x\nhere", "x"),
        ("x = 1\ndef g():\n    x = 2\n    return x\nhere", ""),
        ("x = 1\ndef g():\n    nonlocal x\n    x = 2\nhere", "x"),
        ("x = 1\ndef g():\n    def h(): return x\nhere", "x"),
        ("x = 1\ndef g(y=x): pass\nhere", ""),
        ("x = 1\n(x for _ in p)\nhere", "x"),
        ("x = 1\n(y for y in x)\nhere", ""),
        ("x = 1\nsum(x for _ in p)\nhere", ""),
        ("x = 1\nsum = p\nsum(x for _ in p)\nhere", "x"),
        ("x = 1\n[x for _ in p]\nhere", ""),
        ("x = 1\nclass A:\n    y = x\nhere", ""),
        ("x = 1\nclass A:\n    def m(self): return x\nhere", "x"),
        ("x = 1\ntpuport.ops.cond(p, lambda: x, lambda: p)\nhere", ""),
        ("x = 1\ndef g(): return x\ntpuport.ops.cond(p, g, g)\nhere", ""),
        ("x = 1\ndef g(): return x\ntpuport.ops.cond(p, g, g)\np(g)\nhere", "x"),
    ],
)
def test_names_that_code_may_use_later(body: str, captured: str):
    flow, _ = flow_at_here(body)
    assert sorted(flow.captured) == captured.split()


def test_names_of_a_piece_of_code():
    names = collect(ast.parse("a.b = c[d] = (e := f)\nimport g.h\nglobal i").body)
    assert list(names.bound) == ["e", "g"]
    assert names.read == {"a", "c", "d", "f"}
    assert names.declared == {"i"}


def test_free_names_leave_out_what_is_local():
    (function,) = ast.parse("def f(a, *b, c=d, **e):\n    g = a\n    return g + h").body
    assert isinstance(function, FUNCTIONS)
    assert free_names(function) == {"h"}


def statements(source: str) -> list[ast.stmt]:
    return ast.parse(textwrap.dedent(source)).body


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("return", True),
        ("x\nraise x", True),
        ("if x:\n    return\nelse:\n    raise x", True),
        ("if x:\n    return", False),
        ("while True:\n    return", False),
        ("with torch.no_grad():\n    return", True),
        ("with c():\n    return", False),
        ("try:\n    return\nexcept E:\n    x", False),
        ("try:\n    return\nexcept E:\n    raise", True),
        ("try:\n    x\nfinally:\n    return", True),
    ],
)
def test_statements_that_never_reach_their_end(source: str, expected: bool):
    assert leaves(statements(source)) is expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("break", True),
        ("for i in x:\n    break", False),
        ("for i in x:\n    pass\nelse:\n    continue", True),
        ("if x:\n    try:\n        pass\n    except E:\n        continue", True),
        ("match x:\n    case 1:\n        break", True),
        ("def f():\n    for i in x: break", False),
    ],
)
def test_loop_exits(source: str, expected: bool):
    assert (exits_loop(statements(source)) is not None) is expected


def test_a_return_of_a_nested_function_is_not_ours():
    assert returns(statements("with x:\n    return"))
    assert not returns(statements("def f():\n    return\nlambda: 1"))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("with torch.autocast('cpu'), open(f): pass", False),
        ("with contextlib.nullcontext(): pass", False),
        ("with suppress(E): pass", True),
        ("with torch.no_grad(), mine: pass", True),
    ],
)
def test_context_managers_that_may_swallow(source: str, expected: bool):
    (statement,) = statements(source)
    assert isinstance(statement, ast.With)
    assert may_swallow(statement) is expected
