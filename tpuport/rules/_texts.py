"""Traced tensors that become text: formatted as a number, or printed."""

import ast
import re
from collections.abc import Iterator

from tpuport.rules._reports import is_log
from tpuport.source.rewrite.matching import Context, quote

# A tensor, and the text that it becomes part of.
Verdict = tuple[ast.expr, str] | None

_PERCENT = re.compile(r"%(?:\((?P<name>\w+)\))?[-+ #0]*[\d*]*(?:\.[\d*]+)?(?P<type>[a-zA-Z%])")
_BRACES = re.compile(r"(?<!\{)\{(?P<name>[^{}:!]*)(?:![rsa])?(?::(?P<spec>[^{}]*))?\}(?!\})")
_NUMERIC = frozenset("diouxXeEfFgGc")


def formatted(node: ast.expr, context: Context) -> Verdict:
    """Return the first traced tensor formatted as a number, and the text; None in error texts."""
    for tensor, text in _numbers(node):
        if context.is_traced(tensor):
            return None if is_message(node, context) else (tensor, text)
    return None


def _numbers(node: ast.expr) -> Iterator[tuple[ast.expr, str]]:
    """Yield the values that an expression formats as numbers, and the text with the format."""
    match node:
        case ast.JoinedStr(values=values):
            for value in values:
                if isinstance(value, ast.FormattedValue) and value.format_spec is not None:
                    # `!r` and `!s` make text first, which takes no format for numbers.
                    if value.conversion == -1:
                        yield value.value, _field(value)
        case ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Mod(), right=right):
            yield from ((value, quote(repr(text) + " % ...")) for value in _percent(text, right))
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format")):
            yield from ((value, quote(repr(text) + ".format")) for value in _braces(text, node))
        case _:
            pass


def _field(value: ast.FormattedValue) -> str:
    return quote(ast.unparse(ast.JoinedStr(values=[value])))


def _percent(text: str, right: ast.expr) -> Iterator[ast.expr]:
    kinds = [m["type"] for m in _PERCENT.finditer(text) if m["type"] != "%"]
    values = right.elts if isinstance(right, ast.Tuple) else [right]
    if len(values) == len(kinds) and not isinstance(right, ast.Dict):
        yield from (v for v, kind in zip(values, kinds, strict=True) if kind in _NUMERIC)


def _braces(text: str, call: ast.Call) -> Iterator[ast.expr]:
    names = {keyword.arg: keyword.value for keyword in call.keywords}
    for position, field in enumerate(_BRACES.finditer(text)):
        name = field["name"]
        index = int(name) if name.isdigit() else position
        if not field["spec"]:
            continue
        if name in names:
            yield names[name]
        elif (not name or name.isdigit()) and index < len(call.args):
            yield call.args[index]


def shown_tensor(node: ast.Call, context: Context) -> ast.expr | None:
    """Return the first traced tensor that a call prints or logs without a numeric format."""
    parent = context.module.parents[node]
    if not isinstance(parent, ast.Expr) or not is_log(parent):
        return None
    for argument in node.args:
        for shown in _shown(argument):
            if formatted(argument, context) is None and context.is_traced(shown):
                return shown
    return None


def _shown(argument: ast.expr) -> Iterator[ast.expr]:
    match argument:
        case ast.JoinedStr(values=values):
            yield from (v.value for v in values if isinstance(v, ast.FormattedValue))
        case ast.BinOp(left=ast.Constant(value=str()), op=ast.Mod(), right=right):
            yield from right.elts if isinstance(right, ast.Tuple) else [right]
        case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="format"), args=values):
            yield from values
        case ast.Starred(value=value):
            yield value
        case _:
            yield argument


def is_message(node: ast.expr, context: Context) -> bool:
    """Return whether an expression is evaluated only if an error is raised."""
    inner: ast.AST = node
    for outer in context.module.ancestors(node):
        if isinstance(outer, ast.Raise):
            return True
        if isinstance(outer, ast.stmt):
            return isinstance(outer, ast.Assert) and outer.msg is inner
        inner = outer
    return False
