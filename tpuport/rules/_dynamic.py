"""Calls that return a tensor whose shape depends on traced values."""

import ast

from tpuport.rules._masks import is_number
from tpuport.source.rewrite.matching import Context

# For each name the position of the argument that decides the size (0 is also the tensor that a
# method is called on), and the keywords under which it may be passed.
_COUNTED: dict[str, tuple[int, tuple[str, ...]]] = {
    "argwhere": (0, ("input",)),
    "bincount": (0, ("input",)),
    "combinations": (0, ("input",)),
    "masked_select": (1, ("mask",)),
    "nonzero": (0, ("input",)),
    "nonzero_static": (0, ("input",)),
    "unique": (0, ("input",)),
    "unique_consecutive": (0, ("input",)),
}
_METHODS = (frozenset(_COUNTED) | {"repeat_interleave"}) - {"combinations"}
_KNOWN = _METHODS | {"combinations", "one_hot", "where"}


def why_dynamic(call: ast.Call, context: Context) -> str | None:
    """Return the source of what the size of a call's result depends on, or None if it is static."""
    name, arguments = _called(call, context)
    if name is None:
        return None
    if name in _COUNTED:
        position, keywords = _COUNTED[name]
        decides = _argument(call, arguments, position, keywords)
        return _text(decides) if _is_value(decides, context) else None
    if name in ("where", "one_hot"):
        return _of_where_or_one_hot(name, call, arguments, context)
    return _of_repeat(call, arguments, context)


def _called(call: ast.Call, context: Context) -> tuple[str | None, list[ast.expr]]:
    """Return the name of torch's function and all its arguments, a method's tensor first."""
    function = call.func
    last = function.attr if isinstance(function, ast.Attribute) else ""
    if isinstance(function, ast.Name):
        last = (context.name(function) or "").rpartition(".")[2]
    if last not in _KNOWN or any(isinstance(argument, ast.Starred) for argument in call.args):
        return None, []
    name = context.name(function)
    if name is not None:
        is_torch = name.rpartition(".")[0] in ("torch", "torch.nn.functional", "torch.Tensor")
        return (last if is_torch else None), call.args
    if last not in _METHODS or not isinstance(function, ast.Attribute):
        return None, []
    is_traced = context.is_traced(function.value)
    return (last if is_traced else None), [function.value, *call.args]


def _argument(
    call: ast.Call, arguments: list[ast.expr], position: int, keywords: tuple[str, ...]
) -> ast.expr | None:
    if position < len(arguments):
        return arguments[position]
    return next((k.value for k in call.keywords if k.arg in keywords), None)


def _is_value(node: ast.expr | None, context: Context) -> bool:
    return node is not None and context.is_traced(node) and not is_number(node, context)


def _text(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def _of_where_or_one_hot(
    name: str, call: ast.Call, arguments: list[ast.expr], context: Context
) -> str | None:
    if not arguments or not _is_value(arguments[0], context):
        return None
    if name == "where":
        return _text(arguments[0]) if len(arguments) == 1 and not call.keywords else None
    classes = _argument(call, arguments, 1, ("num_classes",))
    if classes is None or ast.unparse(classes) == "-1":
        return f"the largest of {_text(arguments[0])}"
    return None


def _of_repeat(call: ast.Call, arguments: list[ast.expr], context: Context) -> str | None:
    repeats = _argument(call, arguments, 1, ("repeats",))
    if repeats is None and len(arguments) == 1:
        repeats = arguments[0]
    return _text(repeats) if _is_value(repeats, context) else None
