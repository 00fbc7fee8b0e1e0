"""Calls that accept rows of unknown number: losses, reshapes, sizes of other axes."""

import ast
from collections.abc import Sequence

from tpuport.rules._masks import bindings
from tpuport.source.inference.rowwise import LOSS_MODULES
from tpuport.source.rewrite.matching import Context

_LOSS_OPTIONS = ("beta", "delta", "ignore_index", "input", "label_smoothing", "target")


def loss_modules(function: ast.expr, context: Context) -> str | None:
    """Return the torch function that a loss module computes, if an expression surely is one."""
    match function:
        case ast.Call(func=made, args=[]):
            root, _, last = (context.name(made) or "").rpartition(".")
            is_loss = root in ("torch.nn", "torch.nn.modules.loss") and is_plain_loss(function)
            return LOSS_MODULES.get(last) if is_loss else None
        case ast.Name():
            return _one_of([value for _, value in bindings(function, context)], context)
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return _one_of(_given_to_self(name, function, context), context)
        case _:
            return None


def _one_of(values: Sequence[ast.AST | None], context: Context) -> str | None:
    """Return the function of all modules in a list, if it is the same for each."""
    found = {
        loss_modules(value, context) if isinstance(value, ast.Call) else None for value in values
    }
    return found.pop() if len(found) == 1 else None


def _given_to_self(name: str, near: ast.expr, context: Context) -> list[ast.AST | None]:
    """Return the values that the class around an expression assigns to an attribute."""
    around = (p for p in context.module.ancestors(near) if isinstance(p, ast.ClassDef))
    owner = next(around, None)
    found: list[ast.AST | None] = []
    for node in ast.walk(owner) if owner is not None else ():
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if node.attr == name:
                parent = context.module.parents[node]
                found.append(parent.value if isinstance(parent, ast.Assign) else None)
    return found


def is_plain_loss(call: ast.Call) -> bool:
    """Return whether a loss sums or averages over all rows."""
    for keyword in call.keywords:
        if keyword.arg == "reduction":
            if ast.unparse(keyword.value) not in ("'mean'", "'sum'"):
                return False
        elif keyword.arg not in _LOSS_OPTIONS:
            return False
    return len(call.args) <= 2


def starts_with_minus_one(args: Sequence[ast.expr]) -> bool:
    """Return whether the first size of a reshape is -1, which keeps the rows in front."""
    first = args[0] if args else None
    if isinstance(first, ast.Tuple | ast.List):
        first = first.elts[0] if first.elts else None
    return first is not None and ast.unparse(first) == "-1"


def is_other_axis(axis: ast.expr) -> bool:
    """Return whether a number names another axis than the first, that of the rows.

    The last axis could be the first, too: then the helper refuses the size when it runs.
    """
    match axis:
        case ast.Constant(value=int(number)):
            return number > 0
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1)):
            return True
        case _:
            return False
