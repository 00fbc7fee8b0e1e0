"""Functions that get no new code, with the reason, and where in a function a trace stopped."""

import functools
import linecache
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from tests.source.live_functions import line_of, load, same_both_ways
from tpuport.rules._apply import rewrite_function
from tpuport.source.rewrite import live
from tpuport.source.rewrite.live import LiveRewrite, Refusal


def plain(x, limit=3):
    if x > limit:
        y = x - 1
    else:
        y = x + 1
    return y


# What is refused.


def uses_locals(x):
    y = 1 if x > 0 else 2
    return locals()["y"] + y


def takes_our_name(x, tpuport=None):
    return (1 if x > 0 else 2), tpuport


@pytest.mark.parametrize(
    ("function", "text", "reason"),
    [
        (uses_locals, "y = 1", "calls locals()"),
        (takes_our_name, "return", "uses the name tpuport for something else"),
        (plain, "return y", "no rule knows what to do with these lines"),
    ],
)
def test_refusals(function: FunctionType, text: str, reason: str):
    result = rewrite_function(function, sites=[line_of(function, text)])
    assert isinstance(result, Refusal)
    assert not result
    assert reason in result.reason


def test_functions_without_source_are_refused():
    names: dict[str, Any] = {}
    exec("def forward(x):\n    return 1 if x > 0 else 2", names)
    refused = {
        "is not available": names["forward"],
        "is a lambda": lambda x: 1 if x > 0 else 2,
        "a builtin_function_or_method has no Python source": len,
        "a partial has no Python source": functools.partial(plain, 1),
    }
    for reason, function in refused.items():
        result = rewrite_function(function, sites=[1, 2])
        assert isinstance(result, Refusal)
        assert reason in result.reason


def test_a_file_that_changed_is_refused(tmp_path: Path):
    source = "def forward(x):\n    return 1 if x > 0 else 2\n"
    forward, path = load(source, tmp_path)
    for changed in (
        source.replace("1", "3"),
        "\n" + source,
        source.replace("\n", "\n\n", 1),
        "x = 1\n",
    ):
        path.write_text(changed, encoding="utf-8")
        result = rewrite_function(forward, sites=[2])
        assert isinstance(result, Refusal)
        assert re.search(
            "not what its source says|no definition of forward|not available", result.reason
        )
    path.write_text(source, encoding="utf-8")
    assert rewrite_function(forward, sites=[2])


def test_source_that_only_the_line_cache_has_is_enough():
    source = "def forward(x):\n    return 1 if x > 0 else 2\n"
    name = "<cell 7>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        names: dict[str, Any] = {}
        exec(compile(source, name, "exec"), names)
        rewrite = rewrite_function(names["forward"], sites=[2])
        assert isinstance(rewrite, LiveRewrite)
        same_both_ways(names["forward"], rewrite, (1,), (-1,))
    finally:
        del linecache.cache[name]


# Where a trace stopped.


@contextmanager
def caught_frame(function: Callable[..., Any], *args: Any) -> Iterator[Any]:
    """The frame of `function` in which a call of it raised."""
    try:
        function(*args)
    except Exception as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        yield next(
            f for f in frames if f.f_code in set(live.codegen.nested_codes(function.__code__))
        )


class Unknown:
    """A value whose truth nobody may ask for."""

    def __bool__(self) -> bool:
        raise TypeError("traced")

    def __gt__(self, other: object) -> "Unknown":
        return self


def asks(x, flag, very_long_name_of_a_value=None, another_long_name_of_a_value=None):
    y = 3 if flag else 4
    if (
        flag is not None
        and very_long_name_of_a_value is another_long_name_of_a_value
        and x > 0
        and very_long_name_of_a_value is None
    ):
        y = 1 if flag else 2
    return y


def test_a_site_is_where_the_frame_stands():
    with caught_frame(asks, Unknown(), True) as frame:
        site = live.site_of(frame)
    assert line_of(asks, "if (") <= site.line <= line_of(asks, "and x > 0")
    assert site.column is not None
    rewrite = rewrite_function(asks, sites=[site])
    assert isinstance(rewrite, LiveRewrite)
    (applied,) = rewrite.applied
    assert applied.code == "TPU101"
    assert applied.line == line_of(asks, "if (")
    assert site.line in rewrite.lines
    same_both_ways(asks, rewrite, (1, True), (-1, True), (1, None), (1, False))


def test_the_functions_that_hold_a_code_object_are_found():
    def maker():
        def made():
            return 1

        return made

    first, second = maker(), maker()
    found = live.functions_with(first.__code__)
    assert {id(f) for f in found} == {id(f) for f in (first, second, maker, *found[3:])}
    assert maker in found
    assert first in found
    assert plain not in found
    copied = FunctionType(plain.__code__, {})
    assert {id(f) for f in live.functions_with(plain.__code__)} == {id(plain), id(copied)}
