"""Calls that compare traced values and take the truth of the outcome."""

import ast

from tpuport.rules._origins import is_one_tensor, last_name
from tpuport.source.rewrite.matching import Context

_OF_ITEMS = frozenset({"max", "min", "sorted", "any", "all"})
_NAMES = _OF_ITEMS | {"equal", "is_nonzero"}


def asks_truth(node: ast.Call, context: Context) -> bool:
    """Return whether a call takes the truth of traced values."""
    if last_name(node.func) not in _NAMES:
        return False
    return is_choice(node, context) or _is_over_items(node, context) or _is_equal(node, context)


def is_choice(node: ast.Call, context: Context) -> bool:
    """Return whether a call is Python's `max` or `min` of several values, one of them traced."""
    match node:
        case ast.Call(func=ast.Name(id="max" | "min" as name), args=[_, _, *_], keywords=[]):
            return not context.module.binds_otherwise(name) and any(
                context.is_traced(argument) for argument in node.args
            )
        case _:
            return False


def _is_over_items(node: ast.Call, context: Context) -> bool:
    """Return whether a call is one of Python's functions that compare a tensor's elements."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[items]) if name in _OF_ITEMS:
            return not context.module.binds_otherwise(name) and is_one_tensor(items, context)
        case _:
            return False


def _is_equal(node: ast.Call, context: Context) -> bool:
    """Return whether a call returns the truth of traced tensors as a Python bool."""
    match node:
        case ast.Call(func=ast.Attribute(attr="equal", value=value), args=[first, *_]):
            is_torch = context.name(node.func) == "torch.equal"
            return context.is_traced(first if is_torch else value)
        case ast.Call(func=ast.Attribute(value=value, attr="is_nonzero"), args=[]):
            return context.is_traced(value)
        case _:
            return False


def is_list_of_numbers(items: ast.expr) -> bool:
    """Return whether items are written out and none is a string: text is looked up in text."""
    if not isinstance(items, ast.Tuple | ast.List):
        return False
    return not any(isinstance(e, ast.Constant) and isinstance(e.value, str) for e in items.elts)
