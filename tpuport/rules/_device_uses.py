"""Where the name of a device is used as one, and what becomes of that on a TPU machine."""

import ast
import re
from dataclasses import dataclass
from typing import ClassVar

from tpuport.source.engine import Context
from tpuport.source.finding import Severity
from tpuport.source.module import FUNCTIONS
from tpuport.source.names import all_arguments

_NAME = re.compile(r"^cuda(:\d+)?$")
_DEVICE = re.compile(r"(^|_)device(_map|_type)?$|^map_location$")
# Calls that take the name of a device by position, and where.
_POSITIONS = {
    **dict.fromkeys(("torch.device", "torch.Generator", "torch.set_default_device"), 0),
    **{"torch.distributed.device_mesh.init_device_mesh": 0, "torch.load": 1},
}
# Calls that only ask, or that other rules look after.
_OTHERS = re.compile(
    r"autocast|amp\.|GradScaler|custom_fwd|add_argument|library|profil|skip|mark\."
)


@dataclass(frozen=True)
class Use:
    """How a device's name is used.

    Attributes:
        severity: What happens in the step or in set-up if the finding stays.
    """

    severity: Severity

    # Around an expression here a conditional expression needs no parentheses.
    FREE_PARENTS: ClassVar = (
        *(ast.keyword, ast.Call, ast.Assign, ast.AnnAssign, ast.Return, ast.arguments),
        *(ast.Dict, ast.List, ast.Tuple, ast.Set),
    )


def device_use(node: ast.expr, context: Context) -> Use | None:
    """How a string constant or f-string names a device, or None if it does not."""
    if isinstance(node, ast.Constant) and not _NAME.match(str(node.value)):
        return None
    inner, parent = _outermost_choice(node, context)
    match parent:
        case ast.Call():
            return _argument_use(parent, inner, context)
        case ast.keyword(arg=str(name)) if _DEVICE.search(name):
            call = context.module.parents[parent]
            return _call_use(call, context) if isinstance(call, ast.Call) else None
        case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
            return _variable_use(target, node, context)
        case ast.Dict(keys=keys, values=values):
            key = keys[values.index(inner)] if inner in values else None
            is_device = isinstance(key, ast.Constant) and _DEVICE.search(str(key.value))
            return Use(Severity.ERROR) if is_device else None
        case ast.arguments():
            return _default_use(parent, inner)
        case _:
            return None


def _outermost_choice(node: ast.expr, context: Context) -> tuple[ast.expr, ast.AST]:
    """The choice between values that an expression is part of, and what that is part of."""
    parent = context.module.parents[node]
    while isinstance(parent, ast.BoolOp) or (
        isinstance(parent, ast.IfExp) and parent.test is not node
    ):
        node, parent = parent, context.module.parents[parent]
    return node, parent


def _argument_use(call: ast.Call, argument: ast.expr, context: Context) -> Use | None:
    if argument not in call.args:
        return None
    place = call.args.index(argument)
    if isinstance(call.func, ast.Attribute) and call.func.attr == "to" and place == 0:
        return _call_use(call, context)
    name = context.name(call.func)
    if name is not None:
        return _call_use(call, context) if _POSITIONS.get(name) == place else None
    return Use(Severity.ERROR) if _DEVICE.search(_parameter(call, place, context)) else None


def _parameter(call: ast.Call, place: int, context: Context) -> str:
    """The name of the parameter that takes an argument, where this file has the function."""
    match call.func:
        case ast.Name(id=name):
            skipped = 0
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
            skipped = 1
        case _:
            return ""
    for node in context.module.nodes:
        if isinstance(node, FUNCTIONS) and node.name == name:
            arguments = [a.arg for a in all_arguments(node.args)][skipped:]
            return arguments[place] if place < len(arguments) else ""
    return ""


def _call_use(call: ast.Call, context: Context) -> Use | None:
    """What a call makes of the name: torchax puts new tensors where it likes, inside the step."""
    written = ast.unparse(call.func)
    if _OTHERS.search(context.name(call.func) or written):
        return None
    if isinstance(context.module.parents[call], ast.Compare):
        return None
    if not context.in_step(call) or not _redirected(call, context):
        return Use(Severity.ERROR)
    return Use(Severity.SLOW)


def _redirected(call: ast.Call, context: Context) -> bool:
    name = context.name(call.func)
    if name is not None:
        return name.startswith("torch.") and name.count(".") == 1 and not name.endswith("_like")
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "to"
        and not context.is_traced(call.func.value)
    )


def _variable_use(target: ast.expr, node: ast.expr, context: Context) -> Use | None:
    name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
    if not _DEVICE.search(name):
        return None
    if isinstance(context.module.scope(node), ast.ClassDef):
        return Use(Severity.NOTE)  # a default that callers may change
    in_process = isinstance(node, ast.JoinedStr) or context.in_step(node)
    return Use(Severity.SLOW if in_process else Severity.ERROR)


def _default_use(arguments: ast.arguments, default: ast.expr) -> Use | None:
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [
        *zip(reversed(positional), reversed(arguments.defaults), strict=False),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    taken = any(value is default and _DEVICE.search(argument.arg) for argument, value in pairs)
    return Use(Severity.NOTE) if taken else None
