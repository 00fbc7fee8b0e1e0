"""Calls that need the value of a tensor on the host."""

import ast
from collections.abc import Iterator

from tpuport.source.inference.kinds import Kind
from tpuport.source.rewrite.matching import Context

_METHODS = frozenset({"numpy", "item", "tolist", "cpu", "to"})
# These read the shape of a tensor only.
_SHAPES = frozenset({"numpy.shape", "numpy.ndim"})


def takes_to_host(node: ast.Call, context: Context) -> bool:
    """Return whether a call moves a traced tensor to the host or passes it to numpy."""
    function = node.func
    if not isinstance(function, ast.Attribute):
        return False
    if function.attr in _METHODS:
        return _moves(node, function, context)
    name = context.name(function) or ""
    if not name.startswith("numpy.") or name in _SHAPES:
        return False
    return any(context.is_traced(argument) for argument in _arguments(node))


def _moves(node: ast.Call, function: ast.Attribute, context: Context) -> bool:
    """Return whether a call of one of `_METHODS` moves a traced tensor."""
    match function:
        case ast.Attribute(
            attr="numpy" | "item" | "tolist",
            value=ast.Call(func=ast.Attribute(attr="cpu", value=value)),
        ) if context.kind(value) is Kind.UNKNOWN:
            # A module has none of these methods, and a value known to Python needs no `.cpu()`.
            return context.in_step(node)
        case ast.Attribute(value=value, attr="numpy"):
            return context.is_traced(value)
        case ast.Attribute(value=value, attr="cpu"):
            return context.is_traced(value) and not _becomes_numpy(node, context)
        case ast.Attribute(value=value, attr="to") if _names_cpu(node):
            return context.is_traced(value) and not _becomes_numpy(node, context)
        case _:
            return False


def _arguments(node: ast.Call) -> Iterator[ast.expr]:
    for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
        if isinstance(argument, ast.List | ast.Tuple):
            yield from argument.elts
        else:
            yield argument


def _names_cpu(node: ast.Call) -> bool:
    devices = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "device")]
    return any(isinstance(d, ast.Constant) and d.value == "cpu" for d in devices)


def _becomes_numpy(node: ast.Call, context: Context) -> bool:
    """Return whether a later call of the chain is `.numpy()`, which is reported instead."""
    parents = context.module.parents
    outer: ast.AST = node
    while isinstance(attribute := parents[outer], ast.Attribute):
        outer = parents[attribute]
        if not isinstance(outer, ast.Call) or outer.func is not attribute:
            return False
        if attribute.attr == "numpy":
            return True
    return False
