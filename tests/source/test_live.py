"""Loaded functions get new code that fits them, and get their own back."""

import asyncio
import functools
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.source.live_functions import line_of, load, same_both_ways
from tpuport.rules._apply import rewrite_function
from tpuport.source.inference.kinds import Site
from tpuport.source.rewrite import live
from tpuport.source.rewrite.live import LiveRewrite, swapped


def rewritten(function: Any, *texts: str) -> LiveRewrite:
    """The rewrite of the lines that hold these texts."""
    result = rewrite_function(function, sites=[line_of(function, text) for text in texts])
    assert isinstance(result, LiveRewrite), result
    return result


def plain(x, limit=3, *, step=1):
    """A docstring."""
    if x > limit:  # too large
        y = x - step
    else:
        y = x + step
    return y


class Base:
    def forward(self, x):
        return x * 2


class Child(Base):
    def forward(self, x, k=3):
        if x > 0:
            y = super().forward(x)
            y = self.__helper(y)
        else:
            y = x - k
        return y

    def __helper(self, y):
        return y + 1

    @staticmethod
    def still(x):
        return 1 if x > 0 else 2

    @classmethod
    def of_class(cls, x):
        if x > 0:
            return cls.__name__
        return super().__name__ if False else "other"


def doubled(function):
    @functools.wraps(function)
    def wrapper(*args):
        return 2 * function(*args)

    return wrapper


def make_closure(scale):
    offset = [0]
    zero = 0

    @doubled
    def inner(x):
        if x > zero:
            y = x * scale
        else:
            y = x
        return y + offset[0]

    return inner, offset


# Functions of every sort keep working.


def test_a_function_keeps_its_signature_defaults_and_docstring():
    rewrite = rewritten(plain, "if x > limit")
    same_both_ways(plain, rewrite, (1,), (5,), (5, 9))
    with swapped([rewrite]):
        assert plain(5, step=2) == 3
        assert str(inspect.signature(plain)) == "(x, limit=3, *, step=1)"
        assert plain.__doc__ == "A docstring."
        assert plain.__defaults__ == (3,)


def test_a_method_keeps_super_and_private_names():
    rewrite = rewritten(Child.forward, "if x > 0")
    assert "super(__class__, self)" in rewrite.after
    same_both_ways(Child().forward, rewrite, (1,), (-1,))


def test_a_bound_method_is_the_function_of_its_class():
    child = Child()
    rewrite = rewrite_function(child.forward, sites=[line_of(Child.forward, "if x > 0")])
    assert isinstance(rewrite, LiveRewrite)
    assert rewrite.function is Child.forward


def test_static_and_class_methods():
    same_both_ways(Child.still, rewritten(Child.still, "return 1"), (1,), (-1,))
    of_class = Child.of_class.__func__  # pyright: ignore[reportFunctionMemberAccess]
    same_both_ways(Child.of_class, rewritten(of_class, "if x > 0"), (1,), (-1,))


def test_a_closure_keeps_its_cells():
    closure, offset = make_closure(3)
    inner = closure.__wrapped__
    rewrite = rewritten(inner, "if x > zero")
    assert rewrite.code.co_freevars == inner.__code__.co_freevars == ("offset", "scale", "zero")
    same_both_ways(closure, rewrite, (2,), (-2,))
    with swapped([rewrite]):
        offset[0] = 100
        assert closure(2) == 2 * 106


def test_a_nested_function_is_rewritten_in_the_one_that_makes_it():
    def outer(x):
        def inner(y):
            return y + 1 if y > 2 else y - 1

        return [inner(x + i) for i in range(3)]

    same_both_ways(outer, rewritten(outer, "y > 2"), (0,), (5,))


def test_a_name_that_a_nested_function_shares_is_no_obstacle_elsewhere():
    def outer(x):
        total = 0

        def add(y):
            nonlocal total
            total += y

        add(x)
        if x > 1:
            z = total
        else:
            z = -total
        return z

    same_both_ways(outer, rewritten(outer, "if x > 1"), (0,), (5,))


def test_generators_and_coroutines_stay_what_they_are():
    def generate(x):
        y = 1 if x > 0 else 2
        yield y
        if x > 1:
            y = 10
        yield y

    async def wait(x):
        await asyncio.sleep(0)
        if x > 0:
            y = 1
        else:
            y = 2
        return y

    rewrite = rewritten(generate, "1 if x > 0", "if x > 1")
    assert inspect.isgeneratorfunction(generate)
    same_both_ways(lambda x: list(generate(x)), rewrite, (0,), (1,), (2,))
    rewrite = rewritten(wait, "if x > 0")
    same_both_ways(lambda x: asyncio.run(wait(x)), rewrite, (0,), (1,))
    assert rewrite.code.co_flags & inspect.CO_COROUTINE


def test_source_that_is_not_ascii_keeps_its_columns():
    def describe(x):
        text = "ä" if x > 0 else "ö"
        return text + ("ü" if x > 1 else "ß") + "ß"

    source = inspect.getsource(describe).split("\n")[2]
    column = len(source[: source.index('"ü"')].encode())
    line = line_of(describe, "return text")
    rewrite = rewrite_function(describe, sites=[Site(line, column)])
    assert isinstance(rewrite, LiveRewrite)
    assert 'text + (tpuport.ops.cond(x > 1, lambda: "ü", lambda: "ß")) + "ß"' in rewrite.after
    assert not rewrite_function(describe, sites=[Site(line, column - 2)])
    same_both_ways(describe, rewrite, (0,), (1,), (2,))


@pytest.mark.parametrize(
    "source",
    [
        "def forward(x): return 1 if x > 0 else 2\n",
        "def forward(x):\n\tif x > 0:\n\t\ty = 1\n\telse:\n\t\ty = 2\n\treturn y\n",
        'def forward(x):\n    "doc"; y = 1 if x > 0 else 2; return y\n',
        "def forward(x):\n  if x > 0: y = 1\n  else: y = 2\n  return y",
        "from __future__ import annotations\ndef forward(x: Nope) -> Nope:\n"
        "    if x > 0:\n        y: Nope = 1\n    else:\n        y = 2\n    return y\n",
        "class A:\n    class B:\n        def forward(self, __y):\n"
        "            __z = 1 if __y > 0 else 2\n"
        "            return __z\nforward = lambda x: A.B().forward(x)\nmethod = A.B.forward\n",
    ],
)
def test_layouts(source: str, tmp_path: Path):
    forward, _ = load(source, tmp_path)
    method = forward.__globals__.get("method", forward)
    (line,) = [
        n for n, text in enumerate(source.split("\n"), 1) if "if x > 0" in text or "__y >" in text
    ]
    rewrite = rewrite_function(method, sites=[line])
    assert isinstance(rewrite, LiveRewrite), rewrite
    same_both_ways(forward, rewrite, (1,), (-1,))


# Frames, tracebacks and inspect show the user's own file.


def raises_late(x, scale):
    if x > 0:
        y = x
    else:
        y = scale + x.missing
    text = f"{x} {y:>{scale}}"
    raise ValueError(
        text + undefined_name,  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
    )


def last_frame(function: Callable[..., Any], *args: Any) -> traceback.FrameSummary:
    try:
        function(*args)
    except Exception as error:
        return traceback.extract_tb(error.__traceback__)[-1]
    raise AssertionError("expected an exception")


@pytest.mark.parametrize("x", [1, -1])
def test_tracebacks_point_at_the_users_lines(x: int):
    rewrite = rewritten(raises_late, "if x > 0")
    before = last_frame(raises_late, x, 3)
    with swapped([rewrite]):
        after = last_frame(raises_late, x, 3)
    places = [
        (f.filename, f.lineno, f.end_lineno, f.colno, f.end_colno, f.line) for f in (before, after)
    ]
    assert places[0] == places[1]
    assert places[0][0] == __file__


def test_inspect_shows_the_users_source():
    source = inspect.getsource(raises_late)
    with swapped([rewritten(raises_late, "if x > 0")]):
        assert inspect.getsource(raises_late) == source
        assert raises_late.__code__.co_qualname == "raises_late"
        assert raises_late.__code__.co_firstlineno == line_of(raises_late, "def raises_late")
        names = {code.co_qualname for code in live.codegen.nested_codes(raises_late.__code__)}
        assert "raises_late.<locals>.if_true" in names


def test_a_rewritten_line_has_no_misleading_columns():
    def fails(x):
        y = missing(x) if x > 0 else x  # noqa: F821  # pyright: ignore
        return y

    with swapped([rewritten(fails, "missing(x)")]):
        frame = last_frame(fails, 1)
    assert frame.lineno == line_of(fails, "missing(x)")
    assert frame.colno is None


# What is put in place is taken out again.


def test_the_same_code_objects_come_back():
    codes = [plain.__code__, Child.forward.__code__]
    rewrites = [rewritten(plain, "if x > limit"), rewritten(Child.forward, "if x > 0")]
    with swapped(rewrites):
        assert [plain.__code__, Child.forward.__code__] == [r.code for r in rewrites]
    with pytest.raises(ZeroDivisionError), swapped(rewrites):
        raise ZeroDivisionError
    assert [id(plain.__code__), id(Child.forward.__code__)] == [id(code) for code in codes]
    assert rewrites[0].original is codes[0]


def test_swaps_nest():
    code = plain.__code__
    rewrite = rewritten(plain, "if x > limit")
    with swapped([rewrite]):
        with swapped([rewrite]):
            assert plain(5) == 4
        assert plain.__code__ is rewrite.code
    assert plain.__code__ is code


def test_a_failing_swap_is_undone():
    code = plain.__code__
    good = rewritten(plain, "if x > limit")
    closure, _ = make_closure(2)
    bad = LiveRewrite(**{**vars(good), "function": closure.__wrapped__})
    with pytest.raises(ValueError, match="free vars"), swapped([good, bad]):
        raise AssertionError("never reached")
    assert plain.__code__ is code


def test_rewriting_changes_nothing_by_itself():
    before = dict(vars(sys.modules[__name__]))
    code = plain.__code__
    rewritten(plain, "if x > limit")
    assert plain.__code__ is code
    assert dict(vars(sys.modules[__name__])) == before


# What a rewrite says about itself.


def test_a_rewrite_gives_its_lines_and_both_sources():
    rewrite = rewritten(plain, "if x > limit")
    line = line_of(plain, "if x > limit")
    assert rewrite.lines == {line}
    assert rewrite.file == __file__
    assert rewrite.before == inspect.getsource(plain).rstrip("\n")
    (applied,) = rewrite.applied
    assert (applied.file, applied.line, applied.code) == (__file__, line, "TPU101")
    assert applied.safety == "exact"
    assert applied.before.startswith("if x > limit:  # too large\n    y = x - step\nelse:")
    assert "y = tpuport.ops.cond(x > limit, if_true, if_false)" in applied.after
    assert rewrite.contains(rewrite.code)
    assert not rewrite.contains(rewrite.original)


def test_what_stays_is_named():
    def partly(x, sink):
        y = 1 if x > 0 else 2
        if x > 1:
            sink.write(x)
        return y

    rewrite = rewritten(partly, "y = 1", "if x > 1")
    assert rewrite.lines == {line_of(partly, "y = 1")}
    (left,) = rewrite.left
    assert left.finding.line == line_of(partly, "if x > 1")
    assert "sink.write(x)" in left.reason
